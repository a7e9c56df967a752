"""Ledger: has memory been moved, replaced or written since it was last checked?

Note: memory that moves
~~~~~~~~~~~~~~~~~~~~~~~
Launches hold addresses. Torch can give other memory to a tensor object (``.data = ...``, ``set_``,
``swap_tensors``), or to a storage with all of its tensors (``resize_``, ``share_memory_``). It does
not announce this. So code that has prepared launches watches the tensors (:func:`watch`), and
checks before each use whether one has changed (:meth:`Token.changed`). Each check is one call in C.

The *scope* says which tensors are checked. Tensor objects that other code has are checked one by
one ("tensor"). If no other code has the objects, only storages can move: one tensor of each storage
is checked ("storage"), so the time does not depend on the number of weights that share it.

When zerocast itself replaces a buffer of a weight, it announces this (:func:`announce`). Without
an announcement the buffers of a weight are known to be the same tensors.

Note: writes
~~~~~~~~~~~~
Torch counts writes in ``tensor._version``, except those in inference mode, of compiled code, of
other libraries and through ``.data``. :data:`WRITES` compares that count and the storage that it
belongs to, because an address may be that of memory which was freed meanwhile. A digest of the
bytes detects the other writes (:meth:`Token.differs`), at the cost of reading them.

NOT here: whether derived copies are older than the codes (:mod:`zerocast.tensors.staleness`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Literal, TypeAlias, get_args

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerocast.arguments import check_choice, present
from zerocast.tensors.digest import RepeatedDigests

Scope = Literal["tensor", "storage"]
"""What is checked: every tensor, or one of each storage."""


def check_scope(scope: Scope) -> Scope:
    """Return ``scope``; raise :class:`InputError` for an unknown one."""
    check_choice("scope", scope, get_args(Scope))
    return scope


Look: TypeAlias = Callable[[torch.Tensor], object]


def memory_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a key that all views of one memory share, and no other memory, even if empty or freed.

    The key keeps no memory alive.
    """
    return StorageWeakRef(tensor.untyped_storage())


def counted_writes(tensor: torch.Tensor) -> int:
    """Return torch's count of the writes to ``tensor`` and its views; 0 if it has none."""
    return 0 if tensor.is_inference() else tensor._version


ADDRESS: tuple[Look, ...] = (torch.Tensor.data_ptr,)
"""Where a tensor begins. Code that changes its size keeps the memory or moves it."""

FORM: tuple[Look, ...] = (
    *ADDRESS,
    torch.Tensor.numel,
    torch.Tensor.is_contiguous,
    attrgetter("dtype"),
)
"""What a caller may change of a tensor, including its address."""

WRITES: tuple[Look, ...] = (memory_of, counted_writes)
"""The storage itself, and its writes."""

WEIGHT: tuple[Look, ...] = (attrgetter("quantized_storage"),)
"""The weight that a quantized tensor refers to."""


def look_at(tensors: Sequence[torch.Tensor], looks: Iterable[Look]) -> list[list[object]]:
    """Return what ``looks`` find in ``tensors`` now: equal as long as none has changed."""
    return [list(map(look, tensors)) for look in looks]


def one_of_each_storage(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return aliases of some of ``tensors``, one for each storage."""
    by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    return [tensor.detach() for tensor in by_storage.values()]


class Token:
    """Some tensors, and their properties when they were watched.

    Args:
        tensors: the watched tensors.
        looks: what is compared, such as :data:`ADDRESS`.
        scope: which of the tensors are checked; for "storage" only addresses are compared.

    Attributes:
        tensors: the tensors that are checked.
        found: what the looks found, one list for each look.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], looks: Sequence[Look], scope: Scope
    ) -> None:
        if scope == "storage":
            tensors, looks = one_of_each_storage(tensors), ADDRESS
        self.tensors, self._looks, self._scope = list(tensors), looks, scope
        self.found = look_at(self.tensors, looks)
        self._digests = RepeatedDigests()
        self._bytes: torch.Tensor | None = None
        self.note_announced()

    def changed(self) -> bool:
        """Return whether a look now finds something else."""
        return look_at(self.tensors, self._looks) != self.found

    @property
    def is_announced(self) -> bool:
        """Whether a move was announced since, possibly of other weights."""
        return self._announced != _announced[self._scope]

    def note_announced(self) -> None:
        """Ignore earlier announcements: they concern other weights."""
        self._announced = _announced[self._scope]

    def keep_bytes(self) -> None:
        """Record the current bytes, for :meth:`differs`."""
        found = self._digests.of(self.tensors)
        if self._bytes is None:
            self._bytes = found.clone()
        else:  # in place, because a CUDA graph may read it
            self._bytes.copy_(found)

    def differs(self) -> torch.Tensor:
        """Return, bool [len(tensors)] on their device, whose bytes differ from those recorded."""
        return self._digests.of(self.tensors) != present(self._bytes)


def watch(
    tensors: Iterable[torch.Tensor], looks: Sequence[Look] = ADDRESS, scope: Scope = "tensor"
) -> Token:
    """Check ``tensors``, and return the token that later detects changes."""
    return Token(tensors, looks, scope)


_numbers = itertools.count(1)
_announced: dict[Scope, int] = {"tensor": 0, "storage": 0}


def announce(*scopes: Scope) -> None:
    """Make all watchers with one of ``scopes`` find the buffers of their weights again.

    The default is all scopes. Call it when a buffer was replaced, or a gather into one has begun.
    A gather of a ZeroOptimizer is announced to the scope "tensor" only: its plan waits for it.
    """
    for scope in scopes or ("tensor", "storage"):
        _announced[scope] = next(_numbers)


def announced(scope: Scope) -> int:
    """Return a number that :func:`announce` changes, to detect its calls by one comparison."""
    return _announced[scope]
