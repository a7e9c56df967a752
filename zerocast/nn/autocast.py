"""autocast, in which layers quantize the operands of their products, and model_init, in which they
are made with quantized weights.

What is active belongs to the thread (or asyncio task) that entered the context. What an autocast
does to layers and when it reduces amaxes stands in :mod:`zerocast.nn.regions`.
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
    HIGH_PRECISION,
    UNTRACEABLE,
    Autocast,
    Region,
    active_region,
    here,
    hide,
    show_region,
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
        InputError: for another recipe.
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
    """The recipe of a region that is given none: MXFP8 where the device multiplies it
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
    "a compiled graph cannot hold the entering and leaving of a region of zerocast.autocast with "
    "delayed scaling, stochastic rounding or calibration, which reduces amaxes: enter it around "
    "the compiled function, leave fullgraph=False, or use a recipe without them"
)


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
    scaling leaving the outermost one is collective over ``amax_reduction_group``;
    :mod:`zerocast.nn.regions` says what it does.

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
        outer = active_region.get()
        region = outer._region
        if region is None or region.thread != threading.get_ident():
            region = Region()
        region.groups[group] = None
        active = Autocast(self._enabled, recipe, self._calibrating, group, outer, region)
        active_region.set(active)
        show_region(active)
        return active

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if here.traced.entries[-1][0]:
            here.traced.leave()
        elif torch.compiler.is_compiling():
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
    """Reduce now what waits for the next leaving of an outermost region: the amaxes of gradients.

    Collective over the group. It makes the states of all ranks equal, so that one rank can save
    them for all; that the amaxes arrive earlier changes no later scale.
    """
    reduction = here.reductions.get(as_communicator(amax_reduction_group))
    if reduction is not None:
        reduction.run()
