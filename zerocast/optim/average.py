"""Average: an exponential moving average of an optimizer's masters, sharded like them.

An average that is stored in quantized weights would be rounded at every step, by more than a step
moves it. So it is kept in FP32 beside the masters, of this rank's elements only, and rounded once,
when somebody wants to use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.writes import index_of

Show = Callable[[torch.Tensor], AbstractContextManager[None]]
"""Puts columns into the weights for as long as its context lasts."""


class Average:
    """What :meth:`ZeroOptimizer.ema` returns: ``decay * average + (1 - decay) * master`` after
    every step, beginning at the masters as they were when it was made.

    Element by element, so it has the same bits on every number of ranks. It is saved and loaded
    with the optimizer.

    Attributes:
        decay: the part of the average that a step leaves.
    """

    def __init__(self, decay: float, shards: ShardedWeights, show: Show) -> None:
        self.decay = decay
        self._shards = shards
        self._show = show
        self._columns = shards.masters.clone()  # FP32 [num_columns]

    def gather(self, param: torch.Tensor) -> torch.Tensor:
        """FP32, in the parameter's shape: the average of its master, from all ranks. Collective.

        Raises:
            InputError: where ``param`` is no trainable parameter of the optimizer.
        """
        index = index_of(self._shards.weights, param, "gather")
        return self._shards.gather(index, self._columns)

    def in_weights(self) -> AbstractContextManager[None]:
        """Within the context the model's weights are the cast of the averages; afterwards, bit for
        bit, that of the masters again. Entering and leaving are collective.

        What recipes remember stays as it is, so delayed scaling casts the averages with the scales
        of the latest cast. Within the context nobody may step or write weights.

        Raises:
            InputError: on every rank, where averages are in the weights already; on leaving, where
                weights were written in between, whose values are lost.
            UnfinishedStepError: on every rank, where a step was left half done.
        """
        return self._show(self._columns)

    def update(self) -> None:
        """Follow the masters by one step."""
        self._columns.lerp_(self._shards.masters, 1 - self.decay)

    @property
    def key(self) -> str:
        """What it is called in a weight's entry of a state dict."""
        return f"ema({self.decay})"

    def load(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Take its elements out of the entries of a state dict, by place; of one that has none,
        begin at the masters as they are.
        """
        self._columns.copy_(self._shards.masters)
        for i, state in states.items():
            if self.key in state:
                self.part(i).copy_(state.pop(self.key))

    def part(self, index: int) -> torch.Tensor:
        """FP32, flat: this rank's elements of one weight's average, a view."""
        return self._columns[self._shards.own[index].columns]


def check_decay(decay: object) -> float:
    """``decay`` as a number from 0 up to, not including, 1; else :class:`InputError`."""
    if (
        isinstance(decay, bool)
        or not isinstance(decay, int | float)
        or not 0 <= decay < 1
        or math.isnan(decay)
    ):
        raise InputError(
            f"decay must be a number from 0 up to, not including, 1, such as 0.999, got {decay!r}."
        )
    return float(decay)
