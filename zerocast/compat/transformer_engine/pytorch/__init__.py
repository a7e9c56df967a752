"""What TransformerEngine's users call ``te``."""

from zerocast.compat.transformer_engine.missing import raise_missing
from zerocast.compat.transformer_engine.pytorch import (
    constants,
    module,
    quantization,
    quantized_tensor,
    tensor,
)
from zerocast.compat.transformer_engine.pytorch.constants import DType
from zerocast.compat.transformer_engine.pytorch.module import (
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from zerocast.compat.transformer_engine.pytorch.quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from zerocast.compat.transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
    MXFP8Quantizer,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Quantizer,
    NVFP4Tensor,
    NVFP4TensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
)
from zerocast.nn import checkpoint

__getattr__ = raise_missing(__name__)

__all__ = [
    "DType",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "RMSNorm",
    "autocast",
    "checkpoint",
    "constants",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "module",
    "quantization",
    "quantized_model_init",
    "quantized_tensor",
    "tensor",
]
