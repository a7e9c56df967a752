"""ZeroOptimizer: a training step on sharded FP32 masters, from whole gradients to whole weights.

It wraps an ordinary torch optimizer, in the habit of torch's ``ZeroRedundancyOptimizer``. Every
rank holds all weights as they are stored (codes, or plain BF16, FP16, FP32) and their gradients;
masters and optimizer state it holds for its own part only: with AdamW 12 / ranks bytes an element.
Parts are cut anywhere inside a weight, so every rank holds equally much.

Note: the same weights on every number of ranks
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An element-wise optimizer gives the same bits however its tensors are cut, and a cast gives the same
bytes however its masters are. So from equal mean gradients any number of ranks trains the same
weights, bit for bit, with torch's for-loop and ``foreach`` implementations. Its fused ones
(``fused=True``) round some elements differently where a tensor is cut: they are accepted, and the
claim is not made for them. Nor is it made for gradient clipping, where the order in which squares
are summed follows the partition.

Note: the masters are the truth
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A step overwrites every weight from the masters. Whoever writes weights by other means (loading a
model's state dict, ``copy_``, a broadcast) writes the same values on every rank, and the next step
starts their masters anew from what was written (:mod:`zerocast.optim.writes`); inner state stays.
Writes that torch does not count (through ``.data`` of a plain weight, or into a buffer that was
taken out of a quantized one) are named by :meth:`ZeroOptimizer.mark_written`.
:meth:`ZeroOptimizer.load_state_dict` wins over whatever was written before. Weights become views of
the optimizer's buffers, so a model is moved or converted (``model.to``) before its optimizer is
made; a step that finds a weight elsewhere is refused.

Note: a step that fails
~~~~~~~~~~~~~~~~~~~~~~~
A step that fails up to the phase ``reduce_scatter`` has changed nothing. Later it leaves masters
and weights of different steps, perhaps on some ranks only: saving and stepping are then refused
until :meth:`ZeroOptimizer.load_state_dict`. See :mod:`zerocast.optim.progress`.

Note: what recipes remember
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Delayed scaling remembers amaxes, stochastic rounding how often it drew; both belong to the weight.
A step advances them once, a skipped step does not, and state dicts carry them. Making an optimizer
and loading a state cast the masters without being a step: that repeats the weight's latest cast, so
what is remembered stays as it was.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch

from zerocast.comm import (
    Attempt,
    Group,
    agree,
    as_communicator,
    lines_that_differ,
    raise_together,
)
from zerocast.errors import (
    InputError,
    NonFiniteError,
    RankMismatchError,
    UnsupportedError,
    ZerocastError,
)
from zerocast.optim.average import Average, check_decay
from zerocast.optim.checkpoint import (
    StateDict,
    check_own,
    checked,
    cut,
    in_common,
    load_recipe_states,
    save,
)
from zerocast.optim.consistency import check_consistency, raise_first_difference
from zerocast.optim.elementwise import check_elementwise
from zerocast.optim.found_inf import FoundInf
from zerocast.optim.gradients import GradientReducer
from zerocast.optim.inner import InnerOptimizer, options
from zerocast.optim.progress import Progress
from zerocast.optim.publication import Publication
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.weights import Param, collect_weights, trainable_groups
from zerocast.optim.writes import Writes, index_of


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose FP32 masters and state are sharded over ranks.

    :meth:`step` reduce-scatters the gradients to their mean, steps the inner optimizer on this
    rank's masters, casts them into this rank's part of the weights, and all-gathers.
    ``param_groups`` drive the inner optimizer, so learning rate schedulers work as ever, and so
    does ``torch.amp.GradScaler``: an overflow on one rank skips the step on all. For that the last
    group ends in one more parameter, which has no elements.

    Making one is collective, and so are :meth:`step`, :meth:`clip_grad_norm_`,
    :meth:`load_state_dict` and :meth:`gather_master`. Afterwards every weight is the cast of its
    master on every rank. Masters start from the values that quantized weights were made from, where
    those were kept, else from the weights' own. Each rank contributes its part, so weights are
    equal on all ranks even where they were not before.

    Gradients accumulate in ``.grad`` as always, in its dtype: several backward passes, one
    reduce-scatter at the step. A weight for which no rank has a gradient is left out of the step.
    Beside masters and state a rank holds FP32 buffers for gradients: one of all weights' size but
    at most 64 MiB, and where that is not all weights, 4 / ranks bytes an element.

    Args:
        params: ``model.named_parameters()``, or param groups of such (name, parameter) pairs, or of
            parameters alone. Ranks compare names; without them two weights of one shape in another
            order are noticed by their values only. Quantized weights, and plain BF16, FP16 or FP32
            ones, all on one device. A tied weight counts once; parameters that
            do not require a gradient are left out. Stochastic rounding draws by the name of a
            weight, and without one by its place in the groups.
        optimizer_class: an element-wise optimizer. Any class will do that updates each element from
            that element alone and keeps FP32 state; it is tried on small tensors, in pieces, and
            refused where it does not (:mod:`zerocast.optim.elementwise`).
        group: the ranks, as for :class:`zerocast.CastPlan`.
        overlap_all_gather: whether a step returns while codes are on their way. Each quantized
            weight is waited for when it is first used, layer by layer in the next forward; plain
            weights have arrived when the step returns. The weights are the same, to the bit. See
            "Note: gathers that overlap the forward" in :mod:`zerocast.optim.pending_all_gather`.
        bucket_size: weights of one kind are gathered together in the order of ``params``, until
            they are so many elements; give parameters in the order in which they are used. By
            default 2^23 with ``overlap_all_gather``, and else all of a kind at once.
        **defaults: options of ``optimizer_class``.

    Attributes:
        comm: the ranks.
        inner: the wrapped optimizer; its parameters are this rank's masters.
        on_phase: called with the name of every phase of a step, returns a context in which the
            phase runs. For timers.

    Raises:
        InputError, UnsupportedError: on every rank, for a wrong argument on any; no weight has been
            touched.
        RankMismatchError: on every rank, where ranks differ in weights, their order or options.
    """

    on_phase: Callable[[str], AbstractContextManager[Any]] = nullcontext

    # GradScaler.step() then always calls step(), with `found_inf` and `grad_scale` set on the
    # optimizer. So FP16 gradients are unscaled in FP32, after they are reduced.
    _step_supports_amp_scaling = True
    _complete = False  # torch's __init__ adds groups one by one; afterwards none can be added
    _shown = False  # whether averages are in the weights

    @torch.inference_mode(False)  # what is made in that mode could not be written outside of it
    def __init__(
        self,
        params: Iterable[Param] | Iterable[dict[str, Any]],
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        group: Group = None,
        *,
        overlap_all_gather: bool = False,
        bucket_size: int | None = None,
        **defaults: Any,
    ) -> None:
        self.comm = as_communicator(group)
        attempt, frozen = Attempt(), list[Param]()
        with attempt:
            groups, frozen = trainable_groups(params)
            super().__init__(groups, {})
            _check_gathers(overlap_all_gather, bucket_size)
            weights = collect_weights(self.param_groups)
            check_elementwise(
                optimizer_class, defaults, list(map(options, groups)), weights[0].param.device
            )
            self._shards = ShardedWeights(
                self.comm, weights, overlaps=overlap_all_gather, bucket_size=bucket_size
            )
            self._inner = InnerOptimizer(optimizer_class, defaults, self.param_groups, self._shards)
        raise_together(self.comm, attempt.error)

        self.inner = self._inner.optimizer
        self.defaults = self.inner.defaults
        self._inner.exchange_options(self.param_groups)
        check_consistency(
            self.comm,
            f"{optimizer_class.__name__} with {overlap_all_gather=}, {bucket_size=}",
            self.param_groups,
            self._shards.weights,
        )
        # Before the plan is made, which takes only ranks that remember the same.
        self._shards.share_recipe_states()
        self._publication = Publication(
            self._shards, self._inner.masters, overlaps=overlap_all_gather
        )
        self._gradients = GradientReducer(self._shards)
        found_inf = FoundInf(self._agree_on_found_inf, self._shards.masters.device)
        self.param_groups[-1]["params"].append(found_inf)
        self._averages: dict[float, Average] = {}
        self._users_code = Attempt()
        self._complete = True

        # From here on weights change: whatever can be refused has been.
        self._shards.start_masters()
        self._shards.adopt()
        self._publication.run()
        self._writes = Writes(self._shards)
        self._progress = Progress(self._shards, self._writes, frozen)

    # --- a step ---

    @property
    def phases(self) -> dict[str, Callable[[], None]]:
        """The phases of a step by name, in order; :meth:`step` runs exactly these."""
        return {
            "reduce_scatter": self._reduce_gradients,
            "optimizer": self._update_masters,
            **self._publication.phases(),
        }

    @torch._disable_dynamo  # collectives and casts read addresses; compile the inner step instead
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. ``closure`` recomputes the loss first, and its result is returned.

        Raises:
            InputError: on every rank, in the mode of :meth:`eval`, while averages are in the
                weights, where a weight is no longer where the optimizer put it, where gradients
                have changed since :meth:`clip_grad_norm_`, or where a parameter that was frozen
                when the optimizer was made has a gradient.
            RankMismatchError: on every rank, where others wrote different values into a weight on
                different ranks, or ranks have not made the same number of steps or have other
                options.
            UnfinishedStepError: on every rank, where the last step was left half done.
            Exception: of ``closure`` or of the inner optimizer, on the ranks where it happened. On
                a CPU the others raise a ZerocastError with its message; on a GPU they do not hear
                of it.
        """
        self._users_code = Attempt()
        loss = None
        if closure is not None:
            with self._users_code, torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)  # set by a GradScaler; agreed on by all ranks
        if found_inf is None or not found_inf.item():
            self._check_steppable()
            self.wait_for_all_gather()  # for what nobody has used since the last step
            with self._raising_as_it_was():
                for name, run in self.phases.items():
                    with self.on_phase(name):
                        run()
            self._writes.settle()
            self._progress.end_step()
        self._gradients.drop()
        return loss

    @contextmanager
    def _raising_as_it_was(self) -> Iterator[None]:
        """What users' code raised on this rank is raised as it was, not as others hear of it."""
        try:
            yield
        except ZerocastError:
            error = self._users_code.error
            if error is None or error.__cause__ is None:
                raise
            raise error.__cause__ from None

    def _check_steppable(self) -> None:
        """Every rank is in the same mode, because changing it is collective."""
        if self._shown:
            raise InputError(
                "a step needs the masters' weights, and averages are in them; leave the context of "
                "in_weights() first."
            )
        if self._inner.mode != "train":
            raise InputError(
                f"{type(self.inner).__name__} was put into the mode of eval(); call "
                "optimizer.train() before the next forward and step."
            )

    @torch.no_grad()
    def wait_for_all_gather(self) -> None:
        """Return when every weight has arrived, with ``overlap_all_gather``: before a CUDA graph
        is captured, or a buffer used that was taken out of a weight earlier.
        """
        self._shards.wait()

    def _reduce_gradients(self) -> None:
        error = self._users_code.error
        if self._gradients.kept:
            self._progress.reuse(self._gradients, error)
        else:
            self._reduce(error)
        grad_scale = getattr(self, "grad_scale", None)  # set by a GradScaler that did not unscale
        if grad_scale is not None:
            self._gradients.scale_(1 / grad_scale)

    def _reduce(self, error: ZerocastError | None = None) -> None:
        self._inner.exchange_options(self.param_groups)  # before ranks compare them
        self._progress.reduce(self._gradients, self.param_groups, error)

    def _update_masters(self) -> None:
        self._progress.begin_change()
        with self._users_code:
            self._inner.step(self.param_groups, self._gradients.gradients())
        self._publication.fail(self._users_code.error)
        for average in self._averages.values():
            average.update()

    # --- gradients ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, reduced or not."""
        super().zero_grad(set_to_none)
        self._gradients.drop()

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the mean gradients so that their norm over all weights is at most ``max_norm``.

        Collective; call it after the last backward pass of a step (and a GradScaler's ``unscale_``)
        in place of ``torch.nn.utils.clip_grad_norm_``, which would see this rank's gradients only.
        Nobody can notice that: to the optimizer it is gradients that the caller scaled. (With one
        rank, or under DistributedDataParallel, whose gradients are equal, torch's is right.)
        It reduces the gradients and the following :meth:`step` uses them; ``.grad`` itself stays as
        it is, and a step that finds another is refused.

        Args:
            norm_type: any positive order, ``math.inf`` included.

        Returns:
            FP32 []: the norm before clipping, the same bits on every rank.

        Raises:
            NonFiniteError: on every rank, with ``error_if_nonfinite``, where the norm is a NaN or
                an infinity.
        """
        if not norm_type > 0:
            raise InputError(f"norm_type must be a positive number or math.inf, got {norm_type}.")
        self._reduce()
        norm = self._gradients.norm(norm_type)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise NonFiniteError(
                f"the norm of order {norm_type} of all gradients is {norm.item()}, so they cannot "
                f"be clipped; look for the loss that gave them, or leave error_if_nonfinite out."
            )
        self._gradients.scale_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        self._gradients.keep()
        return norm

    def _agree_on_found_inf(self, found_inf: torch.Tensor) -> None:
        """``found_inf``, FP32 [], is 1 where a GradScaler saw an overflow here: now on any rank."""
        if self._gradients.kept:
            raise InputError(
                "a GradScaler looks at gradients that were clipped with their scale; "
                "call scaler.unscale_(optimizer) before optimizer.clip_grad_norm_, and "
                "optimizer.zero_grad() where no step followed it."
            )
        self.comm.all_reduce_max_(found_inf.view(torch.int32))  # bits of 0.0 and 1.0 keep the order

    # --- masters and weights ---

    def gather_master(self, param: torch.Tensor) -> torch.Tensor:
        """FP32, in the parameter's shape: its whole master, from all ranks. Collective.

        Raises:
            InputError: on every rank, where ``param`` is no trainable parameter of the optimizer.
            UnfinishedStepError: on every rank, where a step was left half done.
        """
        attempt, index = Attempt(), -1
        with attempt:
            index = index_of(self._shards.weights, param, "gather_master")
        self._settle_writes("gather_master", attempt)
        return self._shards.gather(index, self._shards.masters)

    def mark_written(self, params: Iterable[torch.Tensor]) -> None:
        """Say that these parameters were written in a way that torch does not count; the next step
        starts their masters anew. Call it on every rank.

        Raises:
            InputError: where one is no trainable parameter of the optimizer.
        """
        weights = self._shards.weights
        self._writes.mark([index_of(weights, param, "mark_written") for param in params])

    def train(self) -> None:
        """Put an inner optimizer that has modes (schedule-free) into that of training. Collective.

        Others have nothing to change. A new optimizer is in this mode.
        """
        self._switch("train")

    def eval(self) -> None:
        """Put an inner optimizer that has modes into that of evaluation: the weights become the
        cast of the averages that it makes of the masters, until :meth:`train`. Collective.

        Raises:
            InputError, UnfinishedStepError: as :meth:`step`.
        """
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        if not self._inner.has_modes or self._inner.mode == mode:
            return
        self._settle_writes(f"{mode}()")
        with self._progress.changing():
            self._inner.switch(mode, self.param_groups)
            self._publication.run()
            self._writes.settle()

    def ema(self, decay: float) -> Average:
        """An exponential moving average of the masters, in FP32, which every step updates:
        ``decay * average + (1 - decay) * master``, beginning at the masters as they are.

        Collective. It takes 4 / ranks bytes an element, and state dicts carry it. Asking again for
        a decay that there is, as after loading, returns the same average.

        Args:
            decay: from 0 up to, not including, 1; the same on every rank.

        Raises:
            InputError: on every rank, for another decay on any; RankMismatchError for different
                ones.
        """
        attempt = Attempt()
        with attempt:
            decay = check_decay(decay)
        if lines_that_differ(self.comm, [f"ema({decay})"], attempt.error):
            raise RankMismatchError(
                f"every rank must give ema the same decay, got {decay} and others."
            )
        self._settle_writes("ema")
        return self._average(decay)

    def _average(self, decay: float) -> Average:
        if decay not in self._averages:
            self._averages[decay] = Average(decay, self._shards, self._show)
        return self._averages[decay]

    @contextmanager
    def _show(self, columns: torch.Tensor) -> Iterator[None]:
        """Let ``columns``, FP32 [num_columns], be in the weights instead of the masters."""
        self._settle_writes("in_weights")
        with self._progress.changing():
            self._publication.run(columns)
        self._writes.settle()
        self._shown = True
        try:
            yield
        finally:
            self._shown = False
            written = self._writes.look()
            with self._progress.changing():
                self._publication.run()
            self._writes.settle()
            # Also where the body failed: other ranks, on which it did not, take part.
            agreed = agree(self.comm, int(written))
        if not agreed or written:
            raise InputError(
                "weights were written while averages were in them, and hold the masters' cast "
                "again; write them after leaving the context of in_weights()."
            )

    def _settle_writes(self, call: str, attempt: Attempt | None = None) -> None:
        """Raise on all ranks what forbids ``call`` on any, and take what others wrote."""
        error = (attempt and attempt.error) or self._progress.error(call)
        if error is None and self._shown:
            error = InputError(
                f"{call} needs the masters' weights, and averages are in them; leave the context "
                "of in_weights() first."
            )
        raise_together(self.comm, error)
        self._writes.agree_and_take()

    # --- saving and loading ---

    def state_dict(self) -> StateDict:
        """This rank's part of the state: masters, inner state, averages, options. Every rank saves
        its own, by ``torch.save`` in a file of its own.

        The tensors are the optimizer's own and change with its next step, as in torch. Other ranks'
        have the same names and are no copies, for which ``torch.distributed.checkpoint`` takes
        them: it would save one rank's. Give it ``{f"optimizer {rank}": buffer.getvalue()}`` of an
        ``io.BytesIO`` into which ``torch.save`` wrote the state dict.

        Raises:
            UnfinishedStepError: where a step was left half done.
            UnsupportedError: where torch.distributed.checkpoint asks, which would keep one part.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise UnsupportedError(
                "get_optimizer_state_dict takes tensors to be whole or DTensors, and of a "
                "ZeroOptimizer every rank holds another part; let every rank save what its "
                "optimizer.state_dict() returns in a file of its own."
            )
        error = self._progress.error("state_dict")
        if error is not None:
            raise error
        self._writes.take()
        self._inner.exchange_options(self.param_groups)
        averages = list(self._averages.values())
        return save(self._shards, self._inner, self.param_groups, averages, self._progress.steps)

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict | Sequence[StateDict]) -> None:
        """Continue bit for bit from a saved state, and cast the weights from it. Collective.

        Averages (:meth:`ema`) are those of the state; one that the state does not have begins at
        the loaded masters.

        Args:
            state_dict: what :meth:`state_dict` returned on this rank of as many ranks; or, on any
                number of ranks, the sequence of what it returned on all, which is cut anew.

        Raises:
            InputError: on every rank, where it does not fit on any; nothing has been changed.
            RankMismatchError: on every rank, where ranks give states of different steps or options.
        """
        attempt = Attempt()
        saved: list[StateDict] = []
        states: dict[int, StateDict] = {}
        with attempt:
            if self._shown:
                raise InputError("leave the context of in_weights() before loading a state.")
            if (moved := self._shards.moved_weight()) is not None:
                raise moved
            saved = checked(state_dict, self._shards, self._inner)
            states = cut(saved, self._shards, self._inner)
            check_own(saved, self.comm)
        lines = [] if attempt.error is not None else in_common(saved[0])
        everyone = lines_that_differ(self.comm, lines, attempt.error)
        if everyone is not None:
            raise_first_difference(everyone, "every rank must load a state of the same step")
        with self._progress.changing():
            for i, state in states.items():
                self._shards.master(i).copy_(state.pop("master"))
                del state["start"]
            zero = saved[0]["zero"]
            for decay in zero["averages"]:
                self._average(decay)
            for average in self._averages.values():
                average.load(states)
            loaded = copy.deepcopy(saved[0]["param_groups"])  # a tensor, lr, is written in place
            for group, theirs in zip(self.param_groups, loaded, strict=True):
                group.update(options(theirs))
            self._inner.load_state(states, zero["mode"], self.param_groups)
            load_recipe_states(saved[0], self._shards)
            self._publication.run()
            self._writes.settle()
            self._progress.steps = zero["steps"]
        self._gradients.drop()

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            "a ZeroOptimizer cannot be copied or pickled, because its weights lie in buffers that "
            "all ranks gather; save what optimizer.state_dict() returns on every rank, and load it "
            "into an optimizer of the other model."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: its buffers are cut over ranks.

        Raises:
            UnsupportedError: always then.
        """
        if self._complete:
            raise UnsupportedError(
                "a ZeroOptimizer cannot take another param group, because its buffers are cut over "
                "ranks; make a new one with all groups."
            )
        super().add_param_group(param_group)


def _check_gathers(overlap_all_gather: object, bucket_size: object) -> None:
    """Raise :class:`InputError` for options of the all-gather that are none."""
    if not isinstance(overlap_all_gather, bool):
        raise InputError(
            f"overlap_all_gather must be True or False, got {overlap_all_gather!r}; quantized "
            "weights are waited for one by one, whatever layers use them."
        )
    if bucket_size is not None and not (type(bucket_size) is int and bucket_size > 0):
        raise InputError(
            f"bucket_size must be a positive number of elements, or None, got {bucket_size!r}."
        )
