"""Things that hold bytes: the quantized weight that torch sees, its storage, and how weights are made."""

import torch

from zerocast.recipes import RECIPES
from zerocast.tensors import operations as _operations  # noqa: F401  (tells QuantizedTensor the operations it knows)
from zerocast.tensors.quantize import (
    empty,
    quantize,
    quantize_into,
    rebuild_derived,
    replace_raw_data,
)
from zerocast.tensors.quantized_tensor import QuantizedTensor, _restore
from zerocast.tensors.storage import CastClock, QuantizedStorage, restore

# What a saved weight consists of, so that torch.load(..., weights_only=True) rebuilds it and nothing else.
torch.serialization.add_safe_globals([_restore, restore, *RECIPES.values()])

__all__ = [
    "CastClock",
    "QuantizedStorage",
    "QuantizedTensor",
    "empty",
    "quantize",
    "quantize_into",
    "rebuild_derived",
    "replace_raw_data",
]
