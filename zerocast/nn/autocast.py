"""The contexts of layers: autocast, in which they quantize the operands of their products, and
model_init, in which they are made with quantized weights.

A context is active in the thread (or asyncio task) that entered it. :mod:`zerocast.nn.regions` says
what autocast does to layers, and when it reduces amaxes.
"""

import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from zerocast.arguments import check_flag
from zerocast.backends.availability import compute_capability, is_mxfp8_available
from zerocast.comm import as_communicator
from zerocast.comm.groups import Group
from zerocast.errors import InputError
from zerocast.nn.regions import (
    GRAPHS_HOLD_PRODUCTS,
    HIGH_PRECISION,
    OLDER_TORCH,
    UNTRACEABLE,
    Autocast,
    Region,
    active_region,
    here,
    hide,
    is_traced,
    show,
    shown_recipe,
)
from zerocast.recipes import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    as_recipe,
)


@dataclass(frozen=True)
class ModelInit:
    """The options of a :func:`model_init` region; :func:`current_model_init` returns the active
    ones.

    Attributes:
        enabled: whether their weights hold codes.
        recipe: the scheme of the weights; None outside of any region.
        preserve_high_precision_init_val: whether a weight keeps the value that it was quantized
            from, on the CPU (:meth:`zerocast.QuantizedTensor.get_high_precision_init_val`).
    """

    enabled: bool = False
    recipe: Recipe | None = None
    preserve_high_precision_init_val: bool = False


_model_init: ContextVar[ModelInit] = ContextVar("zerocast_model_init", default=ModelInit())  # noqa: B039  # frozen


def current_model_init() -> ModelInit:
    """Return the active options of :func:`model_init`; ``enabled`` is False outside of any
    region.
    """
    return _model_init.get()


@contextmanager
def model_init(
    enabled: bool = True,
    recipe: Recipe | str | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Within the context, zerocast's layers are made with weights that hold codes.

    Args:
        enabled: False, inside another region, makes them in high precision.
        recipe: the scheme, or its name; :func:`get_default_recipe` by default.
        preserve_high_precision_init_val: keep each weight's initial value, on the CPU, so that an
            optimizer's masters start from it and not from its rounded form; the first cast clears
            it.

    Raises:
        InputError: for anything that is not a recipe.
    """
    check_flag("enabled", enabled)
    check_flag("preserve_high_precision_init_val", preserve_high_precision_init_val)
    recipe = get_default_recipe() if recipe is None else as_recipe(recipe)
    token = _model_init.set(ModelInit(enabled, recipe, preserve_high_precision_init_val))
    try:
        yield
    finally:
        _model_init.reset(token)


quantized_model_init = model_init
"""TransformerEngine's name for :func:`model_init`."""

fp8_model_init = model_init
"""TransformerEngine's earlier name for :func:`model_init`."""


def get_default_recipe() -> Recipe:
    """Return the recipe of a region without an argument: MXFP8 where the device multiplies it
    (:func:`zerocast.is_mxfp8_available`), current scaling on newer devices that do not, delayed
    scaling everywhere else, the CPU included.
    """
    if is_mxfp8_available():
        return MXFP8BlockScaling()
    capability = compute_capability()
    return (
        DelayedScaling() if capability is None or capability < (12, 0) else Float8CurrentScaling()
    )


# --- what torch.compile sees ---

_WHY_UNTRACEABLE = (
    f"{OLDER_TORCH}a compiled graph cannot hold a region of zerocast.autocast with delayed "
    "scaling, stochastic rounding of inputs or calibration, whose layers keep state between "
    "forwards: leave fullgraph=False, or use a recipe without them"
)


def _shown(enabled: bool, calibrating: bool, recipe: Recipe | None) -> str:
    if not enabled:
        return UNTRACEABLE if calibrating else HIGH_PRECISION
    return text_of(recipe)


def text_of(recipe: Recipe | None) -> str:
    """Return the text by which torch.compile knows a region of ``recipe`` that is entered in a
    compiled function.
    """
    if not GRAPHS_HOLD_PRODUCTS:
        return UNTRACEABLE
    return shown_recipe(get_default_recipe() if recipe is None else recipe)


# torch.compiler.assume_constant_result sets this attribute, and would load the compiler here.
text_of._dynamo_marked_constant = GRAPHS_HOLD_PRODUCTS  # type: ignore[attr-defined]


class autocast(ContextDecorator):
    """Within the context, zerocast's layers quantize the operands of their GEMMs.

    Contexts nest, and the innermost one is active: ``autocast(enabled=False)`` inside another keeps
    its layers in high precision. One object may be entered several times, and may decorate a
    function. Under delayed scaling, leaving the outermost context is collective over
    ``amax_reduction_group``; see "Note: when amaxes are reduced" in :mod:`zerocast.nn.regions`.

    Args:
        enabled: whether layers quantize.
        calibrating: whether to record amaxes, for the state of delayed scaling, also if
            ``enabled=False`` keeps the layers in high precision or gradients are disabled. By
            position, ``recipe`` may be given before it.
        recipe: the scheme, or its name; that of :func:`get_default_recipe` by default.
        amax_reduction_group: the ranks whose amaxes are reduced: whatever
            :func:`zerocast.as_communicator` takes. All of them run the same layers, in the same
            order when those run for the first time. With ``zerocast.comm.SingleRank()`` every rank
            uses its own amaxes alone.

    Raises:
        InputError: for anything that is not a recipe, or not a group.
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
        """Enter the region, and return what is active in it."""
        if not is_traced():
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
        outer = active_region.get()
        region = outer._region
        if region is None or region.thread != threading.get_ident():
            region = Region()
        region.groups[group] = None
        backward = torch._C._current_graph_task_id()
        active = Autocast(self._enabled, recipe, self._calibrating, group, outer, region, backward)
        active_region.set(active)
        show(active)
        return active

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if here.traced.entries[-1][0]:
            here.traced.leave()
        elif is_traced():
            torch._dynamo.graph_break(msg=_WHY_UNTRACEABLE)
            torch.compiler.disable(self._leave)(kind is not None)
        else:
            self._leave(kind is not None)

    def _leave(self, failed: bool) -> None:
        left = active_region.get()
        assert left._outer is not None
        assert left._region is not None
        active_region.set(left._outer)
        hide()
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
    """Reduce the amaxes of gradients now, which otherwise are reduced when an outermost region is
    left.

    Collective over the group. Afterwards the states of all ranks are equal, so that one rank can
    save them for all. Later scales are the same as without the call.
    """
    reduction = here.reductions.get(as_communicator(amax_reduction_group))
    if reduction is not None:
        reduction.run()
