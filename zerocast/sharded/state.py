"""Keeps the recipe state of a master, and the values that were cast, between casts.

Delayed scaling keeps amaxes and scales, stochastic rounding counts its casts. Both change with
every cast, and codes are not saved. So the state is saved as it is, and whether the cast of the
masters beside it is due. A run that resumes from there makes the cast that was due, or repeats the
one that was made, from the state that :meth:`Recipe.rewind` gives; unless the masters are written
before, which have the next cast then, as they had it without a stop. So it has the same codes and
the same state, bit for bit, on any number of ranks. A copy of a master resumes in the same way.

A cast is due if a master has other values than those that were cast (:class:`CastValues`).

NOT here: where and how the state is stored in a state dict (:mod:`zerocast.nn.saved_state`).
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerocast.errors import InputError
from zerocast.recipes import Recipe, recipe_to_values
from zerocast.recipes.recipe import Buffers
from zerocast.sharded.placement import counted_with, write_counter
from zerocast.tensors.digest import digest
from zerocast.tensors.ledger import counted_writes, memory_of

State = dict[str, torch.Tensor]
"""The tensors of a recipe state, by the names of :attr:`Recipe.state`; the same on every rank."""


def fresh_state(recipe: Recipe) -> State:
    """Return the state of ``recipe`` before the first cast, on the CPU."""
    specs = recipe.own_buffers()
    with torch.inference_mode(False):  # else only inference could ever write it
        return {name: specs[name].allocate(torch.device("cpu")) for name in recipe.state}


def check_saved_state(
    name: str, recipe: Recipe, own: Buffers, saved: object, given: Buffers, remedy: str
) -> None:
    """Do what :func:`check_state` does, of a state that was ``saved`` under a recipe of these
    values, those of :func:`zerocast.recipes.recipe_to_values`.
    """
    ours = recipe_to_values(recipe)
    theirs = saved if isinstance(saved, dict) else {}
    if differing := [key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)]:
        ours_text, theirs_text = (
            ", ".join(f"{key} {each.get(key)!r}" for key in differing) for each in (ours, theirs)
        )
        raise InputError(
            f"recipe state must be loaded into a weight of the same recipe: the state of {name} "
            f"was saved under one of {theirs_text}, and the weight's is of {ours_text}; {remedy}."
        )
    check_state(name, recipe, own, given, remedy)


def check_state(name: str, recipe: Recipe, own: Buffers, given: Buffers, remedy: str) -> None:
    """Raise :class:`InputError` if ``given`` is not a state that ``recipe`` leaves of weight
    ``name``, whose state is ``own``; the message of a state of another recipe ends in ``remedy``.
    """
    ours, theirs = (
        {f"{key} {tensor.dtype} {list(tensor.shape)}" for key, tensor in state.items()}
        for state in (own, given)
    )
    if ours != theirs:
        ours_text, theirs_text = (", ".join(sorted(each)) or "nothing" for each in (ours, theirs))
        raise InputError(
            f"recipe state must be loaded into a weight of the same recipe: the state of {name} "
            f"is {ours_text}, and the state dict has {theirs_text} for it; {remedy}."
        )
    if (wrong := recipe.wrong_state(given)) is not None:
        raise InputError(
            f"the recipe state of {name} must be one that casts have left, got {wrong}; the "
            "state is damaged."
        )


class CastValues:
    """The values of one master that its codes were made from, on one rank.

    Most writes are seen: an operation on a master reports that it writes (:meth:`written`), and
    torch counts writes to the same memory through other tensors. Kernels of torch.compile, other
    libraries and code that uses the address write unseen; a digest of the values finds those
    writes, at the price of reading the master.

    torch counts a write to a DTensor for the DTensor, and not for the memory on this rank. So what
    a state dict returns (:meth:`count_writes`) shares a counter that this object knows.

    A copy of cast values is no new value: FSDP2 moves rows into memory that it pads, on some ranks
    only. So the memory of such a copy is kept, too.

    Attributes:
        are_loaded: whether the values, and the state after their cast, were loaded or copied, and
            no cast has made their codes here. They may be sharded before, so that a copy of some
            rows is no new value, either.
    """

    def __init__(self) -> None:
        # By memory, which this keeps no longer than others do: torch's count of writes at the cast.
        self._versions: dict[StorageWeakRef, int] = {}
        self._kind: tuple[torch.Size, torch.dtype] | None = None
        self._digest: torch.Tensor | None = None
        self._counter: torch.Tensor | None = None  # a DTensor that counts writes, without memory
        self._counted = 0
        self._others = 0  # writes that neither torch nor that DTensor counts
        self.are_loaded = False

    def are_in(self, tensor: torch.Tensor) -> bool:
        """Say whether ``tensor`` has the values that were cast last, but for writes unseen."""
        if self._count() != self._counted:
            return False
        return self._versions.get(memory_of(tensor)) == counted_writes(tensor)

    def differ_from(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return int32 [] on the device of ``tensor``: 1 if it was written since it was cast, seen
        or unseen, else 0.
        """
        if self._digest is None or not self.are_in(tensor):
            return torch.ones((), dtype=torch.int32, device=tensor.device)
        if self.are_loaded and (tensor.shape, tensor.dtype) != self._kind:  # some rows of it
            return torch.zeros((), dtype=torch.int32, device=tensor.device)
        return (digest(tensor) != self._digest).to(torch.int32)

    def set_to(self, tensor: torch.Tensor, *, are_loaded: bool = False) -> None:
        """Note that ``tensor`` has been cast, here or where it was saved."""
        self._versions = {memory_of(tensor): counted_writes(tensor)}
        self._kind = tensor.shape, tensor.dtype
        self._digest = digest(tensor)
        self._counted = self._count()
        self.are_loaded = are_loaded

    @property
    def uncounted(self) -> tuple[int, int]:
        """What changes with the writes that are seen and that torch does not count for the
        memory.
        """
        return self._others, self._count()

    def count_writes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of ``tensor``, a DTensor of a master's memory, whose writes are seen."""
        with torch.inference_mode(False):  # which counts no writes
            if self._counter is None:
                self._counter = write_counter(tensor)
                self._counted = self._count()
            return counted_with(self._counter, tensor)

    def forget(self) -> None:
        """Note that the master may hold any values."""
        self._versions, self.are_loaded = {}, False
        self._others += 1

    def written(self, tensor: torch.Tensor) -> None:
        """Note that an operation which torch does not count has written ``tensor``."""
        self._versions.pop(memory_of(tensor), None)
        self._others += 1

    def copied(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note that ``source`` was copied into ``target``: that has cast values if all rows were
        copied, unrounded, from memory that has them.
        """
        kinds = {self._kind, (source.shape, source.dtype), (target.shape, target.dtype)}
        is_known = self.are_in(source) and len(kinds) == 1
        if self.are_loaded and source.dtype == target.dtype:  # a piece has no count of writes
            is_known = memory_of(source) in self._versions
        if is_known and memory_of(source) != memory_of(target):
            self._versions[memory_of(target)] = counted_writes(target)
            self._others += 1
        else:
            self.written(target)

    def _count(self) -> int:
        return 0 if self._counter is None else counted_writes(self._counter)
