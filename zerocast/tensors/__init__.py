"""Things that hold bytes: the quantized weight that torch sees, its storage, how it is made."""

import torch

# operations is imported for its effect: it tells QuantizedTensor the operations that it knows.
from zerocast.recipes import RECIPES, Format, QParams
from zerocast.tensors import operations as _operations  # noqa: F401
from zerocast.tensors.amax_reduction import AmaxReduction
from zerocast.tensors.dequantize import dequantize
from zerocast.tensors.derived import prepare_rebuild, rebuild_derived
from zerocast.tensors.part import Part
from zerocast.tensors.quantize import (
    empty,
    quantize,
    quantize_into,
    replace_raw_data,
)
from zerocast.tensors.quantized_tensor import QuantizedTensor, restore
from zerocast.tensors.quantizer import Quantizer
from zerocast.tensors.recipe_state import RecipeState
from zerocast.tensors.storage import CastClock, QuantizedStorage, restore_storage

# What a saved weight is made of, so that torch.load(..., weights_only=True) accepts it.
torch.serialization.add_safe_globals(
    [restore, restore_storage, Format, Part, QParams, *RECIPES.values()]
)

__all__ = [
    "AmaxReduction",
    "CastClock",
    "Part",
    "QuantizedStorage",
    "QuantizedTensor",
    "Quantizer",
    "RecipeState",
    "dequantize",
    "empty",
    "prepare_rebuild",
    "quantize",
    "quantize_into",
    "rebuild_derived",
    "replace_raw_data",
]
