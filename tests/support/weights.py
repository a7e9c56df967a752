"""Quantized weights to test with."""

import pytest
import torch

from zerocast.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from zerocast.tensors import QuantizedTensor, quantize

NVFP4, FP8 = NVFP4BlockScaling(), Float8CurrentScaling()

both_recipes = pytest.mark.parametrize(
    "recipe", [pytest.param(NVFP4, id="nvfp4"), pytest.param(FP8, id="fp8")]
)

EVERY_RECIPE = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 2d": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4 1d": NVFP4BlockScaling(disable_2d_quantization=True),
    "4-over-6": NVFP4BlockScaling(nvfp4_4over6="weights"),
    "stochastic": NVFP4BlockScaling(
        fp4_quant_fwd_weight=QParams(fp4_2d_quantization=True, stochastic_rounding=True)
    ),
}
every_recipe = pytest.mark.parametrize("recipe", EVERY_RECIPE.values(), ids=list(EVERY_RECIPE))


def make(recipe: Recipe, rows: int = 17, dtype: torch.dtype = torch.float32) -> QuantizedTensor:
    """A weight [rows, 48] of normal random values, always the same ones."""
    generator = torch.Generator().manual_seed(rows)
    return quantize(torch.randn(rows, 48, generator=generator).to(dtype), recipe)
