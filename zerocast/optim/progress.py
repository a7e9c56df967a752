"""Progress: checks that all ranks are at the same step and that no step was left unfinished.

A step changes this rank's masters and inner state, and then the weights of all ranks. If it fails
in between, on one rank or on all (a lost rank, an interrupt), masters and weights belong to
different steps and cannot be reconciled. Saving and stepping then raise until a state is loaded. If
it fails on some ranks only, others may have completed one more step. So every rank sends with the
gradients, at no extra cost: whether an error occurred, whether other code wrote a weight, the step
count, the caller's step number, and a digest of the options. If only some ranks step a scheduler,
or each by its local loss, shards would be trained at different learning rates.

A rank that skips or repeats a whole step still makes as many calls as the others, up to the last
one. Before that, only the caller's step number reveals it.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from zerocast.arguments import check_integer
from zerocast.comm import agree, raise_together
from zerocast.comm.agreement import check_same
from zerocast.errors import InputError, RankMismatchError, UnfinishedStepError, ZerocastError
from zerocast.optim.external_writes import ExternalWrites
from zerocast.optim.gradients import GradientReducer
from zerocast.optim.param_groups import Param, ParamGroups, option_lines, unfrozen
from zerocast.optim.shards import ShardedWeights

_LOAD = "load the last checkpoint, optimizer.load_state_dict, on every rank"

LARGEST_STEP = 2**31 - 4
"""The largest step number."""

_WRITTEN = LARGEST_STEP + 2
"""The value that a rank sends instead of the number if other code has written weights."""


class Progress:
    """The step count of an optimizer, and whether its weights match its masters.

    Args:
        shards: the weights.
        casts: returns how often the optimizer has cast its quantized weights.
        frozen: the parameters that the optimizer left out.

    Attributes:
        steps: the number of completed steps, including those of a loaded state.
        holds_averages: whether averages are in the weights; the same on every rank.
        writes: the tracker of other code's writes into the weights.
    """

    def __init__(
        self, shards: ShardedWeights, casts: Callable[[], int], frozen: Sequence[Param]
    ) -> None:
        self.steps = self._number = 0
        self.holds_averages = False
        self.writes = ExternalWrites(shards, casts)
        self._frozen = frozen
        self._shards = shards
        self._is_unfinished = False

    def begin_step(self, number: int | None) -> None:
        """Note the caller's number of the step that begins. Raise :class:`InputError` if it is
        invalid.
        """
        if number is not None:
            check_integer("the number of a step", number, 0, LARGEST_STEP)
        self._number = 0 if number is None else number + 1

    def begin_change(self) -> None:
        """Note that masters and weights change, until :meth:`end_change` or :meth:`end_step`."""
        self._is_unfinished = True

    def end_change(self) -> None:
        """Note that the weights have been made from the masters."""
        self.writes.discard()
        self._is_unfinished = False

    def end_step(self) -> None:
        """Count a step and call :meth:`end_change`."""
        self.steps += 1
        self.end_change()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Note a change of masters and weights in the context, unfinished after an exception."""
        self.begin_change()
        yield
        self.end_change()

    def unfinished_error(self, call: str) -> ZerocastError | None:
        """Return the error of ``call`` after an unfinished step; None if there was none."""
        if not self._is_unfinished:
            return None
        return UnfinishedStepError(
            f"{call} needs an optimizer whose last step completed, and step {self.steps + 1} "
            f"failed after it had begun to change masters; {_LOAD}."
        )

    def averages_error(self, call: str) -> ZerocastError | None:
        """Return the error of ``call`` while averages are in the weights; None if they are not."""
        if not self.holds_averages:
            return None
        return InputError(
            f"{call} needs weights that were cast from masters, and they hold averages; leave the "
            "context of in_weights() first."
        )

    def prepare(self, call: str, error: ZerocastError | None = None) -> None:
        """Raise on all ranks if ``call`` is not allowed on any, and restart masters from what other
        code wrote. Collective.
        """
        error = error or self.unfinished_error(call) or self.averages_error(call)
        raise_together(self._shards.comm, error)
        self.writes.agree_and_take()

    def reduce(
        self, gradients: GradientReducer, param_groups: ParamGroups, error: ZerocastError | None
    ) -> None:
        """Reduce the gradients for a step with the options of ``param_groups``, and restart masters
        from what other code wrote. Collective.

        On a CPU errors are raised on every rank. On a GPU only the ranks that detect them raise,
        and ranks are not compared, because reading the sums would wait for the reduction.

        Args:
            error: an earlier error of this rank.

        Raises:
            ZerocastError: ``error``.
            InputError: if a weight is no longer at the address where the optimizer put it, or a
                parameter that was left out has a gradient.
            UnfinishedStepError: if the last step was left unfinished.
            RankMismatchError: if ranks have made different numbers of steps, give this one
                different numbers, have different options, or hold different values in weights that
                other code wrote.
        """
        error = error or self.unfinished_error("a step") or self._shards.moved_weight()
        error = error or unfrozen(self._frozen) or gradients.error()
        is_cpu = gradients.reduced.device.type == "cpu"
        is_written = self.writes.look(waits=is_cpu)
        if is_cpu:
            options = option_lines(param_groups)
            digest = zlib.crc32(f"{options}".encode())
            place = self._number << 32 | self.steps
            gradients.reduce_mean([error is not None, is_written, place, digest])
            failed, written, places, digests, _ = map(list, zip(*gradients.notes(), strict=True))
            if any(failed):
                raise_together(self._shards.comm, error)
            self._check_equal(places, digests, options)
            if any(written):
                self.writes.agree()
        else:
            gradients.reduce_mean()  # nobody reads notes there
            if error is not None:
                raise error
        self.writes.take()

    def _check_equal(
        self, places: Sequence[int], digests: Sequence[int], options: list[str]
    ) -> None:
        """Raise :class:`RankMismatchError` if the ranks' steps or digests of options differ."""
        _check_numbers([place >> 32 for place in places])
        steps = [place & (2**32 - 1) for place in places]
        if len(set(steps)) > 1:
            raise RankMismatchError(
                "every rank must have made the same number of steps, got by rank "
                f"{dict(enumerate(steps))}; {_LOAD}."
            )
        if len(set(digests)) > 1:
            check_same(
                self._shards.comm,
                options,
                "every rank must step with the same options (step a scheduler on every rank, with "
                "a loss that is all-reduced)",
            )

    def reuse(self, gradients: GradientReducer, error: ZerocastError | None) -> None:
        """Prepare a step from the gradients that were kept after :meth:`reduce`. Collective on a
        CPU.

        Raises:
            InputError: if they are no longer the weights' gradients, or a weight has moved. On
                every rank, or on a GPU on the ranks that detect it.
            RankMismatchError: on every rank, on a CPU only, if ranks give the step different
                numbers, or hold different values in weights that other code wrote.
        """
        error = error or gradients.changed() or self._shards.moved_weight()
        is_cpu = gradients.reduced.device.type == "cpu"
        is_written = self.writes.look(waits=is_cpu)
        if is_cpu:
            comm = self._shards.comm
            if not agree(comm, _WRITTEN if is_written else self._number, error) or is_written:
                _check_numbers(comm.all_gather_object(self._number))
                self.writes.agree()
        elif error is not None:
            raise error
        self.writes.take()


def _check_numbers(numbers: Sequence[int]) -> None:
    """Raise :class:`RankMismatchError` if ranks have different step numbers. 0 stands for no
    number, and n + 1 for the number n.
    """
    if len(set(numbers)) > 1:
        given = {rank: number - 1 if number else None for rank, number in enumerate(numbers)}
        raise RankMismatchError(
            f"every rank must make the same step, got steps {given} by rank: a rank has skipped or "
            "repeated one. Nothing has been changed: continue with the same step on every rank, or "
            f"{_LOAD}."
        )
