"""What casts the same FP32 tensor today: plain torch, and torchao where it is installed.

For scripts/bench_cast.py and bench_cuda.py. Plain torch computes what a zerocast recipe does,
formula by formula, as one would write it down in an afternoon; torchao's functions are the ones
that its users call. Those do less or other work in places (1x16 blocks, no rounding to BF16 first),
so this compares speed and not bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Cast = Callable[[Tensor], tuple[Tensor, ...]]
"""An FP32 matrix [M, K] to codes and scales."""

TORCHAO = "0.18"
"""The version whose functions are called."""


def plain_fp8(x: Tensor) -> tuple[Tensor, ...]:
    """E4M3 under one scale a tensor."""
    x = x.bfloat16().float()
    scale = 448.0 / x.abs().max()
    return (x * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), 1.0 / scale


def plain_nvfp4(x: Tensor) -> tuple[Tensor, ...]:
    """E2M1 in 16x16 blocks, two codes a byte."""
    rows, cols = x.shape
    blocks = x.bfloat16().float().view(rows // 16, 16, cols // 16, 16)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    tensor_amax = amax.max()
    encode = 2688.0 / tensor_amax
    scales = (amax * (encode * (1.0 / 6.0))).to(torch.float8_e4m3fn)
    scaled = (blocks * (1.0 / (scales.float() * (1.0 / encode)))).view(rows, cols)
    magnitude = scaled.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    # Ties go to the even code: a threshold is exclusive below an odd one, inclusive below an even.
    for threshold in (0.25, 1.25, 2.5, 5.0):
        codes += magnitude > threshold
    for threshold in (0.75, 1.75, 3.5):
        codes += magnitude >= threshold
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales, tensor_amax


def plain_fp8_blockwise(x: Tensor) -> tuple[Tensor, ...]:
    """E4M3 in 128x128 blocks, scales rounded down to powers of two."""
    rows, cols = x.shape
    blocks = x.bfloat16().float().view(rows // 128, 128, cols // 128, 128)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(448.0 / amax)))
    codes = (blocks * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(rows, cols), 1.0 / scale


PLAIN: dict[str, Cast] = {
    "nvfp4": plain_nvfp4,
    "fp8": plain_fp8,
    "fp8_blockwise": plain_fp8_blockwise,
}
"""By the names that scripts/bench_cuda.py gives the recipes."""


def torchao_casts() -> dict[str, Cast]:
    """torchao's casts by recipe; none where it is not installed, or is another version."""
    try:
        import torchao
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig
        from torchao.prototype.mx_formats.nvfp4_tensor import (
            nvfp4_quantize,
            per_tensor_amax_to_scale,
        )
    except ImportError:
        return {}
    if not torchao.__version__.startswith(TORCHAO + "."):
        return {}
    config = LinearMMConfig()

    def nvfp4(x: Tensor) -> tuple[Tensor, ...]:
        return nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()))

    def fp8(x: Tensor) -> tuple[Tensor, ...]:
        cast = hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, config)
        return cast._data, cast._scale

    return {"NVFP4": nvfp4, "FP8": fp8}


def torchao_blocks() -> Cast | None:
    """torchao's kernel for FP8 in 128x128 blocks; None where it is not installed."""
    try:
        from torchao.prototype.blockwise_fp8_training import kernels
    except ImportError:  # triton's, too
        return None
    return kernels.triton_fp8_blockwise_weight_quant_rhs


def all_casts() -> dict[str, dict[str, Cast]]:
    """By recipe, then by who does it: eager and compiled."""
    plain: dict[str, Cast] = {"NVFP4": plain_nvfp4, "FP8": plain_fp8}
    casts: dict[str, dict[str, Cast]] = {}
    for recipe in plain:
        named = {"torch": plain[recipe]}
        if recipe in torchao_casts():
            named[f"torchao {TORCHAO}"] = torchao_casts()[recipe]
        casts[recipe] = {}
        for name, cast in named.items():
            casts[recipe][f"{name}, eager"] = cast
            casts[recipe][f"{name}, compiled"] = torch.compile(cast, dynamic=False)
    return casts
