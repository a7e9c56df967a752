"""From amaxes to what is stored, and to what elements are multiplied by before they are encoded:
the laws of :mod:`zerocast.ops`, and what delayed scaling remembers.
"""

from __future__ import annotations

import math

import torch

from zerocast.backends.reference.arithmetic import divide, fl, not_above_flt_max
from zerocast.backends.reference.elements import amax_of
from zerocast.formats import decode, decode_e8m0, encode, encode_e8m0, reciprocal_e8m0
from zerocast.ops import (
    DelayedState,
    Float8DelayedLaw,
    Float8Law,
    Law,
    MXFP8Law,
    NVFP4Law,
    PlaneBuffers,
    TensorOperand,
)

Scales = tuple[torch.Tensor, torch.Tensor]
"""Stored scales [blocks], and FP32 multipliers [blocks], NaN where everything under them is NaN."""


def scales(law: Law, operand: TensorOperand, buffers: PlaneBuffers) -> Scales:
    """Of all blocks of one plane of ``operand``, from reduced amaxes."""
    assert buffers.block_amax is not None
    block = buffers.block_amax.view(torch.float32)
    if isinstance(law, NVFP4Law):
        choices = None if operand.candidates is None else operand.candidates.choices
        return nvfp4_scales(law, block, amax_of(operand).view(torch.float32), choices)
    if isinstance(law, MXFP8Law):
        return _mxfp8_scales(law, block)
    if isinstance(law, Float8DelayedLaw):
        assert operand.delayed is not None
        scale = operand.delayed.scale
        return torch.where(block.isfinite(), divide(1.0, scale), math.nan), scale
    return _float8_scales(law, block)


def _float8_scales(law: Float8Law, amax: torch.Tensor) -> Scales:
    clamped = torch.where(amax < fl(law.amax_epsilon), fl(law.amax_epsilon), amax)
    scale = not_above_flt_max(divide(law.fmt.max, clamped))
    if law.power_2_scale:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    scale = torch.where(clamped == 0, 1.0, scale)
    finite = amax.isfinite()
    return torch.where(finite, divide(1.0, scale), math.nan), torch.where(finite, scale, math.nan)


def _mxfp8_scales(law: MXFP8Law, amax: torch.Tensor) -> Scales:
    # An infinite amax would otherwise be given the largest finite scale.
    amax = torch.where(amax.isfinite(), amax, math.nan)
    stored = encode_e8m0(amax * fl(1 / law.fmt.max))
    return stored, reciprocal_e8m0(stored)


def nvfp4_scales(
    law: NVFP4Law, block: torch.Tensor, tensor: torch.Tensor, choices: torch.Tensor | None
) -> Scales:
    """FP32 [blocks] and [1] amaxes; under 4-over-6 ``choices``, [blocks] or more: 1 for map4, 0 for
    map6.
    """
    encode_scale = not_above_flt_max(divide(law.fmt.max * law.scale_max, tensor))
    encode_scale = torch.where(tensor == 0, 1.0, encode_scale)
    if law.four_over_six is None:
        block_scale = not_above_flt_max(block * (encode_scale * fl(1 / law.fmt.max)))
    else:
        assert choices is not None
        base = divide(block, law.fmt.max) * encode_scale
        block_scale = torch.where(choices[: len(block)] != 0, base * 1.5, base)
    stored = encode(block_scale, law.scale_fmt)  # nothing is larger than E4M3's 448
    decode_scale = decode(stored, law.scale_fmt) * divide(1.0, encode_scale)
    multiplier = not_above_flt_max(divide(1.0, decode_scale))
    finite = tensor.isfinite()
    stored = torch.where(finite, stored, law.scale_fmt.nan_code).to(torch.uint8)
    return stored, torch.where(finite, multiplier, math.nan)


def decode_multipliers(
    law: Law, stored: torch.Tensor, tensor_amax: torch.Tensor | None
) -> torch.Tensor:
    """What codes under the ``stored`` scales are multiplied by: FP32, of the same shape."""
    if isinstance(law, NVFP4Law):
        assert tensor_amax is not None
        maxima = law.fmt.max * law.scale_max
        return decode(stored, law.scale_fmt) * tensor_amax * fl(1 / maxima)
    return decode_e8m0(stored) if isinstance(law, MXFP8Law) else stored


def advance(law: Float8DelayedLaw, state: DelayedState, tensor_amax: torch.Tensor) -> None:
    """Close a cast whose reduced amax is ``tensor_amax``, int32 [1]: history and scale of the next.

    An amax that is zero or not finite changes nothing.
    """
    state.cast_scale.copy_(state.scale)
    amax = tensor_amax.view(torch.float32)
    if amax == 0 or not amax.isfinite():
        return
    state.amax_history.copy_(torch.cat((amax, state.amax_history[:-1])))
    if callable(law.amax_compute_algo):
        largest = law.amax_by_callable(state.amax_history)
    else:
        largest = amax if law.amax_compute_algo == "most_recent" else state.amax_history.max()[None]
    if largest.isfinite() and largest > 0:
        scaled_max = math.ldexp(law.fmt.max, -law.margin)
        state.scale.copy_(not_above_flt_max(divide(scaled_max, largest)))
