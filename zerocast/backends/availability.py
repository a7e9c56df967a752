"""What the GEMMs of this machine multiply: whether quantizing gains speed, and if not, why.

Every recipe works on every device: where codes cannot be multiplied, a layer multiplies the values
that they mean. So these functions refuse nothing; they say what a user may expect, and what
:func:`zerocast.get_default_recipe` chooses by. They speak of the current CUDA device.
"""

from __future__ import annotations

import torch


def is_fp8_available() -> tuple[bool, str]:
    """Whether the current CUDA device multiplies FP8 matrices, and if not, the reason.

    Where it does not, the CPU included, FP8 recipes still work: products are those of the values
    that the codes mean.
    """
    return _available((8, 9), "FP8")


def is_mxfp8_available() -> tuple[bool, str]:
    """As :func:`is_fp8_available`, for MXFP8."""
    capability = compute_capability()
    if capability is not None and capability >= (12, 0):
        return False, (
            f"MXFP8 products in all the directions that training needs are those of compute "
            f"capability 10, and this device has {_text(capability)}."
        )
    return _available((10, 0), "MXFP8")


def is_nvfp4_available() -> tuple[bool, str]:
    """As :func:`is_fp8_available`, for NVFP4."""
    return _available((10, 0), "NVFP4")


def is_fp8_block_scaling_available() -> tuple[bool, str]:
    """As :func:`is_fp8_available`, for FP8 with a scale a block."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    available, reason = _available((9, 0), "blockwise FP8")
    if available and version < (12, 9):
        return False, (
            f"blockwise FP8 products need CUDA 12.9 or newer, and this torch was built with CUDA "
            f"{torch.version.cuda}."
        )
    return available, reason


def compute_capability() -> tuple[int, int] | None:
    """Of the current CUDA device; None where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _available(needed: tuple[int, int], what: str) -> tuple[bool, str]:
    capability = compute_capability()
    if capability is None:
        return False, f"{what} products need a CUDA device, and torch sees none."
    if capability < needed:
        return False, (
            f"{what} products need compute capability {_text(needed)} or higher, and this device "
            f"has {_text(capability)}."
        )
    return True, ""


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
