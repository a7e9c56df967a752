"""The update of AdamW in plain torch; see "AdamW" in the numerics' documentation.

torch's own operations differ: some fuse a product and a sum where the machine can, and the square
root on a CPU is off by one unit in the last place for some values.
"""

from __future__ import annotations

import torch

from zerocast.backends.tables import adamw_numbers
from zerocast.numerics import AdamWUpdate


def update(by: AdamWUpdate) -> None:
    """Make one step on one tensor."""
    # FP32 values by their bits: a thread that flushes subnormals would round some differently.
    bits = torch.tensor(adamw_numbers(by.numbers), dtype=torch.int64, device="cpu")
    numbers = bits.to(torch.int32).view(torch.float32).to(by.master.device)
    decay, sign, weight, _, square_decay, square_weight, correction, eps, step = numbers
    gradient, average, square = by.gradient * sign, by.exp_avg, by.exp_avg_sq
    base = gradient if by.numbers.from_gradient else average
    average.copy_(fma(weight, gradient - average, base))
    square.copy_(fma(square_weight * gradient, gradient, square_decay * square))
    if by.max_exp_avg_sq is not None:
        square = torch.maximum(by.max_exp_avg_sq, square, out=by.max_exp_avg_sq)
    denominator = square.double().sqrt().float() / correction + eps
    by.master.copy_(by.master * decay + step * average / denominator)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return ``a * b + c`` of FP32 tensors, rounded once.

    The product is exact in FP64. Its sum with ``c`` is rounded to odd there, so that rounding to
    FP32 sees no false tie.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(torch.int64)
    even = (error != 0) & error.isfinite() & (bits % 2 == 0)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(even, bits + away, bits).view(torch.float64).float()
