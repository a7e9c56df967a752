"""FP8 with one scale per tensor: Float8Tensor and its quantizers."""

import torch

from zerocast import DelayedScaling, Float8CurrentScaling, InputError, QParams
from zerocast.adapters.transformer_engine.pytorch.constants import DType
from zerocast.adapters.transformer_engine.pytorch.quantized_tensor import SchemeTensor
from zerocast.adapters.transformer_engine.pytorch.quantizer import Quantizer, check_one_value

__all__ = [
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
]


class Float8Tensor(SchemeTensor):
    """The class of tensors of delayed and of current scaling."""

    schemes = ("delayed", "current")


Float8TensorStorage = Float8Tensor


class Float8Quantizer(Quantizer):
    """A quantizer to FP8 with a given scale, which records the amax.

    Args:
        scale: FP32 [1], read at each cast: codes are those of ``value * scale``.
        amax: FP32 [1], set at each cast to the maximum of itself and the tensor's amax.
        fp8_dtype: a :class:`DType` of 8 bits.
        rowwise, columnwise: which copies results hold.

    Raises:
        InputError: for another scale, amax or dtype.
    """

    scheme = "delayed"

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: int,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        for name, given in (("scale", scale), ("amax", amax)):
            if (given.dtype, given.numel()) != (torch.float32, 1):
                raise InputError(
                    f"{name} must be an FP32 tensor of one element, got {given.dtype} of shape "
                    f"{tuple(given.shape)}."
                )
        fmt = DType.name_of(fp8_dtype, bits=8)
        recipe = DelayedScaling(fp8_format=fmt, amax_history_len=1)
        state = {"scale": scale.view(1), "amax": amax.view(1)}
        self._start(recipe, rowwise, columnwise, state)

    @property
    def scale(self) -> torch.Tensor:
        """The factor that values are multiplied by, FP32 [1]."""
        return self._state["scale"]

    @property
    def amax(self) -> torch.Tensor:
        """The largest amax of the casts since it was set, FP32 [1]."""
        return self._state["amax"]


class Float8CurrentScalingQuantizer(Quantizer):
    """A quantizer to FP8 with the scale that the tensor's amax gives.

    Args:
        fp8_dtype: a :class:`DType` of 8 bits.
        device: has no effect; results are on the device of the given tensors.
        rowwise, columnwise: which copies results hold.
        with_amax_reduction, amax_reduction_group: must be False and None.
        force_pow_2_scales: whether to round scales down to powers of two.
        amax_epsilon: the lower bound of an amax.

    Raises:
        InputError: for another dtype.
        UnsupportedError: if amaxes are to be reduced.
    """

    scheme = "current"

    def __init__(
        self,
        fp8_dtype: int,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: object = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        check_one_value(
            with_amax_reduction=(with_amax_reduction, False),
            amax_reduction_group=(amax_reduction_group, None),
        )
        params = QParams(power_2_scale=force_pow_2_scales, amax_epsilon=amax_epsilon)
        fmt = DType.name_of(fp8_dtype, bits=8)
        recipe = Float8CurrentScaling(fp8_format=fmt, fp8_quant_fwd_weight=params)
        self._start(recipe, rowwise, columnwise)
