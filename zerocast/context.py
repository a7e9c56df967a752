"""autocast and model_init: the regions of a program in which layers quantize.

Inside :class:`autocast` zerocast's layers quantize the operands of their GEMMs; inside
:func:`model_init` they are made with quantized weights. What is active belongs to the thread (or
asyncio task) that entered the region, so ranks that are threads have regions of their own.

Note: when amaxes are reduced
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Delayed scaling (:class:`zerocast.DelayedScaling`) makes scales from amaxes that all ranks agree on.
They are reduced on leaving the *outermost* region of a thread, by one all-reduce for all tensors of
all layers that have run under that group. It carries

* the amaxes of inputs, weights and outputs that the region has seen, the largest one where a layer
  ran more than once, and
* the amaxes of gradients that have come in since the last reduction. A backward usually runs after
  its region was left, so those of one step travel with the next one. That is in time: what they
  change is the scale of the next backward, which comes after the next region.

Nothing is reduced, and nothing waits for other ranks, where a region is left by an exception: a
collective then would hang if the others failed elsewhere or not at all. What its forward had
recorded is dropped. Ranks that did not fail wait in the reduction, as they would in any collective
that a failing rank does not come to, until the communicator tells them that it is gone. Nor where a
region is left with gradients disabled and nothing was recorded: an evaluation, on one rank or on
all, leaves histories and scales alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from zerocast.backends.availability import compute_capability, is_mxfp8_available
from zerocast.comm import Communicator, as_communicator
from zerocast.comm.groups import Group
from zerocast.errors import InputError
from zerocast.recipes import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from zerocast.tensors import AmaxReduction, RecipeState
from zerocast.tensors.tape import Tape, noting, replaying

# --- autocast ---


class _Rank(threading.local):
    """What a thread keeps from region to region: its reductions, by group."""

    def __init__(self) -> None:
        self.reductions: dict[Communicator, AmaxReduction] = {}


_rank = _Rank()


class _Region:
    """An outermost region of one thread, with all that is nested in it.

    Attributes:
        thread: which.
        reductions: those of the thread.
        groups: those of this region and of the nested ones, in order.
        recorded: the states of forwards that record amaxes in here.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.reductions = _rank.reductions
        self.groups: dict[Communicator, None] = {}
        self.recorded: dict[RecipeState, None] = {}

    def reduction(self, group: Communicator) -> AmaxReduction:
        """The reduction over ``group``."""
        if group not in self.reductions:
            self.reductions[group] = AmaxReduction(group)
        return self.reductions[group]

    def leave(self, *, failed: bool) -> None:
        """Reduce, or drop what a failed region has recorded."""
        if failed:
            for state in self.recorded:
                state.amaxes.zero_()
        elif self.recorded or torch.is_grad_enabled():
            for group in self.groups:
                if group in self.reductions:
                    self.reductions[group].run()


@dataclass(frozen=True, eq=False)
class Autocast:
    """What is active where a layer runs; :func:`current` gives it.

    Attributes:
        enabled: whether operands of GEMMs are to be quantized.
        recipe: how; None outside of any region.
        calibrating: whether amaxes are to be recorded, also where nothing is quantized.
        group: over which amaxes are reduced; None outside of any region.
    """

    enabled: bool = False
    recipe: Recipe | None = None
    calibrating: bool = False
    group: Communicator | None = None
    _outer: Autocast | None = field(default=None, repr=False)
    _region: _Region | None = field(default=None, repr=False)

    def enrol(self, *states: RecipeState) -> None:
        """Called by a layer's forward, before it quantizes, with the states of its forward and its
        backward: leaving the region reduces their amaxes. Where a rank has no rows for the layer it
        calls this all the same, so that the ranks' states join in one order.

        Without gradients the forward records none, unless the region is calibrating. So call it
        from a module's forward, not from an autograd.Function's, inside of which torch has
        gradients disabled.
        """
        assert self._region is not None, "only a layer that runs in a region has states to enrol"
        assert self.group is not None
        records = self.calibrating or torch.is_grad_enabled()
        for state in states:
            if state.is_delayed:
                state.join(self._region.reduction(self.group))
                if state.mode == "forward":
                    state.records = records
                    if records:
                        self._region.recorded[state] = None


_OUTSIDE = Autocast()
_active: ContextVar[Autocast] = ContextVar("zerocast_autocast", default=_OUTSIDE)


def current() -> Autocast:
    """What is active here; ``enabled`` and ``calibrating`` are False outside of any region."""
    return _active.get()


open_regions = 0
"""Regions that are open in any thread. torch.compile can guard on this number and cannot read a
context variable: a graph that was traced at 0 is not used inside a region."""

_counting = threading.Lock()


def _count_regions(change: int) -> None:
    global open_regions
    with _counting:
        open_regions += change


class autocast(ContextDecorator):
    """Within the context, zerocast's layers quantize the operands of their GEMMs.

    It nests, and the innermost one counts: ``autocast(enabled=False)`` inside another keeps its
    layers in high precision. It may be entered again, and decorates functions, too. Under delayed
    scaling leaving the outermost one is collective over ``amax_reduction_group``; the note above
    says what it does.

    Args:
        enabled: whether layers quantize.
        recipe: how; :func:`get_default_recipe` by default.
        calibrating: record amaxes, for the state of delayed scaling, where ``enabled=False`` keeps
            the layers in high precision, and without gradients, too.
        amax_reduction_group: the ranks whose amaxes are reduced: whatever
            :func:`zerocast.as_communicator` takes. All of them run the same layers, in the same
            order when those run for the first time. With ``zerocast.comm.SingleRank()`` every rank
            keeps to its own.

    Raises:
        InputError: for another recipe or group.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        calibrating: bool = False,
        amax_reduction_group: Group = None,
    ) -> None:
        _check_recipe(recipe)
        self._enabled, self._recipe, self._calibrating = enabled, recipe, calibrating
        self._group = amax_reduction_group

    def __enter__(self) -> Autocast:
        """Returns what is active now."""
        recipe = get_default_recipe() if self._recipe is None else self._recipe
        group = as_communicator(self._group)
        outer = _active.get()
        region = outer._region
        if region is None or region.thread != threading.get_ident():
            region = _Region()
        region.groups[group] = None
        active = Autocast(self._enabled, recipe, self._calibrating, group, outer, region)
        _active.set(active)
        _count_regions(+1)
        return active

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = _active.get()
        assert left._outer is not None
        assert left._region is not None
        _active.set(left._outer)
        _count_regions(-1)
        if left._region is not left._outer._region:
            left._region.leave(failed=kind is not None)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Group = None,
) -> autocast:
    """:class:`autocast` under TransformerEngine's earlier name, with its parameters in its
    order.
    """
    return autocast(enabled, fp8_recipe, calibrating, fp8_group)


def reduce_amaxes(amax_reduction_group: Group = None) -> None:
    """Reduce now what waits for the next leaving of an outermost region: the amaxes of gradients.

    Collective over the group. It makes the states of all ranks equal, so that one rank can save
    them for all; that the amaxes arrive earlier changes no later scale.
    """
    reduction = _rank.reductions.get(as_communicator(amax_reduction_group))
    if reduction is not None:
        reduction.run()


class _Recomputation(AbstractContextManager[None]):
    """What was active in a forward, for computing it again; may be entered once a backward."""

    def __init__(self, active: Autocast, tape: Tape) -> None:
        self._active, self._tape = active, tape
        self._stack = ExitStack()

    def __enter__(self) -> None:
        token = _active.set(self._active)
        self._stack.callback(_active.reset, token)
        _count_regions(+1)
        self._stack.callback(_count_regions, -1)
        self._stack.enter_context(replaying(self._tape))

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For activation checkpointing: a forward that is computed again gives the same codes.

    Pass it where a layer of zerocast is checkpointed inside :class:`autocast`::

        torch.utils.checkpoint.checkpoint(
            block, x, use_reentrant=False, context_fn=zerocast.checkpoint_contexts
        )

    The second run happens in the backward, when the region has usually been left and delayed scales
    have moved on. It runs under what was active in the first one, from the scales that the first
    one used, and records no amaxes.
    """
    tape = Tape()
    return noting(tape), _Recomputation(current(), tape)


# --- model_init ---


@dataclass(frozen=True)
class ModelInit:
    """How layers are made here; :func:`current_model_init` gives it.

    Attributes:
        enabled: whether their weights hold codes.
        recipe: of which scheme; None outside of any region.
        preserve_high_precision_init_val: whether a weight keeps the value that it was quantized
            from, on the CPU (:meth:`zerocast.QuantizedTensor.get_high_precision_init_val`).
    """

    enabled: bool = False
    recipe: Recipe | None = None
    preserve_high_precision_init_val: bool = False


_model_init: ContextVar[ModelInit] = ContextVar("zerocast_model_init", default=ModelInit())  # noqa: B039  # frozen


def current_model_init() -> ModelInit:
    """How layers are made here; ``enabled`` is False outside of any region."""
    return _model_init.get()


@contextmanager
def model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Within the context, zerocast's layers are made with weights that hold codes.

    Args:
        enabled: False, inside another region, makes them in high precision.
        recipe: the scheme; :func:`get_default_recipe` by default.
        preserve_high_precision_init_val: keep each weight's initial value, on the CPU, so that an
            optimizer's masters start from it and not from its rounded form; the first cast clears
            it.

    Raises:
        InputError: for another recipe.
    """
    _check_recipe(recipe)
    recipe = get_default_recipe() if recipe is None else recipe
    token = _model_init.set(ModelInit(enabled, recipe, preserve_high_precision_init_val))
    try:
        yield
    finally:
        _model_init.reset(token)


def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> AbstractContextManager[None]:
    """:func:`model_init` under TransformerEngine's earlier name."""
    return model_init(enabled, recipe, preserve_high_precision_init_val)


def get_default_recipe() -> Recipe:
    """The recipe of a region that is given none: MXFP8 where the device multiplies it
    (:func:`zerocast.is_mxfp8_available`), current scaling on newer devices that do not, delayed
    scaling everywhere else, the CPU included.
    """
    if is_mxfp8_available()[0]:
        return MXFP8BlockScaling()
    capability = compute_capability()
    return (
        DelayedScaling() if capability is None or capability < (12, 0) else Float8CurrentScaling()
    )


def _check_recipe(recipe: object) -> None:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputError(
            f"recipe must be a zerocast recipe such as DelayedScaling() or None, got {recipe!r}."
        )
