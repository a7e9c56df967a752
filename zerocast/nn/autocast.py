"""autocast: the regions of a program in which layers quantize the operands of their GEMMs.

What is active belongs to the thread (or asyncio task) that entered the region, so ranks that are
threads have regions of their own.

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

from zerocast.arguments import check_flag
from zerocast.comm import Communicator, SingleRank, as_communicator
from zerocast.comm.groups import Group
from zerocast.errors import InputError
from zerocast.nn import traced_regions
from zerocast.nn.amax_reduction import AmaxReduction
from zerocast.nn.model_init import get_default_recipe
from zerocast.nn.recipe_state import RecipeState
from zerocast.nn.recompute_state import RecomputeState, recording, replaying
from zerocast.nn.traced_regions import HIGH_PRECISION, NO_REGION, UNTRACEABLE, here
from zerocast.recipes import Recipe, as_recipe, recipe_from_text

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
        elif torch._C._current_graph_task_id() != -1:
            return  # A forward that a backward computes again has been reduced before.
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

    def register(self, *states: RecipeState) -> None:
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
    if here.traced.entries and here.traced.entries[-1][0]:  # a compiled function went on uncompiled
        return _of_compiled(here.traced.recipe)
    return _active.get()


def entered() -> Autocast:
    """What is active here but for regions that a compiled function has entered: what an operation
    of its graph finds that was traced under none of those.
    """
    return _active.get()


@contextmanager
def resumed(active: Autocast) -> Iterator[None]:
    """Within the context ``active`` is active once more; leaving it reduces nothing."""
    token = _active.set(active)
    _show(active)
    try:
        yield
    finally:
        _active.reset(token)
        traced_regions.hide()


# --- what torch.compile sees ---

_WHY_UNTRACEABLE = (
    "a compiled graph cannot hold the entering and leaving of a region of zerocast.autocast with "
    "delayed scaling, stochastic rounding or calibration, which reduces amaxes: enter it around "
    "the compiled function, leave fullgraph=False, or use a recipe without them"
)


def _show(active: Autocast) -> None:
    shown = UNTRACEABLE if active.calibrating else HIGH_PRECISION
    if active.enabled and active.recipe is not None:
        shown = traced_regions.shown_recipe(active.recipe)
    traced_regions.show(shown)


def _of_compiled(recipe: str) -> Autocast:
    """What is active in a region that a compiled function has entered."""
    if recipe in (NO_REGION, HIGH_PRECISION):
        return _OUTSIDE
    return Autocast(True, recipe_from_text(recipe), False, SingleRank(), None, _Region())


def _shown(enabled: bool, calibrating: bool, recipe: Recipe | None) -> str:
    if not enabled:
        return UNTRACEABLE if calibrating else HIGH_PRECISION
    return text_of(recipe)


def text_of(recipe: Recipe | None) -> str:
    """What a region of this recipe shows that is entered inside of a compiled function."""
    recipe = get_default_recipe() if recipe is None else recipe
    return UNTRACEABLE if recipe.remembers else recipe.text


# torch.compiler.assume_constant_result sets this, and loads the compiler with the package.
text_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


class autocast(ContextDecorator):
    """Within the context, zerocast's layers quantize the operands of their GEMMs.

    It nests, and the innermost one counts: ``autocast(enabled=False)`` inside another keeps its
    layers in high precision. It may be entered again, and decorates functions, too. Under delayed
    scaling leaving the outermost one is collective over ``amax_reduction_group``; the note above
    says what it does.

    Args:
        enabled: whether layers quantize.
        calibrating: record amaxes, for the state of delayed scaling, where ``enabled=False`` keeps
            the layers in high precision, and without gradients, too. It may change places with
            ``recipe``.
        recipe: how, or its name; :func:`get_default_recipe` by default.
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
        calibrating: bool | Recipe | str | None = False,
        recipe: Recipe | str | bool | None = None,
        amax_reduction_group: Group = None,
    ) -> None:
        if not isinstance(calibrating, bool):  # the recipe comes first
            recipe, calibrating = calibrating, False if recipe is None else recipe
        if not isinstance(calibrating, bool):
            raise InputError(
                f"calibrating must be True or False and recipe a recipe or its name, got "
                f"{calibrating!r} and {recipe!r}; pass them by name."
            )
        self._enabled, self._calibrating = check_flag("enabled", enabled), calibrating
        self._recipe = None if recipe is None else as_recipe(recipe)  # type: ignore[arg-type]
        self._group = amax_reduction_group

    def __enter__(self) -> Autocast:
        """Returns what is active now."""
        if not torch.compiler.is_compiling():
            return self._enter()
        shown = _shown(self._enabled, self._calibrating, self._recipe)
        if shown == UNTRACEABLE:
            torch._dynamo.graph_break(msg=_WHY_UNTRACEABLE)
            return torch.compiler.disable(self._enter)()
        here.traced.enter(shown, compiled=True)
        return Autocast(self._enabled, self._recipe, self._calibrating)

    def _enter(self) -> Autocast:
        recipe = get_default_recipe() if self._recipe is None else self._recipe
        group = as_communicator(self._group)
        outer = _active.get()
        region = outer._region
        if region is None or region.thread != threading.get_ident():
            region = _Region()
        region.groups[group] = None
        active = Autocast(self._enabled, recipe, self._calibrating, group, outer, region)
        _active.set(active)
        _show(active)
        return active

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if here.traced.entries[-1][0]:
            here.traced.leave()
        elif torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=_WHY_UNTRACEABLE)
            torch.compiler.disable(self._leave)(kind is not None)
        else:
            self._leave(kind is not None)

    def _leave(self, failed: bool) -> None:
        left = _active.get()
        assert left._outer is not None
        assert left._region is not None
        _active.set(left._outer)
        traced_regions.hide()
        if left._region is not left._outer._region:
            left._region.leave(failed=failed)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | str | None = None,
    fp8_group: Group = None,
) -> autocast:
    """:class:`autocast` under TransformerEngine's earlier name, and those of its parameters."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


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

    def __init__(self, active: Autocast, recompute_state: RecomputeState) -> None:
        self._active, self._recompute_state = active, recompute_state
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(resumed(self._active))
        self._stack.enter_context(replaying(self._recompute_state))

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For activation checkpointing: a forward that is computed again gives the same codes.

    zerocast's layers see to that by themselves under ``torch.utils.checkpoint``. Pass this where a
    function that is checkpointed inside :class:`autocast` uses quantizers of its own, or where
    something else that takes it computes the function again::

        torch.utils.checkpoint.checkpoint(
            function, x, use_reentrant=False, context_fn=zerocast.checkpoint_contexts
        )

    The second run happens in the backward, when the region has usually been left and delayed scales
    have moved on. It runs under what was active in the first one, from the scales that the first
    one used, and records no amaxes.
    """
    recompute_state = RecomputeState()
    return recording(recompute_state), _Recomputation(current(), recompute_state)
