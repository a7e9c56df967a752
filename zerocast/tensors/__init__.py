"""Quantized weights: the tensor type for torch, its storage, and the functions that create it."""

import torch

# Imported for their effects: operations registers the operations that QuantizedTensor handles,
# averaging registers with torch a hook that is called before a module averages weights.
from zerocast.recipes import RECIPES, Format, QParams
from zerocast.tensors import averaging as _averaging
from zerocast.tensors import operations as _operations
from zerocast.tensors.dequantize import dequantize
from zerocast.tensors.post_gather import prepare_expansion, prepare_rebuild, rebuild_derived
from zerocast.tensors.quantize import empty, quantize, quantize_into
from zerocast.tensors.quantized_tensor import QuantizedTensor, restore
from zerocast.tensors.raw_data import replace_raw_data
from zerocast.tensors.saved_storage import restore_storage
from zerocast.tensors.staleness import CastVersion
from zerocast.tensors.storage import QuantizedStorage, counted_by_torch
from zerocast.tensors.tp_shard import TensorParallelShard

if torch.distributed.is_available():
    from zerocast.tensors import collectives as _collectives  # for its effect, too

# The types in a saved weight, so that torch.load(..., weights_only=True) accepts it.
torch.serialization.add_safe_globals(
    [restore, restore_storage, Format, TensorParallelShard, QParams, *RECIPES.values()]
)
