"""CastPlan: a cast worked out once and run every step.

The steps and the words are in "Note: casting a sharded weight" in :mod:`zerocast.cast`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from zerocast.arguments import check_flag
from zerocast.cast.amax_buffers import ExchangeKind, is_boundary
from zerocast.cast.amax_groups import Patterns
from zerocast.cast.capture import check_capture
from zerocast.cast.cast_collectives import CastCollectives
from zerocast.cast.consistency import (
    Members,
    exchange_owners,
    members_by_group,
    raise_in_all,
    tp_shards_by_group,
)
from zerocast.cast.finite import raise_if_not_finite
from zerocast.cast.forward_hook import rebuild_before_forward
from zerocast.cast.gather import CodeGather, require_codes
from zerocast.cast.master_checks import as_tensors
from zerocast.cast.prepared_cast import PreparedCast, planning
from zerocast.cast.shard_spec import OwnCodes, ShardSpec, check_amax_groups, check_specs
from zerocast.cast.verified import VerifyMode, check_mode, verification_of
from zerocast.comm import Attempt, Communicator, Group, announcing
from zerocast.comm.uncopied import Uncopied
from zerocast.errors import ZerocastError
from zerocast.layout import Owners
from zerocast.numerics import AdamWUpdate
from zerocast.tensors import CastVersion, QuantizedTensor
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
        step: the number of casts. A caller that counts steps sets it before each :meth:`cast`, on
            every rank; ranks compare it there, without a further collective, and under ``verify``.
        fingerprints: a number for each group, and then for each tensor-parallel group; ranks of one
            plan have the same one.

    Raises:
        InputError: on every rank, for a wrong argument on any.
        RankMismatchError: on every rank, where weights, order, recipes or shards do not fit.
    """

    instead = "make a plan of the other weights and masters"

    _one_by_one_from: int | None = None  # weights of so many elements are gathered one by one

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
        members = self._weights_of = members_by_group(group, count)
        tp_shards: dict[Communicator, list[int]] = {}
        self._specs: list[ShardSpec] = []
        attempt, boundary, self._gathers = Attempt(), False, list[CodeGather]()
        with attempt:
            check_flag("check_finite", check_finite)
            check_flag("manual_post_all_gather_processing", manual_post_all_gather_processing)
            boundary, _, _ = is_boundary(exchange), check_mode(verify), check_scope(scope)
            tp_shards = tp_shards_by_group(model_weights)
            master_weights = as_tensors(master_weights)
            self._specs = check_specs(
                model_weights, master_weights, start_offsets, fsdp_shard_model_weights,
                names, amax_groups,
            )  # fmt: skip
            check_amax_groups(self._specs, members)
        self._comms, self._check_finite, self._scope = [*members, *tp_shards], check_finite, scope
        options = f"check_finite={check_finite}, exchange={exchange}, verify={verify}"
        owners, fingerprints = self._exchange_owners(members, tp_shards, options, attempt.error)
        with attempt:
            self._plan(model_weights, master_weights, members, owners, tp_shards, boundary)
        lacks = any(gather.lacks_codes for gather in self._gathers)
        self._lacks_codes = self._agree(attempt.error, lacks)
        self._attempt, self.step, self.fingerprints = attempt, 0, fingerprints
        self._verification = verification_of(
            verify, self._specs, self._prepared, members, owners, tp_shards
        )
        self._version = CastVersion(rebuild_on_use=not manual_post_all_gather_processing)
        weakref.finalize(self, self._version.retire)
        self.begin_writing, self.end_writing = self._version.begin, self._version.end
        for spec in self._specs:
            spec.storage.writes.watch(self._version)
            if spec.is_named:
                spec.storage.name_weight(spec.name)

    # --- what callers run ---

    @property
    def casts(self) -> int:
        """The number of casts that have written weights."""
        return self._version.ticks

    @property
    def steps(self) -> dict[str, Callable[[], None]]:
        """The steps of :meth:`cast` by name, in order: what a profiler runs one by one instead of
        ``cast()``.
        """
        return {name: partial(_run_untraced, step) for name, step in self._steps().items()}

    def _steps(self) -> dict[str, Callable[[], None]]:
        steps = {"partial_amax": self._partial_amax, "reduce_amax": self._reduce_amax}
        if self._prepared.steps.chooses_scales:
            steps["partial_select"] = self._partial_select
            steps["reduce_candidates"] = self._reduce_candidates
        return steps | {"compute_scale": self._compute_scale, "partial_cast": self._partial_cast}

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
        self._attempt = Attempt()
        with self._attempt:
            if master_weights is not None:
                self._prepared.rebind(as_tensors(master_weights))
        with announcing(self._comms):
            for step in self._steps().values():
                step()

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
        check_capture(self._device, self._members)
        require_codes(self._comms, self._gathers if self._lacks_codes else ())
        with announcing(self._comms):
            self.begin_writing("all-gather")
            for gather in self._gathers:
                gather.start()()
            self._prepared.start_scales()()
            self._version.has_scales = True
            self.end_writing("all-gather")
            self._rebuild_copies()
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
            self._prepared.start_scales()()
            self._version.has_scales = True

    @untraced
    def post_all_gather_processing(self) -> None:
        """Rebuild the derived copies of all weights of the plan from their gathered codes."""
        self._rebuild_copies()

    def post_all_gather_hook(self, module: torch.nn.Module) -> RemovableHandle:
        """Let ``module`` rebuild the stale derived copies of its weights in this plan before its
        forward, once a cast, for frameworks that all-gather there; returns the hook's handle.

        Raises:
            InputError: where ``module`` has no parameter that belongs to this plan.
        """
        return rebuild_before_forward(module, [spec.storage for spec in self._specs])

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
        """Let the next cast raise ``error`` on all ranks, which hear of it with the amaxes."""
        self._attempt.error = error

    # --- the steps ---

    def _partial_amax(self) -> None:
        self._prepared.measure(self._version, self._attempt)

    def _reduce_amax(self) -> None:
        check_capture(self._device, self._comms, check_finite=self._check_finite)
        error, self._attempt = self._attempt.error, Attempt()
        self._exchange.reduce_amax(self.step, error)
        if self._check_finite:
            masters, specs = self._prepared.masters.tensors, self._prepared.matrices
            amaxes = self._exchange.buffers.tensor_amaxes
            raise_if_not_finite(self._comms, self._members, specs, amaxes, masters)

    def _partial_select(self) -> None:
        self._exchange.candidates.zero_()
        if self._prepared.steps.writes_selected:
            self._version.tick(self._prepared.addresses.written)
        self._prepared.steps.run("partial_select")

    def _reduce_candidates(self) -> None:
        self._exchange.reduce_candidates()
        self._prepared.steps.run("select")

    def _compute_scale(self) -> None:
        attempt, self.step = Attempt(), self.step + 1
        with attempt:
            if not (self._prepared.steps.writes_early or self._prepared.steps.writes_selected):
                self._version.tick(self._prepared.addresses.written)
            self._version.has_scales = not self._prepared.gathered_scales
            self._prepared.steps.run("compute_scale")
        # A caller's function may fail on one rank; nothing else here is a caller's.
        if self._prepared.calls_functions:
            raise_in_all(self._comms, attempt.error)
        elif attempt.error is not None:
            for comm in self._comms:
                comm.announce(attempt.error)
            raise attempt.error

    def _partial_cast(self) -> None:
        self._prepared.steps.run("partial_cast")
        self._version.end("cast")

    def _rebuild_copies(self) -> None:
        self._prepared.rebuild_copies()
        self._version.mark_rebuilt()

    # --- planning ---

    def _exchange_owners(
        self, members: Members, tp_shards: Members, options: str, error: ZerocastError | None
    ) -> tuple[Mapping[Communicator, Owners], Sequence[int]]:
        """Return who owns what, and :attr:`fingerprints`; collective."""
        return exchange_owners(members, tp_shards, self._specs, options, error)

    def _agree(self, error: ZerocastError | None, lacks_codes: bool) -> bool:
        return raise_in_all(self._comms, error, lacks_codes)

    # What is made in inference mode could not be written outside of it.
    @planning()
    def _plan(
        self,
        model_weights: Sequence[torch.Tensor],
        master_weights: Sequence[torch.Tensor | None],
        members: Members,
        owners: Mapping[Communicator, Owners],
        tp_shards: Members,
        boundary: bool,
    ) -> None:
        """Make the buffers and launches; whatever of it may fail on this rank alone."""
        self._device = self._specs[0].storage.device if self._specs else torch.device("cpu")
        collectives = CastCollectives(
            self._specs, members, owners, tp_shards, self._one_by_one_from, boundary=boundary
        )
        self._members, self._gathers = collectives.members, collectives.code_gathers
        self._exchange = collectives.exchange
        self._prepared = PreparedCast(
            [weight for weight in model_weights if isinstance(weight, QuantizedTensor)],
            master_weights, self._specs, collectives, judges_amaxes=self._check_finite,
            scope=self._scope,
        )  # fmt: skip
