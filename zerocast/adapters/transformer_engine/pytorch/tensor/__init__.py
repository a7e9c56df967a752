"""Tensors and quantizers by scheme."""

from zerocast.adapters.transformer_engine.pytorch import quantized_tensor
from zerocast.adapters.transformer_engine.pytorch.quantized_tensor import *
from zerocast.adapters.transformer_engine.pytorch.tensor import (
    float8_blockwise_tensor,
    float8_tensor,
    mxfp8_tensor,
    nvfp4_tensor,
)
from zerocast.adapters.transformer_engine.pytorch.tensor.float8_blockwise_tensor import *
from zerocast.adapters.transformer_engine.pytorch.tensor.float8_tensor import *
from zerocast.adapters.transformer_engine.pytorch.tensor.mxfp8_tensor import *
from zerocast.adapters.transformer_engine.pytorch.tensor.nvfp4_tensor import *
from zerocast.adapters.transformer_engine.pytorch.tensor.utils import (
    cast_master_weights_to_fp8,
    replace_raw_data,
)

__all__ = ["cast_master_weights_to_fp8", "replace_raw_data"]
__all__ += quantized_tensor.__all__
__all__ += float8_blockwise_tensor.__all__
__all__ += float8_tensor.__all__
__all__ += mxfp8_tensor.__all__
__all__ += nvfp4_tensor.__all__
