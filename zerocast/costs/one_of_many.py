"""OneOfMany: one rank of a group whose other ranks are not there."""

import math
from typing import Any

import torch

from zerocast.comm import Communicator
from zerocast.comm.communicator import Parts, Wait, nothing_to_wait_for


class OneOfMany(Communicator):
    """Rank ``rank`` of ``size``, which sends nothing: its collectives return at once and leave
    their buffers as they are. For buffers on the meta device, which hold no values anyway.

    Args:
        device: "cuda" or "cpu": where the buffers would be. A host takes part in collectives on the
            CPU, so ranks hear of each other's errors there.
    """

    timeout = math.inf  # nobody is waited for

    def __init__(self, rank: int, size: int, device: str) -> None:
        self.rank, self.size, self._device = rank, size, device

    def captures(self, device: torch.device) -> bool:
        return self._device == "cuda"

    def all_reduce_max_(self, buffer: torch.Tensor) -> None:
        """Reduce nothing."""

    def all_reduce_sum_(self, buffer: torch.Tensor) -> None:
        """Reduce nothing."""

    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        """Gather nothing."""

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Parts = None, sent: Parts = None
    ) -> Wait:
        return nothing_to_wait_for

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        """Send nothing."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self.size

    def barrier(self) -> None:
        """Wait for nobody."""
