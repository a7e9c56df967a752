"""FP8 with one scale per block of 128x128 or 1x128: Float8BlockwiseQTensor and its quantizer."""

from zerocast import Float8BlockScaling, QParams
from zerocast.adapters.transformer_engine.pytorch.constants import DType
from zerocast.adapters.transformer_engine.pytorch.quantized_tensor import SchemeTensor
from zerocast.adapters.transformer_engine.pytorch.quantizer import Quantizer

__all__ = ["Float8BlockQuantizer", "Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage"]


class Float8BlockwiseQTensor(SchemeTensor):
    """The class of tensors of :class:`zerocast.Float8BlockScaling`."""

    schemes = ("block",)


Float8BlockwiseQTensorStorage = Float8BlockwiseQTensor


class Float8BlockQuantizer(Quantizer):
    """A quantizer to FP8 in blocks.

    Args:
        fp8_dtype: a :class:`DType` of 8 bits.
        rowwise, columnwise: which copies results hold.
        amax_epsilon: the lower bound of an amax.
        force_pow_2_scales: whether to round scales down to powers of two.
        block_scaling_dim: 2 for blocks of 128x128, 1 for 1x128.

    Raises:
        InputError: for another dtype or dimension.
    """

    scheme = "block"

    def __init__(
        self,
        fp8_dtype: int,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        recipe = Float8BlockScaling(
            fp8_format=DType.name_of(fp8_dtype, bits=8),
            fp8_quant_fwd_weight=QParams(
                power_2_scale=force_pow_2_scales, amax_epsilon=amax_epsilon
            ),
            w_block_scaling_dim=block_scaling_dim,
        )
        self._start(recipe, rowwise, columnwise)
