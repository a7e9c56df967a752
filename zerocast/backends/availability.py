"""Says what the GEMMs of this machine multiply: whether quantizing gains speed, and if not, why.

Every recipe works on every device: where codes cannot be multiplied, a layer multiplies the decoded
values. So these functions refuse nothing; they inform users, and
:func:`zerocast.get_default_recipe` chooses by them. They describe the current CUDA device.
"""

from __future__ import annotations

import torch

from zerocast.arguments import check_flag

Answer = bool | tuple[bool, str]
"""Whether it is available; with ``return_reason=True`` also why not, "" if it is."""


def is_fp8_available(return_reason: bool = False) -> Answer:
    """Say whether the current CUDA device multiplies FP8 matrices; with ``return_reason``, that and
    the reason why not.

    Where it does not, the CPU included, FP8 recipes still work: products are those of the decoded
    values.
    """
    return _answer(_lacks((8, 9), "FP8"), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Answer:
    """Say the same as :func:`is_fp8_available` about MXFP8."""
    lacks, capability = _lacks((10, 0), "MXFP8"), compute_capability()
    if capability is not None and capability >= (12, 0):
        lacks = (
            "MXFP8 products in all directions that training needs require compute capability 10, "
            f"and this device has {_text(capability)}."
        )
    return _answer(lacks, return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Answer:
    """Say the same as :func:`is_fp8_available` about NVFP4."""
    return _answer(_lacks((10, 0), "NVFP4"), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Answer:
    """Say the same as :func:`is_fp8_available` about FP8 with a scale a block."""
    lacks = _lacks((9, 0), "blockwise FP8")
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if not lacks and version < (12, 9):
        lacks = (
            f"blockwise FP8 products need CUDA 12.9 or newer, and this torch was built with CUDA "
            f"{torch.version.cuda}."
        )
    return _answer(lacks, return_reason)


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the current CUDA device; None where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _answer(lacks: str, return_reason: bool) -> Answer:
    return (not lacks, lacks) if check_flag("return_reason", return_reason) else not lacks


def _lacks(needed: tuple[int, int], what: str) -> str:
    """Say what is missing to multiply ``what`` on the current device; empty if nothing is."""
    capability = compute_capability()
    if capability is None:
        return f"{what} products need a CUDA device, and torch sees none."
    if capability < needed:
        return (
            f"{what} products need compute capability {_text(needed)} or higher, and this device "
            f"has {_text(capability)}."
        )
    return ""


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
