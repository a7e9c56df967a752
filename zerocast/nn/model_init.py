"""model_init: the regions of a program in which layers are made with quantized weights.

What is active belongs to the thread (or asyncio task) that entered the region.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from zerocast.arguments import check_flag
from zerocast.backends.availability import compute_capability, is_mxfp8_available
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
