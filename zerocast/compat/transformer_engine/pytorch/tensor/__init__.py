"""Tensors and quantizers by scheme."""

from zerocast.compat.transformer_engine.missing import raise_missing
from zerocast.compat.transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
)
from zerocast.compat.transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from zerocast.compat.transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)
from zerocast.compat.transformer_engine.pytorch.tensor.mxfp8_tensor import (
    MXFP8Quantizer,
    MXFP8Tensor,
    MXFP8TensorStorage,
)
from zerocast.compat.transformer_engine.pytorch.tensor.nvfp4_tensor import (
    NVFP4Quantizer,
    NVFP4Tensor,
    NVFP4TensorStorage,
)
from zerocast.compat.transformer_engine.pytorch.tensor.utils import (
    cast_master_weights_to_fp8,
    replace_raw_data,
)

__getattr__ = raise_missing(__name__)

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "cast_master_weights_to_fp8",
    "replace_raw_data",
]
