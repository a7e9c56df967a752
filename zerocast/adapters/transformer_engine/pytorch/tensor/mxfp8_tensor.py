"""MXFP8: MXFP8Tensor and its quantizer."""

from zerocast import MXFP8BlockScaling
from zerocast.adapters.transformer_engine.pytorch.constants import DType
from zerocast.adapters.transformer_engine.pytorch.quantized_tensor import SchemeTensor
from zerocast.adapters.transformer_engine.pytorch.quantizer import Quantizer

__all__ = ["MXFP8Quantizer", "MXFP8Tensor", "MXFP8TensorStorage"]


class MXFP8Tensor(SchemeTensor):
    """The class of tensors of :class:`zerocast.MXFP8BlockScaling`."""

    schemes = ("mxfp8",)


MXFP8TensorStorage = MXFP8Tensor


class MXFP8Quantizer(Quantizer):
    """A quantizer to MXFP8, with one power of two as the scale of each block of 32 elements.

    Args:
        fp8_dtype: a :class:`DType` of 8 bits.
        rowwise, columnwise: which copies results hold.
        with_2d_quantization: whether blocks are 32x32, with one copy of codes for both directions.

    Raises:
        InputError: for another dtype.
    """

    scheme = "mxfp8"

    def __init__(
        self,
        fp8_dtype: int,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        fmt = DType.name_of(fp8_dtype, bits=8)
        recipe = MXFP8BlockScaling(fp8_format=fmt, enable_2d_quantization=with_2d_quantization)
        self._start(recipe, rowwise, columnwise)
