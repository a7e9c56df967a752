"""Stochastic rounding: a code is drawn from the two neighbours of a value."""

from __future__ import annotations

import torch

from zerocast.backends.reference.arithmetic import divide
from zerocast.formats import ElementFormat, decode


def encode_stochastic(x: torch.Tensor, fmt: ElementFormat, words: torch.Tensor) -> torch.Tensor:
    """Round FP32 values to one of their two neighbours among the codes of ``fmt``.

    The upper one, in magnitude, has a probability equal to the distance from the lower one, so the
    mean of many draws is the value. What is exactly a code's value stays, and what is beyond the
    largest saturates. NaN, which has no neighbours, gives ``fmt.nan_code``.

    Args:
        x: [n] FP32.
        fmt: the format.
        words: [n] int64, a random word of 32 bits each.

    Returns:
        [n] uint8 codes.
    """
    values = decode(
        torch.arange(fmt.max_code + 1, dtype=torch.int64, device=x.device), fmt
    )  # ascending
    y = torch.nan_to_num(x).abs().clamp(max=fmt.max)
    # The last code has no upper neighbour: its values belong to the gap below it, at distance 1.
    lower = (torch.searchsorted(values, y, right=True) - 1).clamp(max=fmt.max_code - 1)
    gap = values[lower + 1] - values[lower]
    # 24 of the 32 bits are an FP32 number in [0, 1), exactly.
    drawn = (words >> 8).float() * 2.0**-24
    code = lower + (drawn < divide(y - values[lower], gap))
    code = code | (torch.signbit(x).to(torch.int64) << (fmt.bits - 1))
    return torch.where(x.isnan(), fmt.nan_code, code).to(torch.uint8)
