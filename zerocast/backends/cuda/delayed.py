"""Launches delayed scaling where the caller makes the scale from the history.

The kernel updates the history; the caller's function runs on the device as any torch code does. It
runs whether or not the amax entered the history, so that the host waits for nothing, and its result
is used only if the amax entered.
"""

from __future__ import annotations

import math

import torch

from zerocast.backends.reference.arithmetic import divide, not_above_flt_max
from zerocast.backends.subnormals import keeping_subnormals
from zerocast.numerics import INFINITY_BITS, Float8DelayedNumerics, Launch, Operands


def scales_by_callable(numerics: Float8DelayedNumerics, operands: Operands) -> Launch:
    """Return the launch that makes each weight's next scale, after the kernel has moved the
    histories.
    """
    assert callable(numerics.amax_compute_algo)
    scaled_max = math.ldexp(numerics.fmt.max, -numerics.margin)

    @keeping_subnormals
    def launch() -> None:
        for operand in (each for each in operands if each.advances):
            state, amax = operand.delayed, operand.tensor_amax
            assert state is not None
            assert amax is not None
            largest = numerics.amax_by_callable(state.amax_history)
            enters = (amax > 0) & (amax < INFINITY_BITS)
            usable = enters & largest.isfinite() & (largest > 0)
            scale = not_above_flt_max(divide(scaled_max, largest))
            state.scale.copy_(torch.where(usable, scale, state.scale))

    return launch
