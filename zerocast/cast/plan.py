"""CastPlan: a cast that is prepared once and run at every step.

For the steps and terms see "Note: casting a sharded weight" in :mod:`zerocast.cast`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized

import torch
from torch.utils.hooks import RemovableHandle

from zerocast.arguments import check_flag
from zerocast.cast.amax_buffers import ExchangeKind, is_boundary
from zerocast.cast.amax_groups import Patterns
from zerocast.cast.capture import check_capture
from zerocast.cast.consistency import (
    exchange_owners,
    members_by_group,
    raise_in_all,
    tp_shards_by_group,
)
from zerocast.cast.forward_hook import rebuild_before_forward
from zerocast.cast.gather import require_codes
from zerocast.cast.master_checks import as_tensors
from zerocast.cast.shard_spec import OwnCodes, ShardSpec, check_amax_groups, check_specs
from zerocast.cast.sharded_cast import ShardedCast
from zerocast.cast.verified import VerifyMode, check_mode, verification_of
from zerocast.comm import Attempt, Communicator, Group, announcing
from zerocast.comm.uncopied import Uncopied
from zerocast.errors import ZerocastError
from zerocast.numerics import AdamWUpdate
from zerocast.tensors.ledger import Scope, check_scope
from zerocast.tensors.untraced import untraced


class CastPlan(Uncopied):
    """A cast of sharded masters into quantized model weights, prepared once.

    The constructor is collective: every rank of every group calls it with the same weights in the
    same order. The ranks compare their arguments. An error on one rank is raised on all, and
    nothing is written. :meth:`cast` then allocates nothing. It takes a constant number of launches,
    and one all-reduce per group, for any number of weights.

    Weights may be tensor-parallel shards (:class:`zerocast.TensorParallelShard`). Their casts take
    one more small all-reduce per tensor-parallel group. Constructor and casts are collective over
    these groups, too. Masters and offsets refer to the tensor-parallel shard.

    Args:
        model_weights: the quantized weights, whole on every rank. Give a tied weight once.
        master_weights: for each weight this rank's shard: a torch tensor, or another that supports
            DLPack (CuPy's). FP32, BF16 or FP16, contiguous, of any shape; None or no elements
            if the rank owns nothing. 16-bit values are read as they are, and give the bytes of the
            same values in FP32. Dtypes may differ between weights and ranks. Every :meth:`cast`
            reads the masters: update them in place, or pass new ones.
        start_offsets: for each weight the element of the flattened weight at which the master
            starts; None if the master is None.
        group: the ranks that share the weights: a zerocast communicator, an mpi4py communicator, a
            torch.distributed ProcessGroup, or None for the default group. A list or tuple gives
            one group per weight (experts).
        names: unique names of the weights for error messages, exports and refits.
        fsdp_shard_model_weights: for each weight None, or a uint8 buffer that receives the codes of
            this rank's shard instead of the weight. It has ceil(end / 2) - floor(start / 2) bytes
            for 4-bit codes, one byte per element for 8-bit codes. Give a pair (rowwise, columnwise)
            if columnwise codes are quantized independently (MX, row-wise FP8).
        manual_post_all_gather_processing: if True, the caller must call
            :func:`zerocast.post_all_gather_processing` after the all-gather; reading a derived copy
            before that raises. If False, the next forward of a weight rebuilds its derived copies.
        check_finite: raise :class:`NonFiniteError` on every rank if a master holds a NaN, or an
            infinity after rounding to the weight's dtype. For NVFP4 also if it holds a value that
            decodes to an infinity (above 7.595e35). No code or scale is written then. Costs one
            host synchronisation per cast.
        amax_groups: weights that a server fuses and that must share one tensor amax, as
            patterns of their ``names``: ``[["*.wq", "*.wk", "*.wv"], ["*.w1", "*.w3"]]``; see
            :mod:`zerocast.cast.amax_groups`. Groups that :func:`zerocast.nn.convert` made are kept.
        exchange: "full": every rank has every scale after :meth:`cast`, for callers that gather the
            codes. "boundary": only the amaxes of tensors and of blocks that ranks share are
            reduced. :meth:`all_gather` gathers the scales with the codes, :meth:`all_gather_scales`
            gathers them alone; do not read weights before. The bytes are the same.
            See :mod:`zerocast.cast.amax_buffers`.
        verify: "off", or what ranks compare after each gather: a "hash" of all bytes, or for "full"
            also a whole cast of one weight. See :mod:`zerocast.cast.verified`.
        scope: which tensors each call checks for moved memory. "tensor": all. "storage": one of
            each storage, which is right only if no other code has the tensor objects of masters
            and buffers. The maker of such a plan, :class:`zerocast.optim.ZeroOptimizer`, itself
            refuses weights that were replaced, and lets torch count the writes of a cast.

    Attributes:
        pipeline: the steps of :meth:`cast`; a profiler runs them one by one instead.
        step: the number of casts. A caller that counts steps sets it before each :meth:`cast`, on
            every rank. Ranks compare it in that cast, without another collective, and in
            ``verify``.
        fingerprints: one number per group, then one per tensor-parallel group; equal on all ranks
            of one plan.

    Raises:
        InputError: on every rank, if an argument is wrong on any.
        RankMismatchError: on every rank, if weights, order, recipes or shards do not match.
    """

    instead = "make a plan of the other weights and masters"

    def __init__(
        self,
        model_weights: Sequence[torch.Tensor],
        master_weights: Sequence[torch.Tensor | None],
        start_offsets: Sequence[int | None],
        group: Group | Sequence[Group] = None,
        *,
        names: Sequence[str] | None = None,
        fsdp_shard_model_weights: OwnCodes | None = None,
        manual_post_all_gather_processing: bool = True,
        check_finite: bool = False,
        amax_groups: Patterns = (),
        exchange: ExchangeKind = "full",
        verify: VerifyMode = "off",
        scope: Scope = "tensor",
    ) -> None:
        # An argument without a length is refused below, on all ranks together.
        count = len(model_weights) if isinstance(model_weights, Sized) else 0
        members = self._members = members_by_group(group, count)
        tp_shards: dict[Communicator, list[int]] = {}
        specs: list[ShardSpec] = []
        attempt, boundary, lacks_codes = Attempt(), False, False
        with attempt:
            check_flag("check_finite", check_finite)
            check_flag("manual_post_all_gather_processing", manual_post_all_gather_processing)
            boundary, _, _ = is_boundary(exchange), check_mode(verify), check_scope(scope)
            tp_shards = tp_shards_by_group(model_weights)
            master_weights = as_tensors(master_weights)
            specs = check_specs(
                model_weights, master_weights, start_offsets, fsdp_shard_model_weights,
                names, amax_groups,
            )  # fmt: skip
            check_amax_groups(specs, members)
        options = f"check_finite={check_finite}, exchange={exchange}, verify={verify}"
        owners, self.fingerprints = exchange_owners(
            members, tp_shards, specs, options, attempt.error
        )
        with attempt:
            self._cast = ShardedCast(
                model_weights, master_weights, specs, members, owners, tp_shards,
                boundary=boundary, check_finite=check_finite, scope=scope,
                rebuild_on_use=not manual_post_all_gather_processing,
            )  # fmt: skip
            lacks_codes = any(gather.lacks_codes for gather in self._cast.gathers)
        self._comms = [*members, *tp_shards]
        self._lacks_codes = raise_in_all(self._comms, attempt.error, lacks_codes)
        self._cast.watch()
        self._prepared, self._version = self._cast.prepared, self._cast.version
        self._verification = verification_of(
            verify, specs, self._prepared, members, owners, tp_shards
        )
        self.pipeline = self._cast.pipeline()

    @property
    def step(self) -> int:
        """The number of casts; see the class."""
        return self._cast.step

    @step.setter
    def step(self, step: int) -> None:
        self._cast.step = step

    @property
    def casts(self) -> int:
        """The number of casts that have written weights."""
        return self._version.ticks

    # --- what callers run ---

    @untraced
    def cast(self, master_weights: Sequence[torch.Tensor | None] | None = None) -> None:
        """Cast this rank's shards.

        Afterwards every rank has correct scales, amaxes and padding, and its own codes.

        Args:
            master_weights: tensors to read the masters from, now and in later casts, of the sizes
                that the plan was made with. Ranks may differ in whether they pass them: this takes
                no collective.

        Raises:
            InputError: on every rank, if ``master_weights`` do not match, or masters or weights
                are no longer those of the plan, on any rank. "Note: a rank in trouble" in
                :mod:`zerocast.cast.exchange` says when only that rank raises. No scale has been
                written, and only the codes that are cast before the reduction (under delayed
                scaling, and of whole blocks); the next cast writes them again.
            NonFiniteError: on every rank, with ``check_finite``; nothing has been written.
        """
        self._cast.attempt.error = None
        with self._cast.attempt:
            if master_weights is not None:
                self._prepared.rebind(as_tensors(master_weights))
        with announcing(self._comms):
            self.pipeline.run()

    def cast_and_release(
        self, master_weights: Sequence[torch.Tensor | None], uncounted: object = None
    ) -> None:
        """Cast from masters that are known to match, and keep no reference to them.

        Threads run this one after another. ``uncounted`` is a value that changes with each write of
        masters that torch does not count.
        """
        with self._prepared.for_one_call(uncounted):
            self.cast(master_weights)

    @untraced
    def all_gather(self) -> None:
        """Gather the codes of all ranks, for any partition, and rebuild the derived copies.

        Then compare, with ``verify``; raise :class:`VerificationError` on every rank if one holds
        other bytes than were cast.
        """
        gathers = self._cast.gathers
        check_capture(self._cast.device, self._members)
        require_codes(self._comms, gathers if self._lacks_codes else ())
        with announcing(self._comms):
            self._version.begin("all-gather")
            for gather in gathers:
                gather.start()()
            self._cast.gather_scales()
            self._version.end("all-gather")
            self._cast.rebuild_copies()
            self._verification.check(self.step)

    @untraced
    def verify(self) -> None:
        """Compare what ranks hold, as :meth:`all_gather` does, for callers that gather codes."""
        with announcing(self._comms):
            self._verification.check(self.step)

    @untraced
    def all_gather_scales(self) -> None:
        """Gather the scales of all ranks, if the exchange is "boundary"."""
        with announcing(self._comms):
            self._cast.gather_scales()

    @untraced
    def post_all_gather_processing(self) -> None:
        """Rebuild the derived copies of all weights of the plan from their gathered codes."""
        self._cast.rebuild_copies()

    def post_all_gather_hook(self, module: torch.nn.Module) -> RemovableHandle:
        """Let ``module`` rebuild stale derived copies of its weights in this plan before forward.

        For frameworks that all-gather before forward. Return the hook's handle.

        Raises:
            InputError: if ``module`` has no parameter that belongs to this plan.
        """
        return rebuild_before_forward(module, [spec.storage for spec in self._cast.specs])

    def bind(self, master_weights: Sequence[torch.Tensor | None]) -> None:
        """Read the masters from these tensors from now on.

        They are FP32, BF16 or FP16, on the device and of the sizes that the plan was made with.
        Collective. Raise :class:`InputError` on every rank, for a wrong tensor on any.
        """
        attempt = Attempt()
        with attempt:
            self._prepared.rebind(as_tensors(master_weights))
        raise_in_all(self._comms, attempt.error)

    @untraced
    def update_masters(
        self,
        updates: Sequence[AdamWUpdate],
        masters: Sequence[torch.Tensor | None] | None = None,
        uncounted: object = None,
    ) -> list[AdamWUpdate]:
        """Update masters and measure them (:meth:`PreparedCast.update`); return other updates."""
        return self._prepared.update(self._version, updates, masters, uncounted)

    def fail(self, error: ZerocastError) -> None:
        """Let the next cast raise ``error`` on all ranks, in its reduction of amaxes."""
        self._cast.attempt.error = error

    # --- for callers that gather codes themselves ---

    def casts_begin(self, what: str) -> None:
        """Let every cast begin ``what``, a gather that the caller runs.

        Until :meth:`end_writing` of it, reading a weight raises
        :class:`zerocast.UnfinishedStepError` with this name.
        """
        self._version.begun_by_casts.add(what)

    def end_writing(self, what: str) -> None:
        """Record that ``what`` has finished writing."""
        self._version.end(what)

    def staged(self, stages: Sequence[Sequence[int]]) -> list[Callable[[], None]]:
        """Return functions that replace the step "partial_cast", one per stage.

        Call them in order; each casts the weights of its stage, which may be gathered from then on.
        The bytes are the same.

        Args:
            stages: for each stage the indices of its weights; every weight is in one stage.
        """
        return self._cast.staged(stages)

    def shards(self) -> list[tuple[ShardSpec, torch.Tensor | None, Communicator]]:
        """Return for each weight this rank's spec, the bound master, and the ranks sharing it."""
        comms = {i: comm for comm, indices in self._members.items() for i in indices}
        bound = zip(self._cast.specs, self._prepared.bound, strict=True)
        return [(spec, master, comms[i]) for i, (spec, master) in enumerate(bound)]
