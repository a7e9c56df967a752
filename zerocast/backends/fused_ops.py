"""Fused operations for every backend: the row that compiled code is given, the formulas in float64,
and the casts of values in memory, for backends that cast in separate passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import torch

from zerocast.backends.tables import Address, float_bits
from zerocast.layout import FULL, Extent, Plane, ScaleLayout, Source, grid_of
from zerocast.numerics import (
    NOMINALS,
    Backend,
    Float8DelayedNumerics,
    Function,
    FusedOperand,
    Launch,
    Masters,
    Numerics,
    PlaneBuffers,
    TensorOperand,
    can_fuse,
)


def fused_row(target: FusedOperand, address: Address) -> list[int]:
    """FusedTable of fused_op.h."""
    operands = (target.source, target.weight, target.bias)
    results = (target.output, target.mean, target.rstd)
    return [
        get_args(Function).index(target.op.function),
        float_bits(target.op.eps),
        int(target.op.zero_centered_gamma),
        target.rows,
        target.cols,
        NOMINALS[target.round_to],
        *(0 if tensor is None else NOMINALS[tensor.dtype] for tensor in operands),
        *map(address, (*operands, *results)),
    ]


# --- the formulas ---


def rounded_result(target: FusedOperand) -> torch.Tensor:
    """Return the result of float64 arithmetic, rounded, FP32 [M, K]; write mean and rstd."""
    result = _norm(target) if target.op.is_norm else _element_wise(target)
    # Rounded once more on the way, to FP32, where that is not the aim.
    values = result.float().to(target.round_to).float()
    return _with_canonical_nan(values)


def _element_wise(target: FusedOperand) -> torch.Tensor:
    x, function = target.source.double(), target.op.function
    if function == "identity":
        return x
    if function == "relu":
        return x.relu()
    if function == "gelu":
        # Not 1 + erf, which loses its digits where erf comes near -1.
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


def _store(output: torch.Tensor, values: torch.Tensor) -> None:
    """Write values [M, K], FP32 and rounded, whose NaNs are the canonical one. Which NaN torch's
    own conversion makes of it depends on the device, and for BF16 on strides.
    """
    if output.dtype == torch.bfloat16:  # the upper halves
        output.view(torch.int16).copy_(values.view(torch.int16)[:, 1::2])
    elif output.dtype == torch.float16:
        output.copy_(values).masked_fill_(values.isnan(), math.nan)
    else:
        output.copy_(values)


# --- the casts of values in memory ---


def with_casts(
    backend: Backend,
    numerics: Numerics | None,
    target: FusedOperand,
    result: Callable[[FusedOperand], torch.Tensor],
) -> Launch:
    """Return the launch that takes the ``result`` of the operation, FP32 [M, K] and rounded, and
    casts it by the operations of weights.
    """

    def launch() -> None:
        values = result(target)
        if target.output is not None:
            _store(target.output, values)
        _cast(backend, numerics, target, values)

    return launch


def _cast(
    backend: Backend, numerics: Numerics | None, target: FusedOperand, values: torch.Tensor
) -> None:
    """Write the codes, scales and amaxes of ``values``: each plane is cast by itself, a transposed
    one from the transposed values.
    """
    if numerics is None and target.tensor_amax is None:
        return
    tensor_amax = torch.zeros(1, dtype=torch.int32, device=values.device)
    operands, masters = _operands(numerics, target, values, tensor_amax)
    with_codes = [each for each in operands if each.planes[0].codes is not None]
    with_scales = [each for each in operands if each.planes[0].scale_inv is not None]
    if isinstance(numerics, Float8DelayedNumerics):
        backend.partial_cast(numerics, with_codes, masters)()
        backend.compute_scale(numerics, with_scales)()
    else:
        backend.partial_amax(operands, masters)()
        if numerics is not None:
            assert can_fuse(numerics)
            backend.compute_scale(numerics, with_scales)()
            backend.partial_cast(numerics, with_codes, masters)()
    for given, each in zip(target.planes, operands, strict=False):
        # A block that is not finite has codes even where no element is.
        if given.codes is not None and each.grid.cols > given.plane.grid.cols:
            given.codes.view(each.grid.rows, -1)[:, -1] &= 0x0F
    if target.amax is not None:
        target.amax.copy_(tensor_amax.view(torch.float32))
    if target.tensor_amax is not None:
        target.tensor_amax.copy_(torch.maximum(target.tensor_amax, tensor_amax))


def _operands(
    numerics: Numerics | None,
    target: FusedOperand,
    values: torch.Tensor,
    tensor_amax: torch.Tensor,
) -> tuple[list[TensorOperand], Masters]:
    """Return the whole tensor as the operands of casts, one a plane: of each its own master."""
    planes = target.planes
    if not planes:  # there is still an amax to take, of one block
        everything = ScaleLayout(grid_of(target.rows, target.cols, (FULL, FULL)))
        planes = (PlaneBuffers(Plane("rowwise", Source.MASTER, (FULL, FULL), everything)),)
    operands, sources = [], []
    for slot, given in enumerate(planes):
        plane = replace(given.plane, source=Source.MASTER)
        if numerics is not None and given.codes is not None:
            plane = plane.in_whole_bytes(numerics.fmt.bits)
        grid = plane.grid
        source = values.t() if given.plane.is_transposed else values
        if missing := grid.cols - source.shape[1]:
            source = torch.nn.functional.pad(source, (0, missing))
        sources.append(source.contiguous())
        amax = tensor_amax  # of the one block, whose scale may be wanted without these codes
        if target.delayed is None:
            amax = torch.zeros(grid.num_blocks, dtype=torch.int32, device=values.device)
        operand = TensorOperand(
            (PlaneBuffers(plane, amax, given.codes, given.scale_inv),),
            slot,
            Extent(0, grid.numel),
            target.round_to,
            tensor_amax=tensor_amax,
            delayed=target.delayed,
            advances=False,
        )
        operands.append(operand)
    masters = Masters(len(operands))
    masters.bind(sources)
    return operands, masters
