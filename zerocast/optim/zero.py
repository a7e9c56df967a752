"""ZeroOptimizer: a training step on sharded FP32 masters, from whole gradients to whole weights.

It wraps an ordinary torch optimizer, like torch's ``ZeroRedundancyOptimizer``. Every rank holds all
weights as they are stored (codes, or plain BF16, FP16, FP32) and their gradients, until these are
reduced; masters and optimizer state it holds for its own shards only: with AdamW 12 / ranks bytes
an element. Shards begin and end anywhere inside a weight, so every rank holds equally much.

Note: the same weights on every number of ranks
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An element-wise optimizer gives the same bits however its tensors are divided, and a cast gives the
same bytes however its masters are. So from equal mean gradients any number of ranks trains the same
weights, bit for bit, with torch's for-loop and ``foreach`` implementations. Its fused ones
(``fused=True``) round some elements differently at the ends of a shard: they are accepted, without
this claim. Nor does it hold with gradient clipping, where the order in which squares are summed
follows the partition.

Note: the masters are the truth
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A step overwrites every weight from the masters. Code that writes weights by other means (loading a
model's state dict, ``copy_``, a broadcast) writes the same values on every rank, and the next step
starts their masters again from what was written (:mod:`zerocast.optim.external_writes`); inner
state stays. Weights become views of the optimizer's buffers, so a model is moved or converted
(``model.to``) before its optimizer is made; a step that finds a weight elsewhere is refused.

Note: a step that fails
~~~~~~~~~~~~~~~~~~~~~~~
A step that fails up to the phase ``reduce_scatter`` has changed nothing. Later it leaves masters
and weights of different steps: saving and stepping are then refused until
:meth:`ZeroOptimizer.load_state_dict`. See :mod:`zerocast.optim.progress`.

Note: the state of recipes
~~~~~~~~~~~~~~~~~~~~~~~~~~
Delayed scaling keeps a history of amaxes, stochastic rounding a count of draws. A step advances
them once. Making an optimizer and loading a state repeat the latest cast, so it stays as it was.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from zerocast.arguments import check_flag
from zerocast.cast.verified import VerifyMode
from zerocast.comm import Attempt, Group, announcing, as_communicator, raising_together
from zerocast.errors import InputError, NonFiniteError, ZerocastError
from zerocast.optim.buckets import BUCKET_SIZE
from zerocast.optim.elementwise import check_shardable
from zerocast.optim.found_inf import FoundInf
from zerocast.optim.gradient_overlap import OverlappingReducer, release_gradients
from zerocast.optim.gradients import GradientReducer, check_gradient_dtype
from zerocast.optim.inner import InnerOptimizer
from zerocast.optim.matrix_owners import MatrixOwners
from zerocast.optim.param_groups import Param, options, trainable_groups
from zerocast.optim.progress import Progress
from zerocast.optim.publication import Publication
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.stepped_weights import check_same_optimizer, collect_weights
from zerocast.optim.zero_training import SavedOptimizer
from zerocast.tensors.pipeline import CastPipeline
from zerocast.tensors.untraced import untraced


class ZeroOptimizer(SavedOptimizer):
    """A torch optimizer whose FP32 masters and state are sharded over ranks.

    :meth:`step` sends every rank its shards of the gradients and takes their mean, steps the inner
    optimizer on this rank's masters, casts them into its range of the weights, and all-gathers.
    ``param_groups`` drive the inner optimizer, so learning rate schedulers work, and so does
    ``torch.amp.GradScaler``: an overflow on one rank skips the step on all. For that the last
    group ends in one more parameter, which has no elements.

    Making one is collective, and so are :meth:`step`, :meth:`clip_grad_norm_`,
    :meth:`load_state_dict` and :meth:`gather_master`. Afterwards every weight is the cast of its
    master on every rank. Masters start from the values that quantized weights were made from, where
    those were kept, else from the weights' own. Each rank contributes its shards, so weights are
    equal on all ranks even where they were not before.

    Gradients accumulate in ``.grad`` as always, in its dtype: several backward passes, one exchange
    at the step; or with ``overlap_grad_reduce`` in FP32 and in shards, one exchange a backward
    pass. Their sum is taken in FP32 in the order of the ranks, so it has the same bits on every
    transport. A weight for which no rank has a gradient is left out of the step. Beside masters and
    state a rank holds gradients in 4 / ranks bytes an element, and buffers in which they travel: at
    most two of 32 MiB, or two buckets with ``overlap_grad_reduce``.

    Args:
        params: ``model.named_parameters()``, or param groups of such (name, parameter) pairs, or of
            parameters alone. No two weights have one name, and ranks compare names; without them
            two weights of one shape in another order are noticed by their values only. Quantized
            weights, and plain BF16, FP16 or FP32 ones, all on one device. A tied weight counts
            once; parameters that do not require a gradient are left out. Stochastic rounding draws
            by the name of a weight, and without one by its place in the groups.
        optimizer_class: any class that updates each element from that element alone and keeps FP32
            state; with ``shard="matrix"`` each tensor from that tensor alone. It is tried on small
            tensors and refused where it does not (:mod:`zerocast.optim.elementwise`).
        group: the ranks, as for :class:`zerocast.CastPlan`.
        overlap_all_gather: whether a step returns while codes are on their way. Each quantized
            weight is waited for when it is first used, layer by layer in the next forward; plain
            weights are gathered when the step returns. The weights are the same, to the bit. See
            :mod:`zerocast.optim.pending_all_gather`.
        bucket_size: weights of one kind are gathered together in the order of ``params``, until
            they are so many elements; give parameters in the order in which they are used. By
            default 2^23 with any of the options ``overlap_...``, and else all of a kind at once.
        gradient_dtype: in which gradients travel: bfloat16, float16 or float32, to which they are
            rounded. By default each in the dtype of its weight, which is its own.
        overlap_grad_reduce: whether gradients are sent while the backward pass goes on, bucket by
            bucket, and ``.grad`` is freed (ZeRO-2): whoever uses it then gets an error. Every rank
            makes as many backward passes. See :mod:`zerocast.optim.gradient_overlap`.
        overlap_cast: whether a step casts bucket by bucket, and gathers the codes of each while the
            next are cast, where the transport can. The weights are the same, to the bit.
        shard: what of a weight one rank steps: "element", any part of it, for optimizers that
            update each element by itself; or "matrix", all of it, for those that look at a whole
            matrix, such as ``torch.optim.Muon``. Weights are then dealt to ranks, balanced by cost;
            see :mod:`zerocast.optim.matrix_owners`.
        verify: as for :class:`zerocast.CastPlan`: "hash" or "full" compares quantized weights after
            each step; with ``overlap_all_gather`` when all are waited for, at the latest before the
            next step changes anything. A step that finds a fault leaves masters and state whole.
            Frozen parameters in ``params`` are compared, too.
        **defaults: options of ``optimizer_class``.

    Attributes:
        on_phase: called with the name of every phase of a step, returns a context in which the
            phase runs. For timers.

    Raises:
        InputError, UnsupportedError: on every rank, for a wrong argument on any; no weight has been
            touched.
        RankMismatchError: on every rank, where ranks differ in weights, their order or options; or
            with ``verify`` in the values of frozen parameters.
    """

    on_phase: Callable[[str], AbstractContextManager[Any]] = nullcontext

    # GradScaler.step() then always calls step(), with `found_inf` and `grad_scale` set on the
    # optimizer. So FP16 gradients are unscaled in FP32, after they are reduced.
    _step_supports_amp_scaling = True

    @torch.inference_mode(False)  # what is made in that mode could not be written outside of it
    def __init__(
        self,
        params: Iterable[Param] | Iterable[dict[str, Any]],
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        group: Group = None,
        *,
        overlap_all_gather: bool = False,
        bucket_size: int | None = None,
        gradient_dtype: torch.dtype | None = None,
        overlap_grad_reduce: bool = False,
        overlap_cast: bool = False,
        shard: Literal["element", "matrix"] = "element",
        verify: VerifyMode = "off",
        **defaults: Any,
    ) -> None:
        self.comm = as_communicator(group)
        frozen: list[Param] = []
        with raising_together(self.comm):
            check_gradient_dtype(gradient_dtype)
            check_flag("overlap_grad_reduce", overlap_grad_reduce)
            check_flag("overlap_cast", overlap_cast)
            groups, frozen = trainable_groups(params)
            super().__init__(groups, {})
            weights = collect_weights(self.param_groups)
            device = weights[0].param.device
            check_shardable(optimizer_class, defaults, list(map(options, groups)), device, shard)
            if (overlap_grad_reduce or overlap_cast) and bucket_size is None:
                bucket_size = BUCKET_SIZE
            self._shards = ShardedWeights(self.comm, weights, overlap_all_gather, bucket_size)
            self._owners = MatrixOwners(self._shards) if shard == "matrix" else None
            masters = self._owners.masters if self._owners else self._shards.held
            self._inner = InnerOptimizer(
                optimizer_class, defaults, self.param_groups, weights, masters
            )

        self.inner = self._inner.optimizer
        self.defaults = self.inner.defaults
        self._inner.exchange_options(self.param_groups)
        made = (
            f"{optimizer_class.__name__} with {overlap_all_gather=}, {bucket_size=}, "
            f"{gradient_dtype=}, {overlap_grad_reduce=}, {overlap_cast=}, {shard=}"
        )
        check_same_optimizer(self.comm, made, self.param_groups, self._shards.weights)
        self._shards.share_recipe_states()  # a plan is made of weights with equal states only
        publication = Publication(
            self._shards, verify, self.inner, overlap_cast=overlap_cast, frozen=frozen
        )
        self._publication = publication
        release_gradients(self._shards)
        reducer = OverlappingReducer if overlap_grad_reduce else GradientReducer
        self._gradients = reducer(self._shards, gradient_dtype)
        found_inf = FoundInf(self._gradients, self.comm, self._shards.masters.device)
        self.param_groups[-1]["params"].append(found_inf)
        self._averages, self._user_code, self._is_complete = {}, Attempt(), True

        # From here on weights change: whatever can be refused has been.
        self._shards.restart_masters(i for i, w in enumerate(weights) if w.kind.is_codes)
        self._shards.adopt()
        are_new = torch.ones(len(self._shards.plain), dtype=torch.bool, device=device)
        self._shards.restart_plain_masters(are_new)
        if self._owners:
            self._owners.fetch_masters()
        self._publication.run()
        self._progress = Progress(self._shards, publication.casts, frozen)

    # --- a step ---

    @property
    def phases(self) -> CastPipeline:
        """The phases of a step and their names, in order; :meth:`step` runs exactly these."""
        return self._publication.pipeline().having(
            reduce_scatter=self._reduce_gradients, optimizer=self._update_masters
        )

    @untraced  # collectives and casts read addresses; compile the inner step instead
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, number: int | None = None) -> Any:
        """Make one step. ``closure`` recomputes the loss first, and its result is returned. By
        ``number``, the caller's of the step, ranks see that one has left a step out, or repeats it.

        Raises:
            InputError: on every rank, in the mode of :meth:`eval`, while averages are in the
                weights, where a weight has been moved, where gradients have changed since
                :meth:`clip_grad_norm_` or since ``overlap_grad_reduce`` took them, or where a
                parameter that was frozen has a gradient.
            RankMismatchError: on every rank, where other code wrote different values into a weight
                on different ranks, or numbers of steps or options differ.
            UnfinishedStepError: on every rank, where the last step was left unfinished.
            VerificationError: on every rank, with ``verify``, where ranks hold other bytes than
                were cast; masters and state are those of the step. RankMismatchError then, where
                they hold different frozen parameters.
            Exception: of ``closure`` or of the inner optimizer, on the ranks where it happened. On
                a CPU the others raise a ZerocastError with its message; on a GPU they do not.
        """
        self._user_code = Attempt()
        loss = None
        if closure is not None:
            with self._user_code, torch.enable_grad():
                loss = closure()
        with self._user_code:
            self._progress.begin_step(number)
        found_inf = getattr(self, "found_inf", None)  # set by a GradScaler; agreed on by all ranks
        if found_inf is None or not found_inf.item():
            self._check_mode()
            self.wait_for_all_gather()  # for the weights that were not used since the last step
            try:
                with announcing([self.comm]):
                    self.phases.run(self.on_phase)
            except ZerocastError:
                # What user code raised on this rank is raised as it was, and not as other ranks
                # see it.
                if self._user_code.error is None or self._user_code.error.__cause__ is None:
                    raise
                raise self._user_code.error.__cause__ from None
            self._progress.end_step()
            if not self._shards.overlaps:
                self._publication.verify()
        self._gradients.drop()
        return loss

    def _check_mode(self) -> None:
        """Refuse a step in another mode."""
        if (error := self._progress.averages_error("a step")) is not None:
            raise error
        if self._inner.mode != "train":
            raise InputError(
                f"{type(self.inner).__name__} was put into the mode of eval(); call "
                "optimizer.train() before the next forward and step."
            )

    @torch.no_grad()
    def wait_for_all_gather(self) -> None:
        """Return when every weight is gathered, with ``overlap_all_gather``: before a CUDA graph
        is captured, or a buffer used that was taken out of a weight earlier. With ``verify``, too,
        it compares them, and is collective.
        """
        self._shards.wait()
        self._publication.verify()

    def _reduce_gradients(self) -> None:
        if self._gradients.kept:
            self._progress.reuse(self._gradients, self._user_code.error)
        else:
            self._reduce(self._user_code.error)
        grad_scale = getattr(self, "grad_scale", None)  # set by a GradScaler that did not unscale
        if grad_scale is not None:
            self._gradients.scale_(1 / grad_scale)

    def _reduce(self, error: ZerocastError | None = None) -> None:
        self._inner.exchange_options(self.param_groups)  # before ranks compare them
        self._progress.reduce(self._gradients, self.param_groups, error)

    def _update_masters(self) -> None:
        gradients = self._gradients.gradients()
        if self._owners:
            gradients = self._owners.whole_gradients(self._gradients.reduced, gradients)
        self._progress.begin_change()
        self._publication.count_writes()
        with self._user_code:
            self._inner.step(self.param_groups, gradients)
        if self._owners:
            self._owners.return_masters()
        self._publication.fail(self._user_code.error)
        for average in self._averages.values():
            average.update()

    # --- gradients ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, reduced or not."""
        self._gradients.drop()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the mean gradients so that their norm over all weights is at most ``max_norm``.

        Collective; call it after the last backward pass of a step (and a GradScaler's ``unscale_``)
        in place of ``torch.nn.utils.clip_grad_norm_``, which would see this rank's gradients only.
        (With one rank, or under DistributedDataParallel, whose gradients are equal, torch's is
        right.) It reduces the gradients and the following :meth:`step` uses them; ``.grad`` itself
        stays as it is, and a step that finds another is refused.

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
        self._progress.begin_step(None)  # step() says which one it is
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
