"""Regions in which layers quantize, and functions that return whether recipes are available."""

from zerocast import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    quantized_model_init,
)
from zerocast.arguments import check_flag

__all__ = [
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True, since every recipe runs on every device; with ``return_reason``, (True, "").

    :func:`zerocast.is_fp8_available` and similar functions return whether this machine has a GEMM
    for the codes.
    """
    return (True, "") if check_flag("return_reason", return_reason) else True


is_mxfp8_available = is_nvfp4_available = is_fp8_block_scaling_available = is_fp8_available
