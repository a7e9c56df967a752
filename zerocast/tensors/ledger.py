"""Ledger: has memory been moved, replaced or written since it was looked at?

Note: memory that moves
~~~~~~~~~~~~~~~~~~~~~~~
Launches hold addresses. Torch gives other memory to a tensor object (``.data = ...``, ``set_``,
``swap_tensors``), or to a storage, and so to all of its tensors (``resize_``, ``share_memory_``),
and calls nobody. So who has prepared launches watches the tensors (:func:`watch`), and asks before
each use whether one has changed (:meth:`Token.changed`). Each look is one call in C.

What is looked at is the *scope*. Tensor objects that other code has are looked at one by one
("tensor"). Of objects that nobody else has, only storages can move: one tensor of each storage is
enough ("storage"), and a look takes as long for thousands of weights as for one.

Where zerocast itself replaces a buffer of a weight, it announces that (:func:`announce`). Until
then nobody has to ask whether the buffers of a weight are other tensors.

Note: writes
~~~~~~~~~~~~
Torch counts writes in ``tensor._version``, but for those of inference mode, of compiled code, of
other libraries and through ``.data``. :data:`WRITES` looks at that count, and at which storage it
belongs to, because an address may be that of memory which was freed meanwhile. A digest of the
bytes finds the other writes (:meth:`Token.differs`), at the price of reading them.

NOT here: whether copies that were derived from codes are older than these
(:mod:`zerocast.tensors.staleness`).
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
"""What is looked at: every tensor, or one of each storage."""


def check_scope(scope: Scope) -> Scope:
    """Return ``scope``; :class:`InputError` for what is none."""
    check_choice("scope", scope, get_args(Scope))
    return scope


Look: TypeAlias = Callable[[torch.Tensor], object]


def memory_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a key that all views of one memory share, and no other memory, empty or freed. It
    keeps no memory alive.
    """
    return StorageWeakRef(tensor.untyped_storage())


def counted_writes(tensor: torch.Tensor) -> int:
    """Return torch's count of the writes to ``tensor`` and its views; 0 where it has none."""
    return 0 if tensor.is_inference() else tensor._version


ADDRESS: tuple[Look, ...] = (torch.Tensor.data_ptr,)
"""Where a tensor begins. Whoever changes its size keeps the memory or moves it."""

FORM: tuple[Look, ...] = (
    *ADDRESS,
    torch.Tensor.numel,
    torch.Tensor.is_contiguous,
    attrgetter("dtype"),
)
"""What a caller may change of a tensor, with its address."""

WRITES: tuple[Look, ...] = (memory_of, counted_writes)
"""The storage itself, and its writes."""

WEIGHT: tuple[Look, ...] = (attrgetter("quantized_storage"),)
"""Which weight a quantized tensor is."""


def look_at(tensors: Sequence[torch.Tensor], looks: Iterable[Look]) -> list[list[object]]:
    """Return what ``looks`` find at ``tensors`` now: equal as long as none has changed."""
    return [list(map(look, tensors)) for look in looks]


def one_of_each_storage(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return aliases of some of ``tensors``, one for each storage."""
    by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    return [tensor.detach() for tensor in by_storage.values()]


class Token:
    """Some tensors, and how they were when they were watched.

    Args:
        tensors: those that are watched.
        looks: what is compared, such as :data:`ADDRESS`.
        scope: which of them are looked at. Of one of each storage only the address can change.

    Attributes:
        tensors: those that are looked at.
        found: what the looks found, one list for each.
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
        """Whether a look finds something else now."""
        return look_at(self.tensors, self._looks) != self.found

    @property
    def is_announced(self) -> bool:
        """Whether a move was announced since, maybe of other weights."""
        return self._announced != _announced[self._scope]

    def note_announced(self) -> None:
        """Note that what was announced until now is of other weights."""
        self._announced = _announced[self._scope]

    def keep_bytes(self) -> None:
        """Take the bytes as they are now, for :meth:`differs`."""
        found = self._digests.of(self.tensors)
        if self._bytes is None:
            self._bytes = found.clone()
        else:  # where a CUDA graph may read it
            self._bytes.copy_(found)

    def differs(self) -> torch.Tensor:
        """Return, bool [len(tensors)] on their device, whose bytes are others than were kept."""
        return self._digests.of(self.tensors) != present(self._bytes)


def watch(
    tensors: Iterable[torch.Tensor], looks: Sequence[Look] = ADDRESS, scope: Scope = "tensor"
) -> Token:
    """Look at ``tensors``, and return what says later whether they have changed."""
    return Token(tensors, looks, scope)


_numbers = itertools.count(1)
_announced: dict[Scope, int] = {"tensor": 0, "storage": 0}


def announce(*scopes: Scope) -> None:
    """Make those who watch with one of ``scopes`` find the buffers of their weights again, by
    default all: some buffer was replaced, or a gather into it has begun. A gather of a
    ZeroOptimizer is announced to the scope "tensor" alone: its own plan waits for it.
    """
    for scope in scopes or ("tensor", "storage"):
        _announced[scope] = next(_numbers)


def announced(scope: Scope) -> int:
    """Return a number that :func:`announce` changes: so one comparison tells whether it was
    called.
    """
    return _announced[scope]
