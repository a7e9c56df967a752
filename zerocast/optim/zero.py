"""ZeroOptimizer: a training step on sharded FP32 masters, from whole gradients to whole weights.

It wraps an ordinary torch optimizer, like torch's ``ZeroRedundancyOptimizer``. Every rank holds all
weights in their stored form (codes, or plain BF16, FP16, FP32), and their gradients until these are
reduced. It holds masters and optimizer state of its shards only: with AdamW 12 / ranks bytes an
element. Shards begin and end at any element of a weight, so all ranks hold equal amounts.

Note: the same weights on every number of ranks
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The bits of an element-wise optimizer's result and the bytes of a cast do not depend on the
partition. So from equal mean gradients any number of ranks trains the same weights, bit for bit,
with torch's for-loop and ``foreach`` implementations. Its fused ones (``fused=True``) are accepted
without this guarantee, because they round some elements at the ends of a shard differently. Nor
does it hold with gradient clipping, where the order of summing squares depends on the partition.

Note: the masters are the truth
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A step overwrites every weight from the masters. Other code that writes weights (loading a model's
state dict, ``copy_``, a broadcast) must write the same values on every rank. The next step restarts
the masters from these values (:mod:`zerocast.optim.external_writes`); inner state is kept. Weights
become views of the optimizer's buffers, so move or convert a model (``model.to``) before making its
optimizer. A step raises if a weight has been moved.

Note: a step that fails
~~~~~~~~~~~~~~~~~~~~~~~
A step that fails up to the phase ``reduce_scatter`` has changed nothing. A later failure leaves
masters and weights of different steps. Saving and stepping then raise until
:meth:`ZeroOptimizer.load_state_dict`. See :mod:`zerocast.optim.progress`.

Note: the state of recipes
~~~~~~~~~~~~~~~~~~~~~~~~~~
Delayed scaling keeps a history of amaxes, stochastic rounding a count of draws. A step advances
them once. Making an optimizer and loading a state repeat the latest cast, without advancing them.
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

    :meth:`step` reduces the mean gradients to each rank's shards, and steps the inner optimizer on
    this rank's masters. It casts them into this rank's range of the weights, and all-gathers. The
    inner optimizer uses the options of ``param_groups``, so learning rate schedulers work. With
    ``torch.amp.GradScaler`` an overflow on one rank skips the step on all; for this the last group
    ends in one more parameter, without elements.

    The constructor, :meth:`step`, :meth:`clip_grad_norm_`, :meth:`load_state_dict` and
    :meth:`gather_master` are collective. After construction every weight is the cast of its master
    on every rank. Masters start from the values that quantized weights were made from, if these
    were kept, else from the weights. Each rank contributes its shards, so the weights become equal
    on all ranks even if they differed before.

    Gradients accumulate in ``.grad`` in its dtype, with one exchange at the step. With
    ``overlap_grad_reduce`` they accumulate in FP32 shards, with one exchange for each backward
    pass. They are summed in FP32 in rank order, so the sum has the same bits on every transport. A
    weight without a gradient on any rank is left out of the step. In addition to masters and state,
    a rank holds reduced gradients of 4 / ranks bytes an element. The buffers for sending take at
    most two times 32 MiB, or two buckets with ``overlap_grad_reduce``.

    Args:
        params: ``model.named_parameters()``, or param groups of (name, parameter) pairs or of
            parameters. Names must be unique, and are compared between ranks; without names, a
            different order of weights of one shape is detected by their values only. Weights are
            quantized or plain BF16, FP16 or FP32, all on one device. A tied weight counts once.
            Parameters that do not require a gradient are left out. Stochastic rounding draws by the
            name of a weight, or without names by its index in the groups.
        optimizer_class: a class that updates each element from that element alone and keeps FP32
            state; with ``shard="matrix"`` each tensor from that tensor alone. It is tried on small
            tensors and rejected if it does not (:mod:`zerocast.optim.elementwise`).
        group: the ranks, as for :class:`zerocast.CastPlan`.
        overlap_all_gather: whether a step returns while all-gathers of codes are in flight. The
            first use of each quantized weight waits for it, layer by layer in the next forward.
            Plain weights are gathered before the step returns. The weights have the same bits. See
            :mod:`zerocast.optim.pending_all_gather`.
        bucket_size: the number of elements at which a bucket of weights, gathered together, is
            closed. List parameters in the order of their use. The default is 2^23 with any
            ``overlap_...`` option, else one bucket for each storage kind.
        gradient_dtype: the dtype to which gradients are rounded for sending: bfloat16, float16 or
            float32. By default each is sent in the dtype of its weight.
        overlap_grad_reduce: whether gradients are sent during the backward pass, bucket by bucket,
            and ``.grad`` is freed (ZeRO-2). Using ``.grad`` is then an error. Every rank must make
            the same number of backward passes. See :mod:`zerocast.optim.gradient_overlap`.
        overlap_cast: whether a step casts bucket by bucket, and gathers the codes of each while the
            next are cast, if the transport can. The weights have the same bits.
        shard: the unit of a weight that one rank steps. "element" is any part of it, for optimizers
            that update each element independently. "matrix" is the whole weight, for optimizers
            that read a whole matrix, such as ``torch.optim.Muon``. Weights are then assigned to
            ranks, balanced by cost; see :mod:`zerocast.optim.matrix_owners`.
        verify: as for :class:`zerocast.CastPlan`: "hash" or "full" compares quantized weights after
            each step; with ``overlap_all_gather`` when all are waited for, at the latest before the
            next step changes anything. If it finds a fault, masters and state remain intact. Frozen
            parameters in ``params`` are also compared.
        **defaults: options of ``optimizer_class``.

    Attributes:
        on_phase: a function of the name of a phase of a step; it returns a context manager in which
            the phase runs. For timers.

    Raises:
        InputError, UnsupportedError: on every rank, if an argument is invalid on any; no weight has
            been changed.
        RankMismatchError: on every rank, if ranks differ in weights, their order or options; or
            with ``verify`` in the values of frozen parameters.
    """

    on_phase: Callable[[str], AbstractContextManager[Any]] = nullcontext

    # This makes GradScaler.step() always call step(), with `found_inf` and `grad_scale` set on the
    # optimizer. So FP16 gradients are unscaled in FP32, after they are reduced.
    _step_supports_amp_scaling = True

    @torch.inference_mode(False)  # inference tensors cannot be written outside that mode
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
        self._shards.share_recipe_states()  # a plan requires weights with equal states
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

        # Weights change from here on; all checks have passed.
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
        """The named phases of a step in order; :meth:`step` runs exactly these."""
        return self._publication.pipeline().having(
            reduce_scatter=self._reduce_gradients, optimizer=self._update_masters
        )

    @untraced  # collectives and casts read addresses; compile the inner step instead
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, number: int | None = None) -> Any:
        """Make one step. Call ``closure``, which recomputes the loss, first and return its result.

        With ``number``, the caller's step number, ranks detect that one skipped or repeats a step.

        Raises:
            InputError: on every rank, in :meth:`eval` mode, or while averages are in the weights;
                if a weight has been moved, or a frozen parameter has a gradient; if gradients have
                changed since :meth:`clip_grad_norm_` or since ``overlap_grad_reduce`` took them.
            RankMismatchError: on every rank, if other code wrote different values into a weight
                on different ranks, if step numbers or options differ, or with ``verify`` if frozen
                parameters differ.
            UnfinishedStepError: on every rank, if the last step was left unfinished.
            VerificationError: on every rank, with ``verify``, if ranks hold bytes that differ from
                the cast; masters and state are those of the step.
            Exception: the error of ``closure`` or of the inner optimizer, on its ranks. On a CPU
                the others raise a ZerocastError with its message; on a GPU they do not.
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
            self.wait_for_all_gather()  # for weights not used since the last step
            try:
                with announcing([self.comm]):
                    self.phases.run(self.on_phase)
            except ZerocastError:
                # Raise the original error of user code on this rank, not the one for other ranks.
                if self._user_code.error is None or self._user_code.error.__cause__ is None:
                    raise
                raise self._user_code.error.__cause__ from None
            self._progress.end_step()
            if not self._shards.overlaps:
                self._publication.verify()
        self._gradients.drop()
        return loss

    def _check_mode(self) -> None:
        """Raise :class:`InputError` if averages are in the weights, or the mode is not "train"."""
        if (error := self._progress.averages_error("a step")) is not None:
            raise error
        if self._inner.mode != "train":
            raise InputError(
                f"{type(self.inner).__name__} is in the mode of eval(); call optimizer.train() "
                "before the next forward and step."
            )

    @torch.no_grad()
    def wait_for_all_gather(self) -> None:
        """Wait until every weight is gathered, with ``overlap_all_gather``. Call it before a CUDA
        graph capture, or before using a buffer that was taken from a weight earlier. With
        ``verify`` it also compares the weights, and is collective.
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
        """Discard the gradients, reduced or not."""
        self._gradients.drop()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the mean gradients so that their norm over all weights is at most ``max_norm``.

        Collective. Call it after the last backward pass of a step (and a GradScaler's ``unscale_``)
        instead of ``torch.nn.utils.clip_grad_norm_``, which would use this rank's gradients only.
        (With one rank, or under DistributedDataParallel, whose gradients are equal, torch's is
        correct.) It reduces the gradients, and the following :meth:`step` uses them. ``.grad`` is
        not changed, and the step raises if other code has changed it.

        Args:
            norm_type: any positive order, including ``math.inf``.

        Returns:
            FP32 []: the norm before clipping, with the same bits on every rank.

        Raises:
            NonFiniteError: on every rank, with ``error_if_nonfinite``, if the norm is a NaN or an
                infinity.
        """
        if not norm_type > 0:
            raise InputError(f"norm_type must be a positive number or math.inf, got {norm_type}.")
        self._progress.begin_step(None)  # step() notes the number
        self._reduce()
        norm = self._gradients.norm(norm_type)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise NonFiniteError(
                f"the norm of order {norm_type} of all gradients is {norm.item()}, so they cannot "
                "be clipped; find the loss that caused it, or leave error_if_nonfinite out."
            )
        self._gradients.scale_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        self._gradients.keep()
        return norm
