"""Keeps the recipe state of a master, and tracks the values that were cast, between casts.

Delayed scaling keeps amaxes and scales, stochastic rounding counts its casts. Both change with
every cast, and codes are not saved. A checkpoint therefore stores the current state, and whether
the saved masters are due for a cast. A resumed run makes the due cast, or repeats the latest one
from the state that :meth:`Recipe.rewind` gives. If the masters are written before, they get the
next cast, as in an uninterrupted run. So codes and state are the same, bit for bit, on any number
of ranks. A copy of a master resumes in the same way.

A cast is due if the values of a master differ from those that were cast (:class:`CastValues`).

NOT here: how the state is stored in a state dict (:mod:`zerocast.nn.saved_state`).
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
"""The tensors of a recipe's state, by the names of :attr:`Recipe.state`; equal on all ranks."""


def fresh_state(recipe: Recipe) -> State:
    """Return the state of ``recipe`` before the first cast, on the CPU."""
    specs = recipe.own_buffers()
    with torch.inference_mode(False):  # else it could not be written outside inference mode
        return {name: specs[name].allocate(torch.device("cpu")) for name in recipe.state}


def check_saved_state(
    name: str, recipe: Recipe, own: Buffers, saved: object, given: Buffers, remedy: str
) -> None:
    """Check a state as :func:`check_state` does, and the recipe that it was ``saved`` under, given
    as values of :func:`zerocast.recipes.recipe_to_values`.
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
    """Raise :class:`InputError` if ``given`` is not a valid state of ``recipe`` for weight
    ``name``, whose current state is ``own``. If it is another recipe's, the message ends in
    ``remedy``.
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
            f"the recipe state of {name} must be one that casts produce, got {wrong}; the state is "
            "damaged."
        )


class CastValues:
    """The values of one master that were cast last, on one rank.

    Most writes are seen: an operation on a master reports that it writes (:meth:`written`), and
    torch counts writes to the same memory through other tensors. Writes by torch.compile's kernels,
    by other libraries and by address are unseen. A digest of the values detects them, at the cost
    of reading the master.

    torch counts a write to a DTensor for the DTensor, and not for the local memory. So the tensors
    that a state dict returns (:meth:`count_writes`) share a version counter with this object.

    A copy of cast values is not a new value: FSDP2 moves rows into padded memory, on some ranks
    only. So the memory of such a copy is recorded, too.

    Attributes:
        are_loaded: whether the values, and the state after their cast, were loaded or copied, and
            no cast has made their codes here. The values may be sharded before the cast, so a copy
            of some rows is not a new value, either.
    """

    def __init__(self) -> None:
        # torch's write count at the cast, by memory, to which this holds no strong reference.
        self._versions: dict[StorageWeakRef, int] = {}
        self._kind: tuple[torch.Size, torch.dtype] | None = None
        self._digest: torch.Tensor | None = None
        self._counter: torch.Tensor | None = None  # a DTensor that counts writes, without memory
        self._counted = 0
        self._others = 0  # writes that neither torch nor that DTensor counts
        self.are_loaded = False

    def are_in(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has the values that were cast last, ignoring unseen writes."""
        if self._count() != self._counted:
            return False
        return self._versions.get(memory_of(tensor)) == counted_writes(tensor)

    def differ_from(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return int32 [] on the device of ``tensor``: 1 if it was written since its cast, seen or
        unseen, else 0.
        """
        if self._digest is None or not self.are_in(tensor):
            return torch.ones((), dtype=torch.int32, device=tensor.device)
        if self.are_loaded and (tensor.shape, tensor.dtype) != self._kind:  # some rows of it
            return torch.zeros((), dtype=torch.int32, device=tensor.device)
        return (digest(tensor) != self._digest).to(torch.int32)

    def set_to(self, tensor: torch.Tensor, *, are_loaded: bool = False) -> None:
        """Note that ``tensor`` has been cast, here or before it was saved."""
        self._versions = {memory_of(tensor): counted_writes(tensor)}
        self._kind = tensor.shape, tensor.dtype
        self._digest = digest(tensor)
        self._counted = self._count()
        self.are_loaded = are_loaded

    @property
    def uncounted(self) -> tuple[int, int]:
        """Counters of the seen writes that torch does not count for the memory."""
        return self._others, self._count()

    def count_writes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of ``tensor``, a DTensor of a master's memory, whose writes are seen."""
        with torch.inference_mode(False):  # inference mode counts no writes
            if self._counter is None:
                self._counter = write_counter(tensor)
                self._counted = self._count()
            return counted_with(self._counter, tensor)

    def forget(self) -> None:
        """Note that the master may hold any values."""
        self._versions, self.are_loaded = {}, False
        self._others += 1

    def written(self, tensor: torch.Tensor) -> None:
        """Note that an operation whose writes torch does not count has written ``tensor``."""
        self._versions.pop(memory_of(tensor), None)
        self._others += 1

    def copied(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note that ``source`` was copied into ``target``. ``target`` then has cast values if all
        rows were copied, unrounded, from memory that has them.
        """
        kinds = {self._kind, (source.shape, source.dtype), (target.shape, target.dtype)}
        is_known = self.are_in(source) and len(kinds) == 1
        if self.are_loaded and source.dtype == target.dtype:  # a piece has no write count
            is_known = memory_of(source) in self._versions
        if is_known and memory_of(source) != memory_of(target):
            self._versions[memory_of(target)] = counted_writes(target)
            self._others += 1
        else:
            self.written(target)

    def _count(self) -> int:
        return 0 if self._counter is None else counted_writes(self._counter)
