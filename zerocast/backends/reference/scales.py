"""Makes the stored scales of amaxes, and the factors of elements before they are encoded: the
numerics of :mod:`zerocast.numerics`, and the state of delayed scaling.
"""

from __future__ import annotations

import math

import torch

from zerocast.arguments import present
from zerocast.backends.reference.arithmetic import divide, fl, not_above_flt_max
from zerocast.backends.reference.elements import amax_of
from zerocast.numerics import (
    DelayedState,
    Float8DelayedNumerics,
    Float8Numerics,
    MXNumerics,
    Numerics,
    NVFP4Numerics,
    PlaneBuffers,
    TensorOperand,
    decode,
    decode_e8m0,
    encode,
    encode_e8m0,
    reciprocal_e8m0,
)

Scales = tuple[torch.Tensor, torch.Tensor]
"""Stored scales [blocks], and FP32 multipliers [blocks], NaN where everything under them is NaN."""


def scales(numerics: Numerics, operand: TensorOperand, buffers: PlaneBuffers) -> Scales:
    """Return the scales of all blocks of one plane of ``operand``, from reduced amaxes."""
    block = present(buffers.block_amax).view(torch.float32)
    if isinstance(numerics, NVFP4Numerics):
        choices = None if operand.candidates is None else operand.candidates.choices
        return nvfp4_scales(numerics, block, effective_amax(numerics, operand), choices)
    if isinstance(numerics, MXNumerics):
        return _mx_scales(numerics, block)
    if isinstance(numerics, Float8DelayedNumerics):
        scale = present(operand.delayed).scale
        return torch.where(block.isfinite(), divide(1.0, scale), math.nan), scale
    return _float8_scales(numerics, block)


def _float8_scales(numerics: Float8Numerics, amax: torch.Tensor) -> Scales:
    clamped = torch.where(amax < fl(numerics.amax_epsilon), fl(numerics.amax_epsilon), amax)
    quotient = divide(clamped, numerics.fmt.max)
    if numerics.formula == "inverse first":
        scale = divide(1.0, quotient)
    else:
        scale = divide(numerics.fmt.max, clamped)
    scale = not_above_flt_max(scale)
    if numerics.power_2_scale:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    scale = torch.where(clamped == 0, 1.0, scale)
    inverse = divide(1.0, scale)
    if numerics.formula != "reciprocal":
        inverse = torch.where(clamped == 0, 1.0, quotient)
    finite = amax.isfinite()
    return torch.where(finite, inverse, math.nan), torch.where(finite, scale, math.nan)


def effective_amax(numerics: Numerics, operand: TensorOperand) -> torch.Tensor:
    """Return the tensor amax that is cast under and stored, FP32 [1]: with one level, any finite
    one is that whose scale is 1.
    """
    own = amax_of(operand).view(torch.float32)
    if isinstance(numerics, NVFP4Numerics) and numerics.one_level:
        return torch.where(own.isfinite(), numerics.one_level_amax, own)
    return own


def _mx_scales(numerics: MXNumerics, amax: torch.Tensor) -> Scales:
    # An infinite amax would otherwise be given the largest finite scale.
    amax = torch.where(amax.isfinite(), amax, math.nan)
    fmt = numerics.fmt
    if numerics.scale_rounding == "up":
        stored = encode_e8m0(amax * fl(1 / fmt.max))
    else:
        half_step = 2 ** (22 - fmt.mantissa_bits) if numerics.scale_rounding == "even" else 0
        exponent = (amax.view(torch.int32).to(torch.int64) + half_step) >> 23
        stored = (exponent - fmt.max_exponent).clamp(min=0)
        stored = torch.where(amax.isnan(), 0xFF, stored).to(torch.uint8)
    return stored, reciprocal_e8m0(stored)


def nvfp4_scales(
    numerics: NVFP4Numerics, block: torch.Tensor, tensor: torch.Tensor, choices: torch.Tensor | None
) -> Scales:
    """Return the scales of blocks, from FP32 [blocks] and [1] amaxes; under 4-over-6 by
    ``choices``, [blocks] or more: 1 for map4, 0 for map6.
    """
    encode_scale = not_above_flt_max(divide(numerics.fmt.max * numerics.scale_max, tensor))
    encode_scale = torch.where(tensor == 0, 1.0, encode_scale)
    if numerics.four_over_six is None:
        block_scale = not_above_flt_max(block * (encode_scale * fl(1 / numerics.fmt.max)))
    else:
        base = divide(block, numerics.fmt.max) * encode_scale
        block_scale = torch.where(present(choices)[: len(block)] != 0, base * 1.5, base)
    stored = encode(block_scale, numerics.scale_fmt)  # nothing is larger than E4M3's 448
    decode_scale = decode(stored, numerics.scale_fmt) * divide(1.0, encode_scale)
    multiplier = not_above_flt_max(divide(1.0, decode_scale))
    finite = tensor.isfinite()
    stored = torch.where(finite, stored, numerics.scale_fmt.nan_code).to(torch.uint8)
    return stored, torch.where(finite, multiplier, math.nan)


def decode_multipliers(
    numerics: Numerics, stored: torch.Tensor, tensor_amax: torch.Tensor | None
) -> torch.Tensor:
    """Return the factors by which codes under the ``stored`` scales are decoded, FP32."""
    if isinstance(numerics, NVFP4Numerics):
        maxima = numerics.fmt.max * numerics.scale_max
        return decode(stored, numerics.scale_fmt) * present(tensor_amax) * fl(1 / maxima)
    return decode_e8m0(stored) if isinstance(numerics, MXNumerics) else stored


def advance(
    numerics: Float8DelayedNumerics, state: DelayedState, tensor_amax: torch.Tensor
) -> None:
    """Close a cast whose reduced amax is ``tensor_amax``, int32 [1]: history and scale of the next.

    An amax that is zero or not finite changes nothing.
    """
    state.cast_scale.copy_(state.scale)
    amax = tensor_amax.view(torch.float32)
    if amax == 0 or not amax.isfinite():
        return
    state.amax_history.copy_(torch.cat((amax, state.amax_history[:-1])))
    if callable(numerics.amax_compute_algo):
        largest = numerics.amax_by_callable(state.amax_history)
    else:
        largest = (
            amax if numerics.amax_compute_algo == "most_recent" else state.amax_history.max()[None]
        )
    if largest.isfinite() and largest > 0:
        scaled_max = math.ldexp(numerics.fmt.max, -numerics.margin)
        state.scale.copy_(not_above_flt_max(divide(scaled_max, largest)))
