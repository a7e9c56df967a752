"""Activations for every backend: the table that compiled code is given, the law in float64, and the
cast of values that stand in memory, for backends that cast in a pass of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from zerocast.backends.tables import Address, float_bits
from zerocast.layout import BlockGrid, Extent, ScaleLayout
from zerocast.ops import (
    NOMINALS,
    Activation,
    ActivationTarget,
    Backend,
    CastPlane,
    CastShard,
    DelayedState,
    Float8DelayedLaw,
    Law,
    Masters,
    ScaleTarget,
    can_activate,
)

# FunctionId of activation.h.
FUNCTIONS = {
    "identity": 0,
    "relu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "silu": 4,
    "swiglu": 5,
    "layernorm": 6,
    "rmsnorm": 7,
}


def activation_fields(target: ActivationTarget, address: Address) -> list[int]:
    """ActivationTable."""
    operands = (target.source, target.weight, target.bias, target.output, target.mean, target.rstd)
    return [
        FUNCTIONS[target.activation.function],
        float_bits(target.activation.eps),
        int(target.activation.zero_centered_gamma),
        target.rows,
        target.cols,
        NOMINALS[target.round_to],
        *(0 if tensor is None else address(tensor) for tensor in operands),
    ]


# --- the law ---


def float64_result(target: ActivationTarget) -> torch.Tensor:
    """[M, K] float64: the function of the source, before it is rounded; writes mean and rstd."""
    x = target.source.double()
    activation = target.activation
    if activation.is_norm:
        return _norm(activation, x, target)
    return _element_wise(activation, x)


def _element_wise(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    function = activation.function
    if function == "identity":
        return x
    if function == "relu":
        return x.relu()
    if function == "gelu":
        # Not 1 + erf, which loses its digits where erf comes near -1.
        return x * (0.5 * torch.special.erfc(x * -math.sqrt(0.5)))
    if function == "gelu_tanh":
        return _gate(x, 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    if function == "silu":
        return _gate(x, x)
    assert function == "swiglu"
    first, second = x.chunk(2, dim=1)
    return _gate(first, first) * second


def _gate(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x * z.sigmoid()


def _norm(activation: Activation, x: torch.Tensor, target: ActivationTarget) -> torch.Tensor:
    if activation.function == "layernorm":
        mean = x.mean(dim=1, keepdim=True)
        x = x - mean
        if target.mean is not None:
            target.mean.copy_(mean.view(-1))
    rstd = (x.square().mean(dim=1, keepdim=True) + activation.eps).rsqrt()
    if target.rstd is not None:
        target.rstd.copy_(rstd.view(-1))
    x = x * rstd
    if target.weight is not None:
        weight = target.weight.double()
        x = x * (1 + weight if activation.zero_centered_gamma else weight)
    return x if target.bias is None else x + target.bias.double()


# --- the cast of values in memory ---


def cast_values(
    backend: Backend, law: Law | None, target: ActivationTarget, values: torch.Tensor
) -> None:
    """Write the codes, scales and amaxes of ``values``, FP32 [M, K], rounded already.

    Each plane is cast by itself, by the operations of weights: a transposed one is the cast of the
    transposed values.
    """
    if law is None and target.tensor_amax is None:
        return
    tensor_amax = torch.zeros(1, dtype=torch.int32, device=values.device)
    # Without planes there is still an amax to take, of one block.
    everything = ScaleLayout(BlockGrid(target.rows, target.cols, target.rows, target.cols))
    planes = target.planes or (CastPlane(everything, None, None),)
    shards, masters = _shards(law, target, planes, values, tensor_amax)
    with_codes = [s for s, p in zip(shards, planes, strict=True) if p.codes is not None]
    if law is None:
        backend.partial_amax(shards, masters)()
    elif isinstance(law, Float8DelayedLaw):
        law = replace(law, amax_compute_algo="most_recent")
        backend.partial_cast(law, with_codes, masters)()
        _compute_scales(backend, law, planes, shards)
    else:
        assert can_activate(law)
        backend.partial_amax(shards, masters)()
        _compute_scales(backend, law, planes, shards)
        backend.partial_cast(law, with_codes, masters)()
        for plane in planes:  # a block that is not finite has codes even where no element is
            if plane.codes is not None and _missing_nibbles(law, plane):
                plane.codes.view(plane.layout.grid.rows, -1)[:, -1] &= 0x0F
    if target.amax is not None:
        target.amax.copy_(tensor_amax.view(torch.float32))
    if target.tensor_amax is not None:
        target.tensor_amax.copy_(torch.maximum(target.tensor_amax, tensor_amax))


def _shards(
    law: Law | None,
    target: ActivationTarget,
    planes: Sequence[CastPlane],
    values: torch.Tensor,
    tensor_amax: torch.Tensor,
) -> tuple[list[CastShard], Masters]:
    """The whole tensor as the operands of casts, one a plane."""
    masters = Masters(len(planes))
    no_codes = torch.empty(0, dtype=torch.uint8, device=values.device)
    delayed = None
    if target.scale is not None:  # the cast reads the scale; the rest is scratch
        unused = target.scale.new_zeros(2)
        delayed = DelayedState(target.scale.clone(), unused[:1], unused[1:])
    shards, sources = [], []
    for slot, plane in enumerate(planes):
        grid, source = plane.layout.grid, values.t() if plane.transposed else values
        if (missing := _missing_nibbles(law, plane)) > 0:
            source = torch.nn.functional.pad(source, (0, missing))
            grid = BlockGrid(grid.rows, grid.cols + missing, grid.block_h, grid.block_w)
        sources.append(source.contiguous())
        amax = torch.zeros(grid.num_blocks, dtype=torch.int32, device=values.device)
        codes = no_codes if plane.codes is None else plane.codes.view(-1)
        whole = Extent(0, grid.numel)
        shards.append(
            CastShard(slot, whole, grid, target.round_to, amax, tensor_amax, codes, delayed=delayed)
        )
    masters.bind(sources)
    return shards, masters


def _missing_nibbles(law: Law | None, plane: CastPlane) -> int:
    """1 where a row of 4-bit codes ends in the middle of a byte."""
    if law is None or law.fmt.bits == 8 or plane.codes is None:
        return 0
    return plane.layout.grid.cols % 2


def _compute_scales(
    backend: Backend, law: Law, planes: Sequence[CastPlane], shards: Sequence[CastShard]
) -> None:
    backend.compute_scale(
        law,
        [
            ScaleTarget(
                plane.layout,
                shard.block_amax,
                shard.tensor_amax,
                plane.scale_inv,
                delayed=shard.delayed,
            )
            for plane, shard in zip(planes, shards, strict=True)
            if plane.scale_inv is not None
        ],
    )()
