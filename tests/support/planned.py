"""One weight that is cut over ranks, and the plan that casts it."""

from collections.abc import Sequence
from typing import Any

import torch

import zerocast
from zerocast.comm import Communicator
from zerocast.recipes import Recipe

SHAPE = torch.Size((32, 64))
"""A small one of several blocks that every recipe can hold."""
NUMEL = SHAPE.numel()


def cut(numel: int, size: int) -> list[int]:
    """Where the shards of ``size`` ranks begin, and the end: inside of rows, blocks and bytes."""
    return [0, *(numel * r // size + 7 for r in range(1, size)), numel]


def unsharded(whole: torch.Tensor, recipe: Recipe, **options: Any) -> zerocast.QuantizedTensor:
    """The cast of the whole master, for BF16 products."""
    shape = SHAPE if whole.dim() == 1 else whole.shape
    options = {"dtype": torch.bfloat16} | options
    return zerocast.quantize(whole.view(shape), recipe, **options)


class Planned:
    """A weight under ``recipe``, this rank's shard of the master, and the plan of their cast.

    Args:
        whole: FP32 [M, K] or [NUMEL], which :data:`SHAPE` then is the shape of; ones by default.
        cuts: the shards' limits, those of :func:`cut` by default.
        empty: what :func:`zerocast.empty` is given, too.
        options: those of the plan.
    """

    def __init__(
        self,
        comm: Communicator,
        recipe: Recipe,
        whole: torch.Tensor | None = None,
        *,
        cuts: Sequence[int] | None = None,
        empty: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        whole = torch.ones(SHAPE) if whole is None else whole
        cuts = cut(whole.numel(), comm.size) if cuts is None else cuts
        self.start, self.end = cuts[comm.rank], cuts[comm.rank + 1]
        self.master = whole.reshape(-1)[self.start : self.end].clone()
        shape = SHAPE if whole.dim() == 1 else whole.shape
        self.weight = zerocast.empty(shape, recipe, **(empty or {}))
        self.plan = zerocast.CastPlan([self.weight], [self.master], [self.start], comm, **options)

    def cast(self, masters: Sequence[torch.Tensor] | None = None) -> zerocast.QuantizedTensor:
        """The weight, cast from these masters, or from those that the plan has, and gathered."""
        self.plan.cast(masters)
        self.plan.all_gather()
        return self.weight
