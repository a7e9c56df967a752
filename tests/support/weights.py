"""Quantized weights to test with."""

import pytest
import torch

from zerocast.recipes import Float8CurrentScaling, NVFP4BlockScaling, Recipe
from zerocast.tensors import QuantizedTensor, quantize

NVFP4, FP8 = NVFP4BlockScaling(), Float8CurrentScaling()

both_recipes = pytest.mark.parametrize(
    "recipe", [pytest.param(NVFP4, id="nvfp4"), pytest.param(FP8, id="fp8")]
)


def make(recipe: Recipe, rows: int = 17, dtype: torch.dtype = torch.float32) -> QuantizedTensor:
    """A weight [rows, 48] of normal random values, always the same ones."""
    generator = torch.Generator().manual_seed(rows)
    return quantize(torch.randn(rows, 48, generator=generator).to(dtype), recipe)
