"""Refuses the capture of a cast in a CUDA graph that cannot hold it.

Launches and the collectives of NCCL can be captured and replayed. What makes the host wait, or
passes through its memory, cannot. A graph replays launches and not the bookkeeping beside them: a
captured :meth:`CastPlan.cast` belongs into one graph with its post-all-gather processing. It
repeats addresses: the plan must live as long as the graph, and where weights or masters have moved
since, the step is captured anew.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerocast.comm import Communicator
from zerocast.errors import UnsupportedError


def is_captured(device: torch.device) -> bool:
    """Whether what is launched on ``device`` now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_capture(
    device: torch.device, comms: Iterable[Communicator], *, check_finite: bool = False
) -> None:
    """Raise :class:`UnsupportedError` where the current stream is being captured and a cast on
    ``device`` over ``comms`` cannot be.
    """
    if not is_captured(device):
        return
    if check_finite:
        raise UnsupportedError(
            "a cast that is captured in a CUDA graph must not read values on the host, got "
            "check_finite=True; make the plan without it, and let the loss show a NaN."
        )
    for comm in comms:
        if not comm.captures(device):
            raise UnsupportedError(
                f"a cast that is captured in a CUDA graph needs collectives without the host, got "
                f"{comm}, whose host takes part in those on {device}; use torch.distributed with "
                "NCCL, or capture forward and backward only."
            )


def check_planning(device: torch.device) -> None:
    """Raise :class:`UnsupportedError` where the current stream is being captured: the tables of a
    plan on ``device`` are used by later casts, whether or not that graph has run.
    """
    if is_captured(device):
        raise UnsupportedError(
            "a plan must be made, and its weights moved, before a CUDA graph is captured, got a "
            "stream that is being captured; run plan.cast() once outside of the capture."
        )
