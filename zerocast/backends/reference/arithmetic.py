"""FP32 arithmetic that rounds once, on every device."""

from __future__ import annotations

import torch

from zerocast.numerics import FLT_MAX


def fl(value: float) -> float:
    """Return ``value`` rounded to FP32."""
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def divide(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """Return ``a / b``, of which one is a tensor, rounded once. (torch computes ``float / tensor``,
    and on a GPU ``tensor / float``, as a product with the reciprocal, which is rounded twice.)
    """
    like = a if isinstance(a, torch.Tensor) else b
    assert isinstance(like, torch.Tensor)
    a, b = (x if isinstance(x, torch.Tensor) else torch.full_like(like, x) for x in (a, b))
    return a / b


def not_above_flt_max(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with FLT_MAX in place of infinity; NaN stays."""
    return x.clamp(max=FLT_MAX)
