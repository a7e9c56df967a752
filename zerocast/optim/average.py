"""Average: an exponential moving average of an optimizer's masters, sharded like them.

An average that is stored in quantized weights would be rounded at every step, by more than a step
moves it. So it is kept in FP32 beside the masters, of this rank's elements only, and rounded once,
when it is used.
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
"""The beginning of the names of averages in a state dict."""


class Average(Uncopied):
    """What :meth:`ZeroOptimizer.ema` returns: ``decay * average + (1 - decay) * master`` after
    every step, beginning at the masters as they were when it was made.

    It is computed element by element, so it has the same bits on every number of ranks. It is saved
    and loaded with the optimizer.

    Attributes:
        decay: the share of the average that a step leaves.
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
        """Return the average of a parameter's master from all ranks: FP32, in the parameter's
        shape. Collective.

        Raises:
            InputError: where ``param`` is not a trainable parameter of the optimizer.
        """
        index = index_of(self._shards.weights, param, "gather")
        return self._shards.gather(index, self._columns)

    @contextmanager
    def in_weights(self) -> Iterator[None]:
        """Within the context the model's weights are the cast of the averages; afterwards, bit for
        bit, that of the masters again. Entering and leaving are collective.

        The state of recipes stays as it is, so delayed scaling casts the averages with the scales
        of the latest cast. Do not step or write weights within the context.

        Raises:
            InputError: on every rank, where averages are in the weights already; on leaving, where
                weights were written in between, whose values are lost.
            UnfinishedStepError: on every rank, where a step was left unfinished.
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
            # Also where the body failed: other ranks, on which it did not, take part.
            agreed = agree(self._shards.comm, int(written))
        if not agreed or written:
            raise InputError(
                "weights were written while averages were in them, and hold the masters' cast "
                "again; write them after leaving the context of in_weights()."
            )

    def update(self) -> None:
        """Follow the masters by one step."""
        self._columns.lerp_(self._shards.masters, 1 - self.decay)

    @property
    def key(self) -> str:
        """The name of the average in a weight's entry of a state dict."""
        return average_key(self.decay)

    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's elements of one weight's average: FP32, flat, a view."""
        return self._columns[self._shards.own[index].columns]


def average_key(decay: float) -> str:
    """Return what the average of this decay is called in a weight's entry of a state dict."""
    return f"{AVERAGE}{decay})"


def check_decay(decay: object) -> float:
    """Return ``decay`` as a number from 0 up to, not including, 1; else :class:`InputError`."""
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise InputError(
            f"decay must be a number from 0 up to, not including, 1, such as 0.999, got {decay!r}."
        )
    return float(decay)
