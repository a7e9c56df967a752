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
A step overwrites every weight from the masters. Whoever changes weights by other means (loading a
model's state dict) does so before the optimizer is made, and resumes with
:meth:`ZeroOptimizer.load_state_dict`. Weights become views of the optimizer's buffers, so a model
is moved or converted (``model.to``) before, too; a step that finds a weight elsewhere is refused.

Note: what recipes remember
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Delayed scaling remembers amaxes, stochastic rounding how often it drew; both belong to the weight.
A step advances them once, a skipped step does not, and state dicts carry them. Making an optimizer
and loading a state cast the masters without being a step: that repeats the weight's latest cast, so
what is remembered stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zerocast.cast import CastPlan
from zerocast.comm import Group, as_communicator, raise_together
from zerocast.errors import InputError, NonFiniteError, UnsupportedError, ZerocastError
from zerocast.optim.checkpoint import StateDict, checked, cut, load_recipe_states, save
from zerocast.optim.elementwise import check_elementwise
from zerocast.optim.found_inf import FoundInf
from zerocast.optim.gradients import GradientReducer
from zerocast.optim.inner import InnerOptimizer, copy_options
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.weights import Param, collect_weights, trainable_groups
from zerocast.optim.world import check_same_world


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
        params: parameters, (name, parameter) pairs or param groups. Quantized weights, and plain
            BF16, FP16 or FP32 ones, all on one device. A tied weight counts once; parameters that
            do not require a gradient are left out. Stochastic rounding draws by the name of a
            weight, and without one by its place in the groups.
        optimizer_class: an element-wise optimizer. Any class will do that updates each element from
            that element alone; it is tried on a small tensor, and refused where it does not.
        group: the ranks, as for :class:`zerocast.CastPlan`.
        overlap_all_gather: whether a step returns while codes are on their way. Each quantized
            weight is waited for when it is first used, layer by layer in the next forward; plain
            weights have arrived when the step returns. The weights are the same, to the bit. See
            "Note: gathers that overlap the forward" in :mod:`zerocast.optim.arrival`.
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
    _gradients_are_reduced = False  # by clip_grad_norm_, for the step to come

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
        self._overlaps = overlap_all_gather
        error: ZerocastError | None = None
        try:
            super().__init__(trainable_groups(params), {})
            _check_gathers(overlap_all_gather, bucket_size)
            weights = collect_weights(self.param_groups)
            check_elementwise(optimizer_class, defaults, weights[0].param.device)
            self._shards = ShardedWeights(
                self.comm, weights, overlaps=overlap_all_gather, bucket_size=bucket_size
            )
            self._inner = InnerOptimizer(optimizer_class, defaults, self.param_groups, self._shards)
        except ZerocastError as e:
            error = e
        except (TypeError, ValueError) as e:  # what torch has to say about params
            error = InputError(str(e))
        raise_together(self.comm, error)

        self.inner = self._inner.optimizer
        self.defaults = self.inner.defaults
        copy_options(self.inner.param_groups, self.param_groups)
        check_same_world(
            self.comm,
            f"{optimizer_class.__name__} with {overlap_all_gather=}, {bucket_size=}",
            self.param_groups,
            weights,
        )
        self._gradients = GradientReducer(self._shards)
        found_inf = FoundInf(self._agree_on_found_inf, self._shards.masters.device)
        self.param_groups[-1]["params"].append(found_inf)
        self._complete = True

        self._shards.start_masters()
        self._shards.adopt()
        self._shards.share_recipe_states()
        self._plan = self._make_plan()
        self._publish()

    def _make_plan(self) -> CastPlan | None:
        """The cast of the quantized weights, or None where there are none."""
        weights, own, masters = self._shards.weights, self._shards.own, self._inner.masters
        quantized = [i for i, weight in enumerate(weights) if weight.kind.is_codes]
        if not quantized:
            return None
        return CastPlan(
            [weights[i].param for i in quantized],
            [masters.get(i) for i in quantized],
            [own[i].extent.start if i in masters else None for i in quantized],
            self.comm,
            names=[weights[i].name for i in quantized],
        )

    # --- a step ---

    @property
    def phases(self) -> dict[str, Callable[[], None]]:
        """The phases of a step by name, in order; :meth:`step` runs exactly these."""
        return {
            "reduce_scatter": self._reduce_gradients,
            "optimizer": self._update_masters,
            **self._publishing_phases,
        }

    @property
    def _publishing_phases(self) -> dict[str, Callable[[], None]]:
        """From this rank's masters to everybody's weights."""
        store, gather = self._shards.store_plain, self._shards.all_gather
        if self._plan is None:
            return {"store_plain": store, "all_gather": gather}
        phases = {**self._plan.steps, "store_plain": store, "all_gather": gather}
        if not self._overlaps:  # else what waits for the codes does it
            phases["post_all_gather_processing"] = self._plan.post_all_gather_processing
        return phases

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. ``closure`` recomputes the loss first, and its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)  # set by a GradScaler; agreed on by all ranks
        if found_inf is None or not found_inf.item():
            self.wait_for_all_gather()  # for what nobody has used since the last step
            for name, run in self.phases.items():
                with self.on_phase(name):
                    run()
        self._gradients_are_reduced = False
        return loss

    @torch.no_grad()
    def _publish(self) -> None:
        """Let every rank's weights follow from the masters as they are. That is no new cast: of
        what recipes remember nothing moves on.
        """
        self.wait_for_all_gather()
        with self._shards.repeating_the_latest_cast():
            for run in self._publishing_phases.values():
                run()
        self.wait_for_all_gather()

    @torch.no_grad()
    def wait_for_all_gather(self) -> None:
        """Return when every weight has arrived, with ``overlap_all_gather``: before a CUDA graph
        is captured, or a buffer used that was taken out of a weight earlier.
        """
        self._shards.wait()

    def _reduce_gradients(self) -> None:
        if not self._gradients_are_reduced:
            self._gradients.reduce_mean()
        grad_scale = getattr(self, "grad_scale", None)  # set by a GradScaler that did not unscale
        if grad_scale is not None:
            self._gradients.scale_(1 / grad_scale)

    def _update_masters(self) -> None:
        self._inner.step(self.param_groups, self._gradients.gradients())

    # --- gradients ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, reduced or not."""
        super().zero_grad(set_to_none)
        self._gradients_are_reduced = False

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the mean gradients so that their norm over all weights is at most ``max_norm``.

        Collective; call it after the last backward pass of a step (and a GradScaler's ``unscale_``)
        in place of ``torch.nn.utils.clip_grad_norm_``, which would see this rank's gradients only.
        It reduces the gradients and the following :meth:`step` uses them; ``.grad`` itself stays as
        it is.

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
        self._gradients.reduce_mean()
        self._gradients_are_reduced = True
        norm = self._gradients.norm(norm_type)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise NonFiniteError(
                f"the norm of order {norm_type} of all gradients is {norm.item()}, so they cannot "
                f"be clipped; look for the loss that gave them, or leave error_if_nonfinite out."
            )
        self._gradients.scale_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _agree_on_found_inf(self, found_inf: torch.Tensor) -> None:
        """``found_inf``, FP32 [], is 1 where a GradScaler saw an overflow here: now on any rank."""
        self._gradients_are_reduced = False  # it looks at new ones
        self.comm.all_reduce_max_(found_inf.view(torch.int32))  # bits of 0.0 and 1.0 keep the order

    # --- saving and loading ---

    def state_dict(self) -> StateDict:
        """This rank's part of the state: masters, inner state, options. Every rank saves its own.

        The tensors are the optimizer's own and change with its next step, as in torch.
        """
        return save(self._shards, self._inner, self.param_groups)

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict | Sequence[StateDict]) -> None:
        """Continue bit for bit from a saved state, and cast the weights from it. Collective.

        Args:
            state_dict: what :meth:`state_dict` returned on this rank of as many ranks; or, on any
                number of ranks, the sequence of what it returned on all, which is cut anew.

        Raises:
            InputError: on every rank, where it does not fit on any; nothing has been changed.
        """
        saved: list[StateDict] = []
        states: dict[int, StateDict] = {}
        error: ZerocastError | None = None
        try:
            saved = checked(state_dict, self._shards, self._inner)
            states = cut(saved, self._shards, self._inner)
        except ZerocastError as e:
            error = e
        raise_together(self.comm, error)
        for i, state in states.items():
            self._shards.master(i).copy_(state.pop("master"))
            del state["start"]
        copy_options(saved[0]["param_groups"], self.param_groups)
        copy_options(self.param_groups, self.inner.param_groups)
        self._inner.load_state(states)
        load_recipe_states(saved[0], self._shards)
        self._gradients_are_reduced = False
        self._publish()

    def gather_master(self, param: torch.Tensor) -> torch.Tensor:
        """FP32, in the parameter's shape: its whole master, from all ranks. Collective."""
        for i, weight in enumerate(self._shards.weights):
            if weight.param is param:
                return self._shards.gather_master(i)
        raise InputError(
            "gather_master needs one of this optimizer's trainable parameters, got another tensor."
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
