"""FP8 with one scale a tensor: Float8Tensor and its quantizers."""

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
    """The tensors of delayed and of current scaling."""

    schemes = ("delayed", "current")


Float8TensorStorage = Float8Tensor


class Float8Quantizer(Quantizer):
    """Quantizes under a scale that is given, and takes the amax.

    Args:
        scale: FP32 [1], read at each cast: codes are those of ``value * scale``.
        amax: FP32 [1], raised at each cast to the tensor's amax.
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
        """FP32 [1]: what values are multiplied by."""
        return self._state["scale"]

    @property
    def amax(self) -> torch.Tensor:
        """FP32 [1]: the largest amax of the casts since it was set."""
        return self._state["amax"]


class Float8CurrentScalingQuantizer(Quantizer):
    """Quantizes under the scale that the tensor's own amax gives.

    Args:
        fp8_dtype: a :class:`DType` of 8 bits.
        device: TransformerEngine's; results are where the tensors are.
        rowwise, columnwise: which copies results hold.
        with_amax_reduction, amax_reduction_group: must stay False and None.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: a smaller amax is replaced by this one.

    Raises:
        InputError: for another dtype.
        UnsupportedError: where amaxes are to be reduced.
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
