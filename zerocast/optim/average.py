"""Average: an exponential moving average of an optimizer's masters, sharded like them.

An average stored in quantized weights would be rounded at every step, by more than a step changes
it. So each rank keeps its elements of the average in FP32, and rounds them once, when they are
used.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zerocast.comm import agree
from zerocast.comm.uncopied import Uncopied
from zerocast.errors import InputError
from zerocast.optim.progress import Progress
from zerocast.optim.publication import Publication
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.stepped_weights import index_of

AVERAGE = "ema("
"""The prefix of the names of averages in a state dict."""


class Average(Uncopied):
    """An exponential moving average of masters, as :meth:`ZeroOptimizer.ema` returns it.

    It starts as a copy of the masters. Every step sets it to
    ``decay * average + (1 - decay) * master``. This is element-wise, so it has the same bits on any
    number of ranks. It is saved and loaded with the optimizer.

    Attributes:
        decay: the factor of the average in each step.
    """

    instead = "call ema(decay) of the other optimizer, or take values by gather(param)"

    def __init__(
        self, decay: float, shards: ShardedWeights, publication: Publication, progress: Progress
    ) -> None:
        self.decay = decay
        self._shards = shards
        self._publication = publication
        self._progress = progress
        self._columns = shards.masters.clone()  # FP32 [num_columns]

    def gather(self, param: torch.Tensor) -> torch.Tensor:
        """Return the average of a parameter's master, gathered from all ranks: FP32, in the
        parameter's shape. Collective.

        Raises:
            InputError: if ``param`` is not a trainable parameter of the optimizer.
        """
        index = index_of(self._shards.weights, param, "gather")
        return self._shards.gather(index, self._columns)

    @contextmanager
    def in_weights(self) -> Iterator[None]:
        """Set the model's weights to the cast of the averages within the context. Afterwards
        restore the cast of the masters, bit for bit. Entering and leaving are collective.

        The state of recipes does not change, so delayed scaling casts the averages with the scales
        of the latest cast. Do not step or write weights within the context.

        Raises:
            InputError: on every rank, if averages are in the weights already; on leaving, if
                weights were written within the context, whose values are lost.
            UnfinishedStepError: on every rank, if a step was left unfinished.
        """
        progress = self._progress
        progress.prepare("in_weights")
        with progress.changing():
            self._publication.run(self._columns)
        progress.holds_averages = True
        try:
            yield
        finally:
            progress.holds_averages = False
            written = progress.writes.look()
            with progress.changing():
                self._publication.run()
            # Also if the body failed, because ranks on which it did not fail take part.
            agreed = agree(self._shards.comm, int(written))
        if not agreed or written:
            raise InputError(
                "weights were written while they held averages, and those writes are lost; write "
                "them after leaving the context of in_weights()."
            )

    def update(self) -> None:
        """Update the average from the masters, once for each step."""
        self._columns.lerp_(self._shards.masters, 1 - self.decay)

    @property
    def key(self) -> str:
        """The name of the average in a weight's entry of a state dict."""
        return average_key(self.decay)

    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's elements of one weight's average: FP32, flat, a view."""
        return self._columns[self._shards.own[index].columns]


def average_key(decay: float) -> str:
    """Return the name of the average of this decay in a weight's entry of a state dict."""
    return f"{AVERAGE}{decay})"


def check_decay(decay: object) -> float:
    """Return ``decay`` as a float. Raise :class:`InputError` unless ``0 <= decay < 1``."""
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise InputError(
            f"decay must be a number from 0 up to, not including, 1, such as 0.999, got {decay!r}."
        )
    return float(decay)
