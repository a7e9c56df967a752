"""FP32 values that find bugs: random normal data hides every bug of this field."""

import torch

KINDS = (
    "normal",
    "wide",
    "zeros",
    "ties",
    "subnormal",
    "underflow",
    "bits",
    "nan",
    "infinity",
    "huge",
)


def draw_values(kind: str, numel: int, seed: int) -> torch.Tensor:
    """[numel] FP32 values of a kind.

    wide        magnitudes from 2^-40 to 2^40 side by side, so block scales underflow
    zeros       whole blocks of zeros of both signs
    ties        multiples of 1/8, many of which lie half-way between two codes
    subnormal   FP32 subnormals only
    underflow   one large value, all others so small that their block's scale rounds to zero
    bits        any bit pattern that is finite
    nan         normal, with one NaN somewhere
    infinity    normal, with one infinity somewhere
    huge        up to FLT_MAX, which overflows FP16 and, rounded up, BF16
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=g)
    at = int(torch.randint(max(numel, 1), (1,), generator=g))
    if kind == "wide":
        x *= torch.exp2(torch.randint(-40, 41, (numel,), generator=g).float())
    elif kind == "zeros":
        x *= (torch.arange(numel) // 57 % 3 == 0).float()
    elif kind == "ties":
        x = torch.randint(-64, 65, (numel,), generator=g).float() / 8
    elif kind == "subnormal":
        x = (
            torch.randint(-(2**23) + 1, 2**23, (numel,), generator=g, dtype=torch.int32).float()
            * 2.0**-149
        )
    elif kind == "underflow":
        x *= 1e-6
        x[at : at + 1] = 3e5
    elif kind in ("bits", "huge"):
        bits = torch.randint(-(2**31), 2**31, (numel,), generator=g).to(torch.int32)
        if kind == "huge":
            bits = bits | 0x7E800000
        x = bits.view(torch.float32)
        x = torch.where(x.isfinite(), x, -0.0)
    elif kind == "nan":
        x[at : at + 1] = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    elif kind == "infinity":
        x[at : at + 1] = -torch.inf
    return x.contiguous()


def every_bf16() -> torch.Tensor:
    """[65536] FP32: every BF16 value by its bits, infinities and every NaN included."""
    return torch.arange(1 << 16, dtype=torch.int32).bitwise_left_shift(16).view(torch.float32)
