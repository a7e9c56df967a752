"""The names of all submodules, which TransformerEngine's users import as ``te``."""

from zerocast.adapters.transformer_engine.pytorch import (
    constants,
    module,
    quantization,
    quantized_tensor,
    tensor,
)
from zerocast.adapters.transformer_engine.pytorch.constants import *
from zerocast.adapters.transformer_engine.pytorch.module import *
from zerocast.adapters.transformer_engine.pytorch.quantization import *
from zerocast.adapters.transformer_engine.pytorch.tensor import *
from zerocast.nn import checkpoint

__all__ = ["checkpoint", "constants", "module", "quantization", "quantized_tensor", "tensor"]
__all__ += constants.__all__
__all__ += module.__all__
__all__ += quantization.__all__
__all__ += tensor.__all__
