"""OneOfMany: a communicator of one rank of a group whose other ranks do not exist."""

import math
from collections.abc import Callable
from typing import Any

import torch

from zerocast.comm import Communicator


class OneOfMany(Communicator):
    """A communicator whose collectives return immediately and leave their buffers unchanged.

    It is for buffers on the meta device, which hold no values.

    Args:
        rank, size: the rank, and the number of ranks.
        device: "cuda" or "cpu": the device of the buffers in a real step. The host takes part in
            collectives on the CPU, so ranks exchange errors there.
    """

    timeout = math.inf  # it never waits

    def __init__(self, rank: int, size: int, device: str) -> None:
        self.rank, self.size, self._device = rank, size, device

    def captures(self, device: torch.device) -> bool:
        return self._device == "cuda"

    def _all_reduce(self, what: str, buffer: torch.Tensor) -> None:
        """Do nothing."""

    def all_gather_(self, buffer: torch.Tensor, counts: Any = None) -> None:
        """Do nothing."""

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Any = None, sent: Any = None
    ) -> Callable[[], None]:
        return lambda: None

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        """Do nothing."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self.size

    def barrier(self) -> None:
        """Return immediately."""
