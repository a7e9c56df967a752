"""Fused operations for every backend: the row that is passed to compiled code, and the formulas in
float64.
"""

from __future__ import annotations

import math
from typing import get_args

import torch

from zerocast.backends.tables import Address, float_bits
from zerocast.numerics import NOMINALS, Function, FusedOperand


def fused_row(target: FusedOperand, address: Address) -> list[int]:
    """Return the fields of FusedTable of fused_op.h."""
    operands = (target.source, target.weight, target.bias)
    results = (target.output, target.mean, target.rstd)
    return [
        get_args(Function).index(target.op.function),
        float_bits(target.op.eps),
        int(target.op.zero_centered_gamma),
        *target.output.shape,
        NOMINALS[target.output.dtype],
        *(0 if tensor is None else NOMINALS[tensor.dtype] for tensor in operands),
        *map(address, (*operands, *results)),
    ]


# --- the formulas ---


def write_result(target: FusedOperand) -> None:
    """Write the result of float64 arithmetic, rounded, and the mean and rstd of rows."""
    result = _norm(target) if target.op.is_norm else _element_wise(target)
    # Rounded first to FP32, also where the output has another dtype.
    output = target.output
    values = _with_canonical_nan(result.float().to(output.dtype).float())
    # Which NaN torch's own conversion makes of the canonical one depends on the device, and for
    # BF16 on strides.
    if output.dtype == torch.bfloat16:  # the upper halves
        output.view(torch.int16).copy_(values.view(torch.int16)[:, 1::2])
    else:
        output.copy_(values).masked_fill_(values.isnan(), math.nan)


def _element_wise(target: FusedOperand) -> torch.Tensor:
    x, function = target.source.double(), target.op.function
    if function == "identity":
        return x
    if function == "relu":
        return x.relu()
    if function == "gelu":
        # Not 1 + erf, which cancels where erf is near -1.
        return x * (0.5 * torch.special.erfc(x * -math.sqrt(0.5)))
    if function == "gelu_tanh":
        return x * (2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).sigmoid()
    if function == "silu":
        return x * x.sigmoid()
    assert function == "swiglu"
    first, second = x.chunk(2, dim=1)
    return first * first.sigmoid() * second


def _norm(target: FusedOperand) -> torch.Tensor:
    x, op = target.source.double(), target.op
    if op.function == "layernorm":
        mean = x.mean(dim=1, keepdim=True)
        x = x - mean
        if target.mean is not None:
            target.mean.copy_(_with_canonical_nan(mean.view(-1)))
    rstd = (x.square().mean(dim=1, keepdim=True) + op.eps).rsqrt()
    if target.rstd is not None:
        target.rstd.copy_(_with_canonical_nan(rstd.view(-1)))
    x = x * rstd
    if target.weight is not None:
        weight = target.weight.double()
        x = x * (1 + weight if op.zero_centered_gamma else weight)
    return x if target.bias is None else x + target.bias.double()


def _with_canonical_nan(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isnan(), math.nan, values)
