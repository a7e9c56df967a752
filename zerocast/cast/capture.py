"""Checks whether a cast can be captured in a CUDA graph.

Launches and NCCL collectives can be captured and replayed. Work that makes the host wait, or that
passes through host memory, cannot. A graph replays launches but not the host's bookkeeping: capture
:meth:`CastPlan.cast` in one graph with its post-all-gather processing. A graph replays
addresses: the plan must outlive the graph. If weights or masters have moved, capture again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerocast.comm import Communicator
from zerocast.errors import UnsupportedError


def is_captured(device: torch.device) -> bool:
    """Return whether launches on ``device`` are now captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_capture(
    device: torch.device, comms: Iterable[Communicator], *, check_finite: bool = False
) -> None:
    """Raise :class:`UnsupportedError` if a stream capture is active that cannot hold the cast.

    The cast is on ``device`` over ``comms``.
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
                "a cast that is captured in a CUDA graph needs collectives that run on the device, "
                f"got {comm}, which uses the host for {device}; use torch.distributed with NCCL, "
                "or capture forward and backward only."
            )


def check_planning(device: torch.device) -> None:
    """Raise :class:`UnsupportedError` if the current stream is being captured.

    Later casts use the tables of a plan on ``device``, whether or not that graph has run.
    """
    if is_captured(device):
        raise UnsupportedError(
            "a plan must be made, and its weights moved, before a CUDA graph is captured, got a "
            "stream that is being captured; run plan.cast() once outside of the capture."
        )
