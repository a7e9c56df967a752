"""NVFP4: NVFP4Tensor and its quantizer."""

from zerocast import InputError, NVFP4BlockScaling, QParams
from zerocast.adapters.transformer_engine.pytorch.constants import DType
from zerocast.adapters.transformer_engine.pytorch.quantized_tensor import SchemeTensor
from zerocast.adapters.transformer_engine.pytorch.quantizer import Quantizer, check_one_value

__all__ = ["NVFP4Quantizer", "NVFP4Tensor", "NVFP4TensorStorage"]


class NVFP4Tensor(SchemeTensor):
    """The class of tensors of :class:`zerocast.NVFP4BlockScaling`."""

    schemes = ("nvfp4",)


NVFP4TensorStorage = NVFP4Tensor


class NVFP4Quantizer(Quantizer):
    """A quantizer to E2M1, in blocks of 1x16 or 16x16.

    Args:
        fp4_dtype: ``DType.kFloat4E2M1``.
        rowwise, columnwise: which copies results hold.
        with_amax_reduction, amax_reduction_group, with_post_rht_amax, row_scaled_nvfp4: must be
            False, None, False and False.
        with_rht: must be False: the random Hadamard transform is not implemented.
        with_2d_quantization: whether blocks are 16x16, as those of weights.
        stochastic_rounding: whether to round stochastically to one of both neighbours.
        nvfp4_use_4over6: whether each block of 16x16 uses the better of two scales.
        nvfp4_e4m3_max: the largest scale: 448, or with 4-over-6 also 256.
        nvfp4_4over6_err_mode: the error that the better scale minimizes: ``"MAE"`` or ``"MSE"``.

    Raises:
        InputError: for another dtype or largest scale.
        UnsupportedError: for another value of an argument that must have its default.
    """

    scheme = "nvfp4"

    def __init__(
        self,
        fp4_dtype: int = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: object = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
    ) -> None:
        check_one_value(
            with_amax_reduction=(with_amax_reduction, False),
            amax_reduction_group=(amax_reduction_group, None),
            with_post_rht_amax=(with_post_rht_amax, False),
            row_scaled_nvfp4=(row_scaled_nvfp4, False),
        )
        DType.name_of(fp4_dtype, bits=4)
        if nvfp4_e4m3_max not in ((448, 256) if nvfp4_use_4over6 else (448,)):
            raise InputError(
                f"nvfp4_e4m3_max must be 448, or 256 with nvfp4_use_4over6=True, got "
                f"{nvfp4_e4m3_max}."
            )
        params = QParams(
            fp4_2d_quantization=with_2d_quantization, stochastic_rounding=stochastic_rounding
        )
        recipe = NVFP4BlockScaling(
            disable_rht=not with_rht,
            fp4_quant_fwd_weight=params,
            nvfp4_4over6="weights" if nvfp4_use_4over6 else "none",
            nvfp4_4over6_e4m3_use_256="all" if nvfp4_e4m3_max == 256 else "none",
            nvfp4_4over6_err_mode=nvfp4_4over6_err_mode,
        )
        self._start(recipe, rowwise, columnwise)
