"""SingleRank: a group of one rank. Its collectives only check their arguments."""

from __future__ import annotations

import math
import pickle
from typing import Any

import torch

from zerocast.comm import buffers
from zerocast.comm.communicator import Communicator, Parts, Wait, nothing_to_wait_for
from zerocast.errors import InputError


class SingleRank(Communicator):
    """The communicator of one rank that has no peers. All of them are equal."""

    rank = 0
    size = 1
    timeout = math.inf

    def _all_reduce(self, what: str, buffer: torch.Tensor) -> None:
        buffers.reduce_operand(what, buffer)

    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        buffers.check_gather(buffer, counts, self.size)

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Parts = None, sent: Parts = None
    ) -> Wait:
        operands = buffers.exchange_operands(output, buffer, received, sent, self.size)
        output, buffer, takes, gives, _ = operands
        if takes != gives:
            raise InputError(
                f"all_to_all on one rank receives what it sends, got {takes[0]} bytes to receive "
                f"and {gives[0]} to send."
            )
        output.copy_(buffer)
        return nothing_to_wait_for

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        buffers.broadcast_operand(buffer, root, self.size)

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [pickle.loads(buffers.pickled(obj))]

    def barrier(self) -> None:
        """Return at once."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SingleRank)

    def __hash__(self) -> int:
        return hash(SingleRank)
