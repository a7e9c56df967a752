"""Weights that are verified."""

from typing import Any

import torch

import zerocast
from tests.support.values import draw_values
from zerocast.cast import CastPlan
from zerocast.comm import Communicator

SHAPES = {"a.weight": (48, 64), "b.weight": (32, 96), "c.weight": (16, 32)}


class Weights:
    """Some weights, this rank's shards of their masters, and their plan."""

    def __init__(
        self, comm: Communicator, recipe: Any = "nvfp4", shapes: Any = SHAPES, **options: Any
    ) -> None:
        self.comm, self.weights, self.masters, starts = comm, [], [], []
        for i, shape in enumerate(shapes.values()):
            numel = torch.Size(shape).numel()
            whole = draw_values("normal", numel, i)
            # One rank has next to nothing of the last, and the first one nothing of the second.
            cuts = [0, *(numel * r // comm.size + 7 * (i != 1) for r in range(1, comm.size)), numel]
            if i == 1 and comm.size > 1:
                cuts[1] = 0
            start, end = cuts[comm.rank], cuts[comm.rank + 1]
            self.weights.append(zerocast.empty(shape, recipe))
            self.masters.append(whole[start:end].clone() if start < end else None)
            starts.append(start if start < end else None)
        self.plan = CastPlan(
            self.weights, self.masters, starts, comm, names=list(shapes), **options
        )

    def buffers(self, i: int = 0) -> dict[str, torch.Tensor]:
        """Of a weight."""
        return self.weights[i].quantized_storage.buffers

    def train(self) -> None:
        """What an optimizer would do."""
        for master in self.masters:
            if master is not None:
                master.mul_(1.07)

    def gather(self) -> None:
        """All but the comparison."""
        verification = self.plan._verification
        verification.check = lambda *_: None
        self.plan.all_gather()
        del verification.check

    def step(self) -> None:
        """Of training."""
        self.train()
        self.plan.cast()
        self.plan.all_gather()
