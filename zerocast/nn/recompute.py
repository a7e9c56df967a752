"""Lets layers inside activation checkpoints quantize in the second run as in the first.

A checkpoint runs a function once in the forward and once more in the backward, when the region of
:class:`zerocast.autocast` has usually been left. The codes of a forward depend on values and on the
recipe alone, unless the recipe has state of the forward (delayed scaling, stochastic rounding of
inputs). So any checkpoint of any framework makes the same codes again, if the layer knows the
recipe. A layer that runs inside a backward takes, in this order:

1. the region that the recomputed function itself enters,
2. that of :func:`checkpoint` or :func:`checkpoint_contexts`, which keep region and state,
3. the recipe of those of its runs that a backward may compute again.

Where the third are several recipes, or where the recipe has state of the forward, the codes of the
first run cannot be made again, and the layer raises UnsupportedError.

A compiled function is another graph for each recipe, chosen by the region that is active when it is
called. The operations of its graph raise in a backward where the first run may have been another.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from weakref import WeakSet

import torch

from zerocast.errors import UnsupportedError
from zerocast.nn import regions
from zerocast.nn.quantizer import RecomputeState, current_recompute_state, recording, replaying
from zerocast.nn.regions import Autocast, in_backward
from zerocast.recipes import Recipe


class _Run:
    """A run of a layer, kept alive by the graph that autograd made of it."""

    def __init__(self, recipe: Recipe | None) -> None:
        self.recipe = recipe


class Runs:
    """The recipes of a layer's runs that a backward may compute again; None stands for high
    precision.

    A run with a graph counts until that is gone. One without gradients may be the first one of a
    reentrant checkpoint, so it always counts; but while the layer trains, none that evaluated.
    """

    def __init__(self) -> None:
        self._with_graph: WeakSet[_Run] = WeakSet()
        self._without_graph: dict[bool, set[Recipe | None]] = {True: set(), False: set()}

    def add(self, recipe: Recipe | None, out: torch.Tensor, *, trains: bool) -> None:
        """Note the run that gave ``out``, of a layer that ``trains`` or evaluates."""
        if out.grad_fn is None:
            self._without_graph[trains].add(recipe)
            return
        run = _Run(recipe)
        self._with_graph.add(run)
        metadata: Any = out.grad_fn.metadata  # typed as a method
        metadata.setdefault("zerocast runs", []).append(run)

    def recipes(self, *, trains: bool) -> set[Recipe | None]:
        """Return the recipes, for a layer that ``trains`` or evaluates."""
        found = {run.recipe for run in self._with_graph} | self._without_graph[True]
        return found if trains else found | self._without_graph[False]


def run_layer(layer: Any, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return ``forward(layer, ...)`` under the region that is active, or, in a recomputation, under
    that of the first run, and note the run.

    Args:
        layer: a :class:`zerocast.nn.quantized_module.QuantizedModule`.
        forward: returns a tensor, or a tuple that begins with the layer's product.
        args, options: those of ``forward``, after the layer.

    Raises:
        UnsupportedError: in a recomputation that may give other codes than the first run.
    """
    if not regions.were_entered:
        return forward(layer, *args, **options)
    with as_in_first_run(layer):
        recipe = recipe_of(regions.current())
        made = forward(layer, *args, **options)
    out = made[0] if isinstance(made, tuple) else made
    if layer._runs is None:
        layer._runs = Runs()
    layer._runs.add(recipe, out, trains=layer.training)
    return made


def as_in_first_run(layer: Any) -> AbstractContextManager[None]:
    """Return the context of :func:`run_layer`."""
    region, state = regions.current(), current_recompute_state()
    if not in_backward() or (state is not None and state.replays):
        return nullcontext()
    if region.was_entered_in_this_backward:
        recipes = {recipe_of(region)}
    else:
        recipes = set() if layer._runs is None else layer._runs.recipes(trains=layer.training)
        recipes = recipes or _compiled | {recipe_of(region), None}
    (recipe, *others) = recipes
    if others or (recipe is not None and recipe.has_forward_state):
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
    names = sorted({type(r).__name__ if r is not None else "high precision" for r in recipes})
    return UnsupportedError(
        f"{name} is recomputed inside a backward and may give other codes than its forward, which "
        f"ran under {' and '.join(names)}: only zerocast.nn.checkpoint keeps the region and the "
        "scales of a forward. Use it, or pass context_fn=zerocast.checkpoint_contexts to functions "
        "that take it."
    )


# --- compiled functions ---

_compiled: set[Recipe | None] = set()
"""The recipes of all compiled products so far."""


def note_compiled_run(recipe: Recipe | None) -> None:
    """Note that a graph runs the products of ``recipe``, or plain ones for None.

    Raises:
        UnsupportedError: inside a backward, for plain ones where others may have been meant, and
            for those of a recipe under which no graph ran a forward.
    """
    state = current_recompute_state()
    if not in_backward():
        _compiled.add(recipe)
        return
    # A checkpoint inside of a graph repeats its products in the backward, as it must.
    is_other = _compiled - {None} if recipe is None else recipe not in _compiled
    if is_other and not (state is not None and state.replays):
        raise _unknown("a compiled function", _compiled | {recipe})


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
    recompute_state = RecomputeState()
    # A reentrant first run has gradients disabled, but is not an evaluation.
    recompute_state.trains |= use_reentrant and torch.is_grad_enabled()
    first = recording(recompute_state)
    again = _Recomputation(regions.current(), recompute_state)
    has_run = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        now, has_run = (again if has_run else first), True
        with now:
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **options)
