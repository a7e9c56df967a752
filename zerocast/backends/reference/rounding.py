"""Stochastic rounding: a code is drawn from the two neighbours of a value."""

from __future__ import annotations

import torch

from zerocast.numerics import ElementFormat, decode


def encode_stochastic(x: torch.Tensor, fmt: ElementFormat, draws: torch.Tensor) -> torch.Tensor:
    """Round FP32 values to one of their two neighbours among the codes of ``fmt``.

    The upper one, in magnitude, has a probability equal to the distance from the lower one, to the
    nearest 2^-16, so the mean of many draws is the value. What is exactly a code's value stays, and
    what is beyond the largest saturates. NaN, which has no neighbours, gives ``fmt.nan_code``.

    Args:
        x: [n] FP32.
        fmt: the format.
        draws: [n] int64, 16 random bits each.

    Returns:
        [n] uint8 codes.
    """
    values = decode(
        torch.arange(fmt.max_code + 1, dtype=torch.int64, device=x.device), fmt
    )  # ascending
    y = torch.nan_to_num(x).abs().clamp(max=fmt.max)
    y = torch.where(y < 1, (y + 1) - 1, y)  # a distance has 22 bits, or fewer
    # The last code has no upper neighbour: its values belong to the gap below it, at distance 1.
    lower = (torch.searchsorted(values, y, right=True) - 1).clamp(max=fmt.max_code - 1)
    gap = values[lower + 1] - values[lower]
    distance = (y - values[lower]).double() / gap  # exact, as is the sum: gaps are powers of two
    code = lower + (distance + (draws.double() + 0.5) * 2.0**-16 >= 1)
    code = code | (torch.signbit(x).to(torch.int64) << (fmt.bits - 1))
    return torch.where(x.isnan(), fmt.nan_code, code).to(torch.uint8)
