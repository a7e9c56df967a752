"""The recipes that tests run under, each with its id, and ways to pick some of them."""

from collections.abc import Callable, Iterable

import pytest
import torch

from zerocast.layout import Source
from zerocast.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

DRAWN = QParams(fp4_2d_quantization=True, stochastic_rounding=True)


def second_largest(history: torch.Tensor) -> torch.Tensor:
    """An amax of a history, as a user may make it."""
    return history.sort().values[-2]


def four_over_six(mode: str, use_256: str) -> Recipe:
    """NVFP4 whose blocks choose between two scales."""
    return NVFP4BlockScaling(
        nvfp4_4over6="weights", nvfp4_4over6_err_mode=mode, nvfp4_4over6_e4m3_use_256=use_256
    )


RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=3),  # few, so that amaxes fall off the end
    "current": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8-2d": MXFP8BlockScaling(enable_2d_quantization=True),
    "mxfp4": MXFP4BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4-4over6": NVFP4BlockScaling(nvfp4_4over6="weights"),
    "nvfp4-drawn": NVFP4BlockScaling(fp4_quant_fwd_weight=DRAWN),
}
"""One of every kind of cast; a weight under any of them can be sharded with both its copies."""

NOT_SHARDABLE: dict[str, Recipe] = {
    "block-1x128": Float8BlockScaling(w_block_scaling_dim=1),
    "nvfp4-1x16": NVFP4BlockScaling(disable_2d_quantization=True),
    "nvfp4-4over6-1x16": NVFP4BlockScaling(nvfp4_4over6="weights", disable_2d_quantization=True),
}
"""Those whose columnwise copy is cast from the transposed tensor: sharded casts make none."""

VARIANTS: dict[str, Recipe] = {
    **RECIPES,
    **NOT_SHARDABLE,
    "delayed-most-recent": DelayedScaling(amax_compute_algo="most_recent", fp8_format="e5m2"),
    "nvfp4-one-level": NVFP4BlockScaling(one_level=True),
    "delayed-function": DelayedScaling(amax_compute_algo=second_largest),
    "delayed-margin": DelayedScaling(amax_history_len=2, margin=1),
    "delayed-unrounded": DelayedScaling(round_master=False, amax_history_len=2),
    "current-e5m2": Float8CurrentScaling(
        fp8_format="e5m2", fp8_quant_fwd_weight=QParams(power_2_scale=True)
    ),
    "current-epsilon": Float8CurrentScaling(
        fp8_quant_fwd_weight=QParams(amax_epsilon=1e-3), round_master=False
    ),
    "rowwise-power-2": Float8RowwiseScaling(fp8_quant_fwd_weight=QParams(power_2_scale=True)),
    "block-quotient": Float8BlockScaling(
        use_f32_scales=True,
        fp8_quant_fwd_weight=QParams(scale_formula="quotient", amax_epsilon=1e-4),
    ),
    "current-inverse-first": Float8CurrentScaling(
        fp8_quant_fwd_weight=QParams(scale_formula="inverse first")
    ),
    "block-f32-e5m2": Float8BlockScaling(use_f32_scales=True, fp8_format="e5m2"),
    "mxfp8-e5m2": MXFP8BlockScaling(fp8_format="e5m2"),
    "mxfp4-2d": MXFP4BlockScaling(enable_2d_quantization=True, scale_rounding="floor"),
    "mxfp4-floor": MXFP4BlockScaling(scale_rounding="floor", round_master=False),
    "mxfp4-even": MXFP4BlockScaling(scale_rounding="even"),
    "nvfp4-unrounded": NVFP4BlockScaling(round_master=False),
    "nvfp4-4over6-mse-256": four_over_six("MSE", "weights"),
    "nvfp4-4over6-mae-448": four_over_six("MAE", "none"),
    "nvfp4-4over6-mse-448": four_over_six("MSE", "none"),
    "nvfp4-4over6-mse-448-1x16": NVFP4BlockScaling(
        nvfp4_4over6="weights",
        nvfp4_4over6_err_mode="MSE",
        nvfp4_4over6_e4m3_use_256="none",
        disable_2d_quantization=True,
    ),
    "nvfp4-4over6-drawn": NVFP4BlockScaling(fp4_quant_fwd_weight=DRAWN, nvfp4_4over6="weights"),
    "nvfp4-seeded": NVFP4BlockScaling(fp4_quant_fwd_weight=DRAWN, seed=2**63 + 5),
}
"""All of these, and what else the arithmetic of a cast depends on."""


def names(where: Callable[[Recipe], object], among: Iterable[str] = RECIPES) -> list[str]:
    """The ids of those for which ``where`` holds."""
    return [name for name in among if where(VARIANTS[name])]


STATELESS = names(lambda recipe: not recipe.state)
REMEMBERING = names(lambda recipe: recipe.state)
"""Those that remember something between casts: amaxes, or a count of draws."""
SCALES_TENSOR = names(lambda recipe: recipe.scales_tensor)
"""Those with a scale, or an amax, of the whole tensor."""
CAST_COLUMNWISE = names(lambda recipe: recipe.columnwise_source is Source.MASTER)
"""Those whose columnwise codes are cast from the master and gathered, too."""
SHARDABLE = names(lambda r: r.columnwise_source is not Source.TRANSPOSED_MASTER, VARIANTS)


def each(*ids: str, slow: Iterable[str] = ()) -> pytest.MarkDecorator:
    """A test's ``recipe``: each of these of :data:`VARIANTS`, by its id."""
    return pytest.mark.parametrize("recipe", [param(name, slow=name in slow) for name in ids])


def param(name: str, *values: object, slow: bool = False) -> object:
    """The parameters of a test: the recipe of this id, and ``values``."""
    marks = pytest.mark.slow if slow else ()
    return pytest.param(
        VARIANTS[name], *values, marks=marks, id="-".join([name, *map(str, values)])
    )


every_recipe = each(*RECIPES)
