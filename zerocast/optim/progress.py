"""Progress: whether all ranks stand at the same step, and whether a step was left half done.

A step changes this rank's masters and inner state, and then everybody's weights. Where it fails in
between, on one rank or on all (a lost rank, an interrupt), masters and weights belong to different
steps and no rank can put them together again: saving and stepping are refused from then on, until a
state is loaded. Where it fails on some ranks only, others may have made one step more. So ranks
tell each other in the reduce-scatter of gradients, which costs nothing more, what went wrong here,
whether a weight was written by others, how many steps were made, and a digest of the options: a
scheduler that only some ranks step, or step by losses of their own, would train each rank's part at
another learning rate.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from zerocast.comm import lines_that_differ, raise_together
from zerocast.errors import RankMismatchError, UnfinishedStepError, ZerocastError
from zerocast.optim.consistency import option_lines, raise_first_difference
from zerocast.optim.gradients import GradientReducer
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.weights import Param, unfrozen
from zerocast.optim.writes import Writes

_WRAP = 32
"""Numbers are told modulo this: sums of squares over 2^13 ranks are exact in FP32."""

_LOAD = "load the last checkpoint, optimizer.load_state_dict, on every rank"


class Progress:
    """Counts the steps of an optimizer and knows whether the last one came to its end.

    Args:
        shards: the weights.
        writes: what others wrote into them.
        frozen: parameters that the optimizer left out.

    Attributes:
        steps: that were made, those before the loaded state included.
    """

    def __init__(
        self,
        shards: ShardedWeights,
        writes: Writes,
        frozen: Sequence[Param],
    ) -> None:
        self.steps = 0
        self._frozen = frozen
        self._shards = shards
        self._writes = writes
        self._unfinished = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Masters and weights change within the context; an exception leaves them half changed."""
        self._unfinished = True
        yield
        self._unfinished = False

    def begin_change(self) -> None:
        """As :meth:`changing`, until :meth:`end_step`."""
        self._unfinished = True

    def end_step(self) -> None:
        """The weights are those of the masters."""
        self.steps += 1
        self._unfinished = False

    def error(self, call: str) -> ZerocastError | None:
        """What forbids ``call`` on this rank: a step that was left half done."""
        if not self._unfinished:
            return None
        return UnfinishedStepError(
            f"{call} needs an optimizer whose last step came to its end, and step {self.steps + 1} "
            f"failed after it had begun to change masters; {_LOAD}."
        )

    def reduce(
        self,
        gradients: GradientReducer,
        param_groups: Sequence[Mapping[str, Any]],
        error: ZerocastError | None,
    ) -> None:
        """Reduce the gradients for a step with the options of ``param_groups``, and take as masters
        what others wrote. Collective.

        Args:
            error: what went wrong on this rank before.

        Raises:
            ZerocastError: ``error``.
            InputError: where a weight no longer lies where the optimizer put it, so that a step
                would change what nobody reads, or a parameter that was left out has a gradient.
            UnfinishedStepError: where the last step was left half done.
            RankMismatchError: where ranks have made different numbers of steps, have different
                options, or hold different values in weights that others wrote. Each on every rank;
                on a GPU, where a look at what others say would wait for the reduction, on the ranks
                that see it.
        """
        comm = self._shards.comm
        error = error or self.error("a step") or self._shards.moved_weight()
        error = error or unfrozen(self._frozen)
        options = option_lines(param_groups)
        told = self.steps % _WRAP
        # With the step in it, equal digests of different options differ in the steps that follow.
        digest = zlib.crc32(f"{self.steps} {options}".encode()) % _WRAP
        gradients.reduce_mean(
            [error is not None, self._writes.look(), told, told**2, digest, digest**2]
        )
        if gradients.reduced.device.type == "cpu":
            # Of means over ranks, divided in FP32, the sums.
            sums = [round(x * comm.size) for x in gradients.notes()]
            failed, written = sums[:2]
            # Numbers of which the sum's square is not as many times the squares' sum differ.
            differs = [a * a != b * comm.size for a, b in (sums[2:4], sums[4:])]
            if failed:
                raise_together(comm, error)
            if differs[0]:
                steps = dict(enumerate(comm.all_gather_object(self.steps)))
                raise RankMismatchError(
                    f"every rank must have made as many steps, got, by rank, {steps}; {_LOAD}."
                )
            if differs[1] and (everyone := lines_that_differ(comm, options)) is not None:
                raise_first_difference(
                    everyone,
                    "every rank must step with the same options (step a scheduler on every rank, "
                    "by a loss that is all-reduced)",
                )
            if written:
                self._writes.agree()
        elif error is not None:
            raise error
        self._writes.take()

    def reuse(self, gradients: GradientReducer, error: ZerocastError | None) -> None:
        """Step from gradients that were kept when :meth:`reduce` had reduced them. Collective on a
        CPU.

        Raises:
            InputError: where they are no longer the weights' gradients, or a weight has moved. On
                every rank, or on a GPU on the ranks that see it.
        """
        error = error or gradients.changed() or self._shards.moved_weight()
        if gradients.reduced.device.type == "cpu":
            raise_together(self._shards.comm, error)
        elif error is not None:
            raise error
        self._writes.take()
