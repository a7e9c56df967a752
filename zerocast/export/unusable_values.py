"""Checks for weights that no server could use: values not finite, tensor scales out of range."""

from collections.abc import Mapping

import torch

from zerocast.errors import NonFiniteError, UnsupportedError
from zerocast.export.dialects import Dialect
from zerocast.numerics import E4M3, FLT_MAX, NVFP4Numerics
from zerocast.tensors import QuantizedStorage


def check_tensor_scale(name: str, dialect: Dialect, storage: QuantizedStorage) -> None:
    """Raise :class:`UnsupportedError` if FP32 cannot represent the tensor scale of ``dialect``,
    since a server would then decode other values.
    """
    scale, amax = dialect.tensor_scale, storage.buffers.get("amax")
    if scale is None or amax is None or not scale.inverted:
        return
    assert isinstance(storage.recipe.numerics, NVFP4Numerics)
    if bool((scale.of(amax, storage.recipe.numerics.scale_max) == FLT_MAX).any()):
        raise UnsupportedError(
            f"{name} has no element above {amax.max().item():g}, too small for the tensor scale of "
            f"{dialect.name}, whose inverse FP32 cannot hold; leave it unquantized."
        )


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise :class:`NonFiniteError` if a high-precision value is not finite or a scale is NaN.

    The scale of a block that holds a NaN or an infinity is NaN.

    Args:
        tensors: high-precision values, or block scales, by the names of their parameters.
    """
    held = {name: each for name, each in tensors.items() if each.numel()}
    if not held:
        return
    flags = torch.stack([_is_bad(each) for each in held.values()])
    for name, flag in zip(held, flags.tolist(), strict=True):
        if flag:
            raise NonFiniteError(
                f"{name} holds a NaN or an infinity, so no server can use it; export a checkpoint "
                f"of an earlier step."
            )


def _is_bad(scales: torch.Tensor) -> torch.Tensor:
    """Return, as a bool tensor, whether any value or scale is NaN or infinite.

    E4M3 and E8M0 scales are not negative, so their codes are ordered as their values, with NaN the
    greatest; one maximum finds it.
    """
    if scales.is_floating_point() and scales.element_size() > 1:
        return ~torch.stack(scales.aminmax()).isfinite().all()  # no temporary of its size
    nan_code = E4M3.nan_code if scales.dtype == torch.float8_e4m3fn else 255
    return scales.view(torch.uint8).max() >= nan_code
