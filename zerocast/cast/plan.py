"""CastPlan: a cast worked out once and run every step.

The steps and the words are in "Note: casting a sharded weight" in :mod:`zerocast.cast`.
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

_run_untraced = untraced(lambda step: step())


class CastPlan(Uncopied):
    """A cast of sharded masters into quantized model weights, planned once.

    Making a plan is collective: every rank of every group makes it, with the same weights in the
    same order. The ranks compare what they were given; an error of one is raised on all, and
    nothing is written. After that :meth:`cast` is a constant number of launches and one all-reduce
    a group, whatever the number of weights, and allocates nothing.

    Weights may be shards of larger ones (:class:`zerocast.TensorParallelShard`): their casts take
    one small all-reduce more for each tensor-parallel group, and plan and casts are collective over
    these groups, too. Masters and offsets are those of the tensor-parallel shard.

    Args:
        model_weights: the quantized weights, whole on every rank. A tied weight is given once.
        master_weights: for each weight this rank's shard, FP32, BF16 or FP16, contiguous, any
            shape, as a torch tensor or another that supports DLPack (CuPy's); None or no elements
            where the rank owns nothing. Values of 16 bits are read as they are, and give the bytes
            of the same values in FP32; weights, and ranks, may differ in dtype. Every :meth:`cast`
            reads them: update them in place, or give it new ones.
        start_offsets: for each weight the element, in the flattened weight, at which the master
            starts; None with a master of None.
        group: the ranks that share the weights: a zerocast communicator, an mpi4py communicator, a
            torch.distributed ProcessGroup, or None for the default group. A list or tuple of these
            gives each weight its own (experts).
        names: what error messages, exports and refits call the weights, each by another.
        fsdp_shard_model_weights: for each weight None, or a uint8 buffer that receives the codes of
            this rank's shard instead of the weight: ceil(end / 2) - floor(start / 2) bytes for
            4-bit codes, one an element for 8-bit. A pair of buffers, rowwise and columnwise, for a
            weight whose columnwise codes are quantized independently (MX, row-wise FP8).
        manual_post_all_gather_processing: True: after the all-gather the caller calls
            :func:`zerocast.post_all_gather_processing`, and a derived copy read before that is
            refused. False: the next forward that uses a weight rebuilds its derived copies.
        check_finite: raise :class:`NonFiniteError` on every rank, before any code or scale is
            written, where a master holds a NaN or an infinity after rounding to the weight's dtype,
            or one of NVFP4 what decodes to an infinity, above 7.595e35. Costs a host
            synchronisation a cast.
        amax_groups: weights that a server will fuse and that therefore share one tensor amax, by
            patterns of their ``names``: ``[["*.wq", "*.wk", "*.wv"], ["*.w1", "*.w3"]]``; see
            :mod:`zerocast.cast.amax_groups`. Those that :func:`zerocast.nn.convert` grouped are,
            too.
        exchange: "full": every rank has every scale after :meth:`cast`, for callers who gather the
            codes. "boundary": only the amaxes of tensors and of blocks that ranks share are
            reduced, and scales are gathered with the codes in :meth:`all_gather`, or alone in
            :meth:`all_gather_scales`; until then weights must not be read. The bytes are the same.
            See :mod:`zerocast.cast.amax_buffers`.
        verify: "off", or what ranks compare after each gather: a "hash" of all bytes, or in "full"
            a whole cast of some weight, too. See :mod:`zerocast.cast.verified`.
        scope: what a cast looks at for memory that has moved: every "tensor", or one of each
            "storage", for callers who alone have the masters, and let torch count the writes.

    Attributes:
        pipeline: the steps of :meth:`cast`: what a profiler runs one by one instead.
        step: the number of casts. A caller that counts steps sets it before each :meth:`cast`, on
            every rank; ranks compare it there, without a further collective, and under ``verify``.
        fingerprints: a number for each group, and then for each tensor-parallel group; ranks of one
            plan have the same one.

    Raises:
        InputError: on every rank, for a wrong argument on any.
        RankMismatchError: on every rank, where weights, order, recipes or shards do not fit.
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
        # What has no length is refused below, on all ranks together.
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
        """The number of casts, as described above."""
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
        """Cast this rank's shards: afterwards scales, amax and padding are right on every rank, and
        this rank's codes.

        Args:
            master_weights: other tensors to read the masters from, from now on; of the sizes that
                the plan was made with. Some ranks may give them and others not: they travel with
                no collective of their own.

        Raises:
            InputError: on every rank, for ``master_weights`` that do not fit, or masters and
                weights that are no longer what the plan was made for, on any; see "Note: a rank in
                trouble" in :mod:`zerocast.cast.exchange` for where only that rank can raise. No
                scale has been written, and no code but those that are cast before the reduction
                (under delayed scaling, and of whole blocks); the next cast writes them again.
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
        """Cast from masters that are known to fit, and keep none of them alive; of several threads
        one after another. ``uncounted`` changes with writes of masters that torch does not count.
        """
        with self._prepared.for_one_call(uncounted):
            self.cast(master_weights)

    @untraced
    def all_gather(self) -> None:
        """Bring every rank's codes to every rank, right for every partition, and rebuild the
        derived copies. Then compare, with ``verify``: :class:`VerificationError` on every rank,
        where one holds other bytes than were cast.
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
        """Compare all that ranks hold, as :meth:`all_gather`, for callers who gather themselves."""
        with announcing(self._comms):
            self._verification.check(self.step)

    @untraced
    def all_gather_scales(self) -> None:
        """Bring the scales that each rank made to every rank, where the exchange is "boundary"."""
        with announcing(self._comms):
            self._cast.gather_scales()

    @untraced
    def post_all_gather_processing(self) -> None:
        """Rebuild the derived copies of all weights of the plan from their gathered codes."""
        self._cast.rebuild_copies()

    def post_all_gather_hook(self, module: torch.nn.Module) -> RemovableHandle:
        """Let ``module`` rebuild the stale derived copies of its weights in this plan before its
        forward, once a cast, for frameworks that all-gather there; returns the hook's handle.

        Raises:
            InputError: where ``module`` has no parameter that belongs to this plan.
        """
        return rebuild_before_forward(module, [spec.storage for spec in self._cast.specs])

    def bind(self, master_weights: Sequence[torch.Tensor | None]) -> None:
        """Read the masters from these tensors from now on: FP32, BF16 or FP16, on the device and of
        the sizes that the plan was made with.

        Collective. Raises :class:`InputError` on every rank, for a wrong tensor on any.
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
        """Let the cast whose steps are run next raise ``error`` on all ranks, with the amaxes."""
        self._cast.attempt.error = error

    # --- for callers that gather codes themselves ---

    def casts_begin(self, what: str) -> None:
        """Let every cast begin ``what``, the caller's gather: until :meth:`end_writing` of it,
        reading a weight raises :class:`zerocast.UnfinishedStepError` by this name.
        """
        self._version.begun_by_casts.add(what)

    def end_writing(self, what: str) -> None:
        """Note that ``what`` has written all that it was to write."""
        self._version.end(what)

    def staged(self, stages: Sequence[Sequence[int]]) -> list[Callable[[], None]]:
        """Return what takes the place of the step "partial_cast": functions of which each casts the
        weights of one stage, in order. These may be gathered from then on. The bytes are the same.

        Args:
            stages: the places of the weights of each stage, all weights once.
        """
        return self._cast.staged(stages)

    def shards(self) -> list[tuple[ShardSpec, torch.Tensor | None, Communicator]]:
        """Return of each weight what this rank owns, the master as it is bound now, and the ranks
        that share it.
        """
        comms = {i: comm for comm, indices in self._members.items() for i in indices}
        bound = zip(self._cast.specs, self._prepared.bound, strict=True)
        return [(spec, master, comms[i]) for i, (spec, master) in enumerate(bound)]
