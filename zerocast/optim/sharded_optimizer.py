"""ShardedOptimizer: reads and averages the masters of a ZeroOptimizer between steps.

:mod:`zerocast.optim.zero` has the constructor and the step, :mod:`zerocast.optim.zero_training`
saves and loads the state.
"""

from collections.abc import Iterable
from typing import Any

import torch

from zerocast.comm import Attempt, Communicator
from zerocast.comm.agreement import check_same
from zerocast.comm.uncopied import Uncopied
from zerocast.errors import UnsupportedError
from zerocast.layout import Extent
from zerocast.optim.average import Average, check_decay
from zerocast.optim.gradients import GradientReducer
from zerocast.optim.inner import InnerOptimizer, has_modes
from zerocast.optim.matrix_owners import MatrixOwners
from zerocast.optim.progress import Progress
from zerocast.optim.publication import Publication
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.stepped_weights import index_of


class ShardedOptimizer(Uncopied, torch.optim.Optimizer):
    """An optimizer whose masters are sharded over ranks; a subclass makes and steps them.

    Attributes:
        comm: the ranks.
        inner: the wrapped optimizer; its parameters are this rank's masters.
    """

    instead = "save what optimizer.state_dict() returns on every rank, and load it into another"

    comm: Communicator
    inner: torch.optim.Optimizer
    _shards: ShardedWeights
    _owners: MatrixOwners | None  # with shard="matrix"
    _inner: InnerOptimizer
    _publication: Publication
    _gradients: GradientReducer
    _progress: Progress
    _averages: dict[float, Average]
    _is_complete = False  # torch's __init__ adds groups one by one; later none can be added

    @property
    def named_weights(self) -> dict[str, torch.Tensor]:
        """The stepped parameters by name, in the order of their groups."""
        return {weight.name: weight.param for weight in self._shards.weights}

    def gather_master(self, param: torch.Tensor) -> torch.Tensor:
        """Return a parameter's whole master, gathered from all ranks: FP32, in the parameter's
        shape. Collective.

        Raises:
            InputError: on every rank, if ``param`` is not a trainable parameter of the optimizer.
            UnfinishedStepError: on every rank, if a step was left unfinished.
        """
        attempt, index = Attempt(), -1
        with attempt:
            index = index_of(self._shards.weights, param, "gather_master")
        self._progress.prepare("gather_master", attempt.error)
        return self._shards.gather(index, self._shards.masters)

    def local_master(self, param: torch.Tensor) -> tuple[torch.Tensor, Extent]:
        """Return this rank's shard of a parameter's master, and its extent in the weight.

        The shard is a flat FP32 view, empty if this rank owns no elements.

        Raises:
            InputError: if ``param`` is not a trainable parameter of the optimizer.
            UnfinishedStepError: if a step was left unfinished.
        """
        if (error := self._progress.unfinished_error("local_master")) is not None:
            raise error
        index = index_of(self._shards.weights, param, "local_master")
        return self._shards.master(index), self._shards.own[index].extent

    def mark_written(self, params: Iterable[torch.Tensor]) -> None:
        """Mark quantized weights as written, after a write through a buffer taken from them. The
        next step restarts their masters. Call it on every rank.

        Raises:
            InputError: if one is not a trainable parameter of the optimizer.
        """
        weights = self._shards.weights
        self._progress.writes.mark([index_of(weights, param, "mark_written") for param in params])

    def train(self) -> None:
        """Switch an inner optimizer that has modes (schedule-free) to training. Collective.

        For other optimizers it does nothing. A new optimizer is in training mode.
        """
        self._switch("train")

    def eval(self) -> None:
        """Switch an inner optimizer that has modes to evaluation. Collective.

        Until :meth:`train`, the weights are the cast of the averages that it computes.

        Raises:
            InputError, UnfinishedStepError: as :meth:`step`.
        """
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        if has_modes(self.inner) and self._inner.mode != mode:
            self._progress.prepare(f"{mode}()")
            with self._progress.changing():
                self._inner.switch(mode, self.param_groups)
                if self._owners:
                    self._owners.return_masters()
                self._publication.run()

    def ema(self, decay: float) -> Average:
        """Return an exponential moving average of the masters, in FP32. Collective.

        It starts as a copy of the masters. Every step sets it to
        ``decay * average + (1 - decay) * master``. It takes 4 / ranks bytes an element, and state
        dicts include it. Another call with the same decay, also after loading, returns the same
        average.

        Args:
            decay: the decay, ``0 <= decay < 1``; the same on every rank.

        Raises:
            InputError: on every rank, if the decay is invalid on any.
            RankMismatchError: on every rank, if ranks give different decays.
        """
        attempt = Attempt()
        with attempt:
            decay = check_decay(decay)
        lines = [f"ema({decay})"]
        check_same(self.comm, lines, "every rank must give ema the same decay", attempt.error)
        self._progress.prepare("ema")
        return self._average(decay)

    def _average(self, decay: float) -> Average:
        if decay not in self._averages:
            average = Average(decay, self._shards, self._publication, self._progress)
            self._averages[decay] = average
        return self._averages[decay]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise :class:`UnsupportedError` after construction, because the buffers are already
        divided over ranks.
        """
        if self._is_complete:
            raise UnsupportedError(
                "a ZeroOptimizer cannot take another param group, because its buffers are sharded "
                "over ranks; make a new one with all groups."
            )
        super().add_param_group(param_group)
