"""ShardedCast: one rank's part in the casts of some weights, given the owners of all elements."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from zerocast.cast.capture import check_capture
from zerocast.cast.cast_collectives import CastCollectives
from zerocast.cast.consistency import Members, raise_in_all
from zerocast.cast.finite import raise_if_not_finite
from zerocast.cast.prepared_cast import PreparedCast, planning
from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import Attempt, Communicator
from zerocast.layout import Owners
from zerocast.tensors import CastVersion, QuantizedTensor
from zerocast.tensors.ledger import Scope
from zerocast.tensors.pipeline import CastPipeline
from zerocast.tensors.untraced import untraced


class ShardedCast:
    """The steps of a cast over the ranks of some groups. Making one is not collective.

    Args:
        weights: the weights, in order.
        masters: this rank's shards of their masters.
        specs: the same weights as checked.
        members: for each group the indices of its weights; every weight is in one group.
        owners: for each group the owners of its members.
        tp_shards: for each tensor-parallel group the indices of the weights whose shards it holds.
        boundary: whether ranks reduce only the amaxes of tensors and of cut blocks.
        check_finite: whether a cast raises if a master is not finite.
        rebuild_on_use: whether the next use of a weight may rebuild its derived copies.
        one_by_one_from: weights of at least this many elements are gathered alone; None: no weight.
        scope: what a cast checks for moved memory; see :class:`CastPlan`.

    Attributes:
        specs: as given.
        comms: all groups.
        device: the device of the weights.
        gathers: the gathers of codes.
        prepared: the launches.
        exchange: what ranks reduce.
        version: the counter of the casts.
        attempt: what this rank alone has found wrong; the next reduction raises it on all.
        step: the number of casts.
    """

    @planning()
    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        masters: Sequence[torch.Tensor | None],
        specs: Sequence[ShardSpec],
        members: Members,
        owners: Mapping[Communicator, Owners],
        tp_shards: Members,
        *,
        boundary: bool,
        check_finite: bool = False,
        rebuild_on_use: bool = False,
        one_by_one_from: int | None = None,
        scope: Scope = "tensor",
    ) -> None:
        self.specs, self.comms = specs, [*members, *tp_shards]
        self.device = specs[0].storage.device if specs else torch.device("cpu")
        collectives = CastCollectives(
            specs, members, owners, tp_shards, one_by_one_from, boundary=boundary
        )
        self.gathers, self.exchange = collectives.code_gathers, collectives.exchange
        self._members, self._check_finite = collectives.members, check_finite
        self.prepared = PreparedCast(
            [weight for weight in weights if isinstance(weight, QuantizedTensor)],
            masters, specs, collectives, judges_amaxes=check_finite, scope=scope,
        )  # fmt: skip
        self.attempt, self.step = Attempt(), 0
        self.version = CastVersion(rebuild_on_use=rebuild_on_use)
        weakref.finalize(self, self.version.retire)

    def watch(self) -> None:
        """Make the weights count its casts and take its names, once no rank has an error."""
        for spec in self.specs:
            spec.storage.writes.watch(self.version)
            if spec.is_named:
                spec.storage.name_weight(spec.name)

    def pipeline(self) -> CastPipeline:
        """Return the steps. They keep this object alive, but it does not keep them."""
        pipeline = CastPipeline(
            partial_amax=partial(self.prepared.measure, self.version, self.attempt),
            reduce_amax=self._reduce_amax,
            compute_scale=self._compute_scale,
            partial_cast=self._partial_cast,
        )
        if not self.prepared.steps.chooses_scales:
            return pipeline
        return pipeline.having(
            partial_select=self._partial_select,
            reduce_candidates=self.exchange.reduce_candidates,
            select=self._select,
        )

    def staged(self, stages: Sequence[Sequence[int]]) -> list[Callable[[], None]]:
        """Return functions that replace the step "partial_cast", one per stage.

        Call them in order; each casts the weights of its stage, which may be gathered from then on.

        Args:
            stages: for each stage the indices of its weights; every weight is in one stage.
        """
        self.prepared.divide(stages)
        last = len(stages) - 1
        return [partial(self._cast_stage, i, is_last=i == last) for i in range(len(stages))]

    def gather_scales(self) -> None:
        """Gather the scales of all ranks."""
        self.prepared.start_scales()()
        self.version.has_scales = True

    def rebuild_copies(self) -> None:
        """Rebuild the derived copies of all weights from their gathered codes."""
        self.prepared.rebuild_copies()
        self.version.mark_rebuilt()

    # --- the steps ---

    @untraced
    def _reduce_amax(self) -> None:
        check_capture(self.device, self.comms, check_finite=self._check_finite)
        error, self.attempt.error = self.attempt.error, None
        self.exchange.reduce_amax(self.step, error)
        if self._check_finite:
            masters, matrices = self.prepared.masters.tensors, self.prepared.matrices
            amaxes = self.exchange.buffers.tensor_amaxes
            raise_if_not_finite(self.comms, self._members, matrices, amaxes, masters)

    @untraced
    def _partial_select(self) -> None:
        self.exchange.candidates.zero_()
        if self.prepared.steps.writes_selected:
            self.version.tick(self.prepared.addresses.written)
        self.prepared.steps.run("partial_select")

    @untraced
    def _select(self) -> None:
        self.prepared.steps.run("select")

    @untraced
    def _compute_scale(self) -> None:
        attempt, self.step = Attempt(), self.step + 1
        with attempt:
            if not (self.prepared.steps.writes_early or self.prepared.steps.writes_selected):
                self.version.tick(self.prepared.addresses.written)
            self.version.has_scales = not self.prepared.gathered_scales
            self.prepared.steps.run("compute_scale")
        # A caller's function may fail on one rank; nothing else here runs a caller's code.
        if self.prepared.calls_functions:
            raise_in_all(self.comms, attempt.error)
        elif attempt.error is not None:
            for comm in self.comms:
                comm.announce(attempt.error)
            raise attempt.error

    @untraced
    def _partial_cast(self) -> None:
        self.prepared.steps.run("partial_cast")
        self.version.end("cast")

    def _cast_stage(self, stage: int, *, is_last: bool) -> None:
        self.prepared.steps.run_stage(stage)
        if is_last:
            self.version.end("cast")
