"""Lets layers inside activation checkpoints quantize in the second run as in the first.

A checkpoint runs a function once in the forward and once more in the backward, when the region of
:class:`zerocast.autocast` has usually been left. The codes of a forward depend on values and on the
recipe alone, unless the recipe has state of the forward (delayed scaling, stochastic rounding of
inputs). So any checkpoint of any framework makes the same codes again, if the layer knows the
recipe. A layer that runs inside a backward takes, in this order:

1. the region that the recomputed function itself enters,
2. that of :func:`checkpoint` or :func:`checkpoint_contexts`, which keep region and state,
3. the recipe under which the layer ran since its latest recomputation.

Where the third is several recipes, or where the recipe has state of the forward, the codes of the
first run cannot be made again, and the layer raises UnsupportedError.

A compiled function without a region has no quantized products, and chooses them by the region that
is active when it is called. Its graph has one operation that raises in a recomputation.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch

from zerocast.errors import UnsupportedError
from zerocast.nn import regions
from zerocast.nn.autocast import autocast
from zerocast.nn.quantizer import RecomputeState, current_recompute_state, recording, replaying
from zerocast.nn.regions import Autocast, in_backward
from zerocast.recipes import Recipe

_NO_BACKWARD = -1


class FirstRuns:
    """The recipes under which a layer ran since its latest recomputation; None stands for high
    precision.

    An evaluation may come between a forward and its backward, so its recipe counts only where
    there was no other run: reentrant checkpoints disable gradients in the first run, too.
    """

    def __init__(self) -> None:
        self._recipes: set[Recipe | None] = set()
        self._of_evaluations: set[Recipe | None] = set()
        self._read_in = _NO_BACKWARD

    def add(self, recipe: Recipe | None, *, evaluates: bool = False) -> None:
        """Note a run outside of a backward."""
        if evaluates:
            self._of_evaluations.add(recipe)
            return
        if self._read_in != _NO_BACKWARD:
            self._recipes, self._of_evaluations = set(), set()
            self._read_in = _NO_BACKWARD
        self._recipes.add(recipe)

    def read(self) -> set[Recipe | None]:
        """Return the recipes, for a run inside a backward."""
        backward = torch._C._current_graph_task_id()
        if self._read_in not in (_NO_BACKWARD, backward):
            return self._recipes | self._of_evaluations
        self._read_in = backward
        return self._recipes or self._of_evaluations


class QuantizedLayer(Protocol):
    """The attributes that are read of a :class:`zerocast.nn.quantized_module.QuantizedModule`."""

    name: str
    training: bool
    _first_runs: FirstRuns | None


def as_in_first_run(layer: QuantizedLayer) -> AbstractContextManager[None]:
    """Within the context ``layer`` runs under the region that is active, or, in a recomputation,
    under that of its first run.

    Raises:
        UnsupportedError: in a recomputation that may give other codes than the first run.
    """
    if not regions.were_entered:
        return nullcontext()
    region = regions.current()
    runs = layer._first_runs
    if not in_backward():
        if runs is None:
            runs = layer._first_runs = FirstRuns()
        evaluates = not (layer.training or torch.is_grad_enabled())
        runs.add(recipe_of(region), evaluates=evaluates)
        return nullcontext()
    state = current_recompute_state()
    if runs is None or (state is not None and state.replays):
        return nullcontext()
    recipes = runs.read()
    if region.was_entered_in_this_backward:
        recipes = {recipe_of(region)}
    recipe = next(iter(recipes), None)
    if len(recipes) > 1 or (recipe is not None and recipe.has_forward_state):
        raise _unknown(layer.name or type(layer).__name__, recipes)
    if recipe == recipe_of(region):
        return nullcontext()
    return regions.resumed(regions.without_amaxes(recipe))


def recipe_of(region: Autocast) -> Recipe | None:
    """Return the recipe on which what a layer does under ``region`` depends."""
    recipe = region.recipe
    if region.enabled or (region.calibrating and recipe is not None and recipe.has_forward_state):
        return recipe
    return None


def _unknown(name: str, recipes: set[Recipe | None]) -> UnsupportedError:
    names = sorted(type(r).__name__ if r is not None else "high precision" for r in recipes)
    return UnsupportedError(
        f"{name} is computed again inside a backward and may give other codes than its forward, "
        f"which ran under {' and '.join(names)}: only zerocast.nn.checkpoint keeps the region and "
        f"the scales of a forward. Use it, or pass context_fn=zerocast.checkpoint_contexts to what "
        f"takes that argument."
    )


# --- compiled functions ---

_graphs = FirstRuns()
"""The recipes of compiled products since the latest recomputation of such a function."""


def note_compiled_run(recipe: Recipe | None) -> None:
    """Note that a graph runs the products of ``recipe``, or plain ones for None.

    Raises:
        UnsupportedError: where plain ones run inside a backward, instead of quantized ones.
    """
    if not in_backward():
        _graphs.add(recipe)
        return
    recipes = _graphs.read()
    state = current_recompute_state()
    if recipe is None and recipes - {None} and not (state is not None and state.replays):
        raise _unknown("a compiled function", recipes)


# --- the contexts, and the function ---


class _Recomputation(AbstractContextManager[None]):
    """The region and state of a forward, for computing it again; may be entered once in each
    backward.
    """

    def __init__(self, active: Autocast, recompute_state: RecomputeState) -> None:
        self._active, self._recompute_state = active, recompute_state
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(regions.resumed(self._active))
        self._stack.enter_context(replaying(self._recompute_state))

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two contexts for activation checkpointing: of a forward, and of its recomputation,
    which makes the same codes.

    Under recipes without state of the forward zerocast's layers do this without it. Pass it where
    the recipe has such state, where layers run under several recipes, or where a function that is
    checkpointed inside :class:`autocast` uses quantizers directly::

        torch.utils.checkpoint.checkpoint(
            function, x, use_reentrant=False, context_fn=zerocast.checkpoint_contexts
        )

    The second run happens in the backward, when the region has usually been left and delayed scales
    have moved on. It runs under what was active in the first one, from the scales that the first
    one used, and records no amaxes.
    """
    recompute_state = RecomputeState()
    return recording(recompute_state), _Recomputation(regions.current(), recompute_state)


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any
) -> Any:
    """``torch.utils.checkpoint.checkpoint`` for functions with zerocast's layers in them.

    Args:
        function: the function to compute, now and again in the backward.
        args: its arguments.
        use_reentrant: torch's mode; both give the same gradients as without a checkpoint, bit for
            bit.
        options: torch's further options and, without reentrance, the function's keyword arguments.

    Returns:
        What ``function`` returns.
    """
    first, again = checkpoint_contexts()
    has_run = False
    # A reentrant first run has gradients disabled, but is no evaluation.
    records = use_reentrant and torch.is_grad_enabled() and regions.current().enabled

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        now, has_run = (again if has_run else first), True
        with ExitStack() as stack:
            stack.enter_context(now)
            if now is first and records:
                active = regions.current()
                stack.enter_context(autocast(True, True, active.recipe, active.group))
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **options)
