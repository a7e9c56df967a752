"""The regions that :class:`zerocast.autocast` enters, and which of them is active.

A region is active in the thread (or asyncio task) that entered it, so ranks that are threads have
separate regions. Layers call :func:`current`.

torch.compile guards a compiled function by the values that it has read. A compiled function can
read an attribute of a thread-local object, but neither a context variable nor an object that is new
in each region. So every region also stores the text of its recipe where compiled functions can read
it (:data:`here`).

Note: when amaxes are reduced
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Delayed scaling (:class:`zerocast.DelayedScaling`) makes scales from amaxes that all ranks agree on.
They are reduced on leaving the *outermost* region of a thread, by one all-reduce for all tensors of
all layers that have run under that group. It carries

* the amaxes of inputs, weights and outputs that the region has seen, the largest one where a layer
  ran more than once, and
* the amaxes of gradients that have come in since the last reduction. A backward usually runs after
  its region was left, so those of one step are reduced with the next one. That is early enough:
  they change the scale of the next backward, which comes after the next region.

If an exception leaves a region, nothing is reduced and the amaxes that its forward recorded are
dropped: a collective would hang if the other ranks failed elsewhere or not at all. Ranks that did
not fail wait in the reduction, as in any collective that a failed rank does not enter, until the
communicator reports that rank. Nothing is reduced either if a region is left with gradients
disabled and no amax recorded: an evaluation, on one rank or on all, does not change histories and
scales.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from zerocast.comm import Communicator, SingleRank
from zerocast.nn.quantizer import current_recompute_state
from zerocast.nn.recipe_state import AmaxReduction, RecipeState
from zerocast.recipes import Recipe, recipe_from_text

NO_REGION = ""
HIGH_PRECISION = "high precision"
UNTRACEABLE = "untraceable"

GRAPHS_HOLD_PRODUCTS = torch.__version__ >= "2.13"
"""Whether torch.compile can put quantized products into a graph. Older releases can neither rebuild
a region after a break nor order the draws of gradients.
"""
OLDER_TORCH = "" if GRAPHS_HOLD_PRODUCTS else "a quantized product in a graph needs torch 2.13; "
"""The prefix of errors about what a graph cannot hold."""


class _Traced:
    """The values by which torch.compile guards compiled functions.

    Attributes:
        recipe: the text of the recipe by which products are quantized here; or
            :data:`HIGH_PRECISION` in a region that is not enabled, :data:`NO_REGION` outside of
            any, :data:`UNTRACEABLE` where a graph could not hold what the region does.
        entries: for each region that is open, whether a compiled function has entered it, and what
            ``recipe`` was before.
    """

    def __init__(self) -> None:
        self.recipe = NO_REGION
        self.entries: list[tuple[bool, str]] = []

    def enter(self, recipe: str, *, compiled: bool) -> None:
        """Note that a region of this recipe is entered."""
        self.entries.append((compiled, self.recipe))
        self.recipe = recipe

    def leave(self) -> None:
        """Note that the innermost region is left."""
        _, self.recipe = self.entries.pop()


class _Here(threading.local):
    """The state of a thread that is kept from region to region.

    Attributes:
        traced: the values that compiled functions read and write; a separate object, because they
            can read attributes of a thread-local object but not write them.
        reductions: the reductions of amaxes, by group.
    """

    def __init__(self) -> None:
        self.traced = _Traced()
        self.reductions: dict[Communicator, AmaxReduction] = {}


here = _Here()
_lock = threading.Lock()
_open = 0  # regions that are open in any thread
any_open = False
"""Whether any thread has a region open. A worker thread or a task may run in a region that another
one entered, which :class:`_Traced` does not show.
"""
were_entered = False
"""Whether any region has been entered in this process."""


def traced_recipe() -> str:
    """Return what quantizes products in a function that is being compiled, as
    ``_Traced.recipe``.
    """
    if any_open and here.traced.recipe == NO_REGION:
        return UNTRACEABLE
    return here.traced.recipe


def shown_recipe(recipe: Recipe) -> str:
    """Return the text by which torch.compile knows a region of ``recipe``."""
    holds = GRAPHS_HOLD_PRODUCTS and not recipe.has_forward_state
    return recipe.text if holds else UNTRACEABLE


def show(active: Autocast) -> None:
    """Note for compiled functions that ``active`` is active from now on."""
    global _open, any_open, were_entered
    with _lock:
        _open += 1
        any_open = were_entered = True
    text = UNTRACEABLE if active.calibrating else HIGH_PRECISION
    if active.enabled and active.recipe is not None:
        text = shown_recipe(active.recipe)
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        text = UNTRACEABLE  # each task of a thread has its regions, and all see this text
    here.traced.enter(text, compiled=False)


def hide() -> None:
    """Note for compiled functions that the innermost region is left."""
    global _open, any_open
    here.traced.leave()
    with _lock:
        _open -= 1
        any_open = _open > 0
    if not any_open and not here.traced.entries:
        here.traced.recipe = NO_REGION


# --- regions ---


def is_traced() -> bool:
    """Say whether torch.compile or torch.export traces this call. ``torch.compiler.is_compiling()``
    is also true in all threads that run while another one compiles.
    """
    return torch.compiler.is_dynamo_compiling() or is_exporting()


def is_exporting() -> bool:
    """Say whether torch.export traces this call."""
    return torch.compiler.is_exporting()


# As torch.compiler.assume_constant_result, which would load the compiler; torch before 2.13 takes
# its own function for True in whatever it compiles.
is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Say whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


class Region:
    """An outermost region of one thread, with all that is nested in it.

    Attributes:
        thread: the number of the thread.
        reductions: those of the thread.
        groups: those of this region and of the nested ones, in order.
        recorded: the states of forwards that record amaxes in here.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.reductions = here.reductions
        self.groups: dict[Communicator, None] = {}
        self.recorded: dict[RecipeState, None] = {}

    def reduction(self, group: Communicator) -> AmaxReduction:
        """Return the reduction over ``group``."""
        return self.reductions.setdefault(group, AmaxReduction(group))

    def leave(self, *, failed: bool) -> None:
        """Reduce, or drop what a failed region has recorded."""
        if failed:
            for state in self.recorded:
                state.amaxes.zero_()
        elif in_backward():
            return  # A forward that a backward computes again has been reduced before.
        elif self.recorded or torch.is_grad_enabled():
            for group in self.groups:
                if group in self.reductions:
                    self.reductions[group].run()


@dataclass(frozen=True, eq=False)
class Autocast:
    """The options that are active where a layer runs; :func:`current` returns them.

    Attributes:
        enabled: whether operands of GEMMs are to be quantized.
        recipe: how; None outside of any region.
        calibrating: whether amaxes are to be recorded, also where nothing is quantized.
        group: over which amaxes are reduced; None outside of any region.
        backward: the number of the backward inside of which it was entered; -1 elsewhere.
    """

    enabled: bool = False
    recipe: Recipe | None = None
    calibrating: bool = False
    group: Communicator | None = None
    _outer: Autocast | None = field(default=None, repr=False)
    _region: Region | None = field(default=None, repr=False)
    backward: int = field(default=-1, repr=False)

    @property
    def was_entered_in_this_backward(self) -> bool:
        """Whether the function that the present backward computes again has entered it."""
        return self.backward != -1 and self.backward == torch._C._current_graph_task_id()

    def register(self, *states: RecipeState) -> None:
        """Register the states of a layer's forward and backward, so that leaving the region reduces
        their amaxes. The layer's forward calls this before it quantizes; on a rank without rows for
        the layer, too, so that all ranks register states in one order.

        With gradients disabled the forward records no amaxes, unless the region is calibrating. So
        call this in a module's forward, not in an autograd.Function's, where torch has gradients
        disabled.
        """
        assert self._region is not None, "only a layer that runs in a region registers states"
        assert self.group is not None
        recomputed = current_recompute_state()
        if recomputed is not None and recomputed.replays:
            return  # The first run has registered them, perhaps in another thread.
        records = self.calibrating or torch.is_grad_enabled()
        records |= recomputed is not None and recomputed.trains
        for state in states:
            if state.is_delayed:
                state.register_with(self._region.reduction(self.group))
                if state.mode == "forward":
                    state.records = records
                    if records:
                        self._region.recorded[state] = None


_OUTSIDE = Autocast()
active_region: ContextVar[Autocast] = ContextVar("zerocast_autocast", default=_OUTSIDE)


def current() -> Autocast:
    """Return the active autocast; ``enabled`` and ``calibrating`` are False outside of any
    region.
    """
    if here.traced.entries and here.traced.entries[-1][0]:  # a compiled function went on uncompiled
        return _of_compiled(here.traced.recipe)
    return active_region.get()


@contextmanager
def resumed(active: Autocast) -> Iterator[None]:
    """Make ``active`` active again within the context; leaving it reduces nothing."""
    token = active_region.set(active)
    show(active)
    try:
        yield
    finally:
        active_region.reset(token)
        hide()


def _of_compiled(recipe: str) -> Autocast:
    """Return what is active in a region that a compiled function has entered."""
    if recipe in (NO_REGION, HIGH_PRECISION):
        return _OUTSIDE
    return without_amaxes(recipe_from_text(recipe))


def without_amaxes(recipe: Recipe | None) -> Autocast:
    """Return a region of ``recipe``, which records no amaxes; one in high precision for None."""
    if recipe is None:
        return _OUTSIDE
    return Autocast(True, recipe, False, SingleRank(), None, Region())
