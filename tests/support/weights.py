"""Quantized weights to test with."""

import io
from typing import Any

import torch

from tests.support.recipes import RECIPES, VARIANTS, each
from zerocast.recipes import Recipe
from zerocast.tensors import CastVersion, QuantizedTensor, quantize

NVFP4, FP8 = RECIPES["nvfp4"], RECIPES["current"]
EVERY_RECIPE = RECIPES | {"nvfp4-1x16": VARIANTS["nvfp4-1x16"]}

both_recipes = each("nvfp4", "current")
every_recipe = each(*EVERY_RECIPE)


def make(recipe: Recipe, rows: int = 17, dtype: torch.dtype = torch.float32) -> QuantizedTensor:
    """A weight [rows, 48] of normal random values, always the same ones."""
    generator = torch.Generator().manual_seed(rows)
    return quantize(torch.randn(rows, 48, generator=generator).to(dtype), recipe)


def through_a_file(value: Any, *, weights_only: bool = True) -> Any:
    """What is loaded of ``value`` that was saved."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def note_cast(version: CastVersion) -> None:
    """Note a plan's cast, from its first code to its last."""
    version.tick()
    version.end("cast")
