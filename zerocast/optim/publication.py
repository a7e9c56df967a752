"""Publication: computes all ranks' weights from the FP32 columns of each rank."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from zerocast.cast.plan import CastPlan
from zerocast.cast.verified import VerifyMode, check_mode
from zerocast.errors import InputError, ZerocastError
from zerocast.optim.fused_adamw import FusedAdamW
from zerocast.optim.param_groups import Param
from zerocast.optim.shards import ShardedWeights
from zerocast.sharded.verification import verify as compare
from zerocast.tensors.pipeline import CastPipeline
from zerocast.tensors.storage import counted_by_torch

_GATHER = "all-gather"
"""The name, in errors for readers of a weight, of the write that is unfinished from its cast until
its all-gather has completed or begun.
"""


class Publication:
    """The cast of all weights and their all-gather. The constructor is collective and writes no
    weight.

    Args:
        shards: the weights.
        verify: as for :class:`zerocast.CastPlan`.
        optimizer: the optimizer of the masters; :class:`FusedAdamW` also measures them for the
            cast.
        overlap_cast: whether a bucket of codes is sent while the next is cast.
        frozen: parameters that are not stepped, which ``verify`` also compares.

    Raises:
        InputError: on every rank, if ``verify`` is invalid, or is used without quantized weights.
        RankMismatchError: on every rank, if ranks differ in anything that a cast depends on, or
            with ``verify`` in ``frozen``.
    """

    def __init__(
        self,
        shards: ShardedWeights,
        verify: VerifyMode,
        optimizer: torch.optim.Optimizer,
        *,
        overlap_cast: bool,
        frozen: Sequence[Param] = (),
    ) -> None:
        self._shards = shards
        self._frozen = frozen if check_mode(verify) != "off" else ()
        if verify != "off":
            compare(frozen, shards.comm)
        # This rank's master of each quantized weight (the weights of the plan), by weight index;
        # None if it owns no elements.
        self._masters = {
            i: shards.master(i) if shards.own[i].extent else None
            for i, weight in enumerate(shards.weights) if weight.kind.is_codes
        }  # fmt: skip
        self._plan: CastPlan | None = None
        self._written: list[torch.Tensor] = []  # tensors whose writes torch counts
        self._verified = 0  # the cast that was compared last
        self._stages: list[Callable[[], None]] = []
        if self._masters:
            weights = [shards.weights[i] for i in self._masters]
            self._plan = CastPlan(
                [weight.param for weight in weights],
                list(self._masters.values()),
                [
                    shards.own[i].extent.start if m is not None else None
                    for i, m in self._masters.items()
                ],
                shards.comm,
                names=[weight.name for weight in weights],
                exchange="boundary",
                verify=verify,
                scope="storage",
            )
            # All codes are views of one allocation, whose counter they share.
            params = [weight.param for weight in weights]
            self._written = counted_by_torch([*params, *shards.code_flats[:1]])
            if overlap_cast:
                place = {i: at for at, i in enumerate(self._masters)}
                coded = [bucket for bucket in shards.buckets if bucket.kind.is_codes]
                stages = [[place[i] for i in bucket.members] for bucket in coded]
                self._stages = self._plan.staged(stages)
            self._plan.casts_begin(_GATHER)
        elif verify != "off":
            raise InputError(
                f"verify={verify!r} compares the codes of quantized weights, and there are none; "
                f"call zerocast.nn.convert first, or leave it out."
            )
        if isinstance(optimizer, FusedAdamW):
            optimizer.plan = self._plan

    def casts(self) -> int:
        """Return the number of casts of quantized weights."""
        return 0 if self._plan is None else self._plan.casts

    def count_writes(self) -> None:
        """Count a write of all quantized weights in torch, so that a backward that saved one of
        them raises. Call it before every publication.
        """
        torch.autograd.graph.increment_version(self._written)

    def pipeline(self, columns: torch.Tensor | None = None) -> CastPipeline:
        """Return the pipeline that makes the weights from the masters. Plain weights are made from
        ``columns``, FP32 [num_columns], if given.
        """
        columns = self._shards.masters if columns is None else columns
        runs: dict[str, Callable[[], None]] = {}
        if self._plan is not None:
            runs["all_gather_scales"] = self._plan.all_gather_scales
            # If uses of the weights wait for codes, that wait does the processing.
            if not self._shards.overlaps:
                runs["post_all_gather_processing"] = self._plan.post_all_gather_processing
        runs["store_plain"] = partial(self._shards.store_plain, columns)
        cast = CastPipeline() if self._plan is None else self._plan.pipeline
        if self._stages:
            return cast.having(
                partial_cast=None, cast_and_all_gather=self._cast_and_all_gather, **runs
            )
        return cast.having(all_gather=self._all_gather, **runs)

    def _cast_and_all_gather(self) -> None:
        """Cast the buckets in order, and gather each while the next are cast."""
        waits, casts = list[Callable[[], None]](), iter(self._stages)
        try:
            for bucket in self._shards.buckets:
                if bucket.kind.is_codes:
                    next(casts)()
                gathers = map(self._shards.comm.start_all_gather_, bucket.flats)
                if bucket.pending is not None:
                    bucket.pending.begin(gathers)  # uses of the weights wait for it
                else:
                    waits += gathers
        finally:  # gathers in flight write the weights until they are waited for
            for wait in waits:
                wait()
        assert self._plan is not None, "it has stages"
        self._plan.end_writing(_GATHER)

    def verify(self) -> None:
        """Compare the weights of the latest publication between ranks, after all are gathered.
        Collective, unless it has been done.
        """
        if self._plan is not None and self._verified != self._plan.step:
            self._plan.verify()
            if self._frozen:
                compare(self._frozen, self._shards.comm)
            self._verified = self._plan.step  # not if ranks differ: the next call raises again

    def _all_gather(self) -> None:
        self._shards.all_gather()
        # If one of these gathers fails, every use of its weights and of later ones raises the
        # error. An interrupt is not raised again by uses, and leaves the all-gather unfinished.
        late = iter([bucket for bucket in self._shards.buckets if bucket.pending is not None])
        failure: Exception | None = None
        try:
            for bucket in late:
                bucket.all_gather(self._shards.comm)
        except Exception as error:
            failure = error
            for bucket in late:
                assert bucket.pending is not None
                bucket.pending.fail(error)
        if self._plan is not None:
            self._plan.end_writing(_GATHER)
        if failure is not None:
            raise failure

    def fail(self, error: ZerocastError | None) -> None:
        """Make the pipeline raise this rank's ``error``, if any, on all ranks that can receive it.
        Collective if there are no quantized weights.
        """
        if self._plan is None:
            self._shards.raise_together(error)
        elif error is not None:
            self._plan.fail(error)

    @torch.no_grad()
    def run(self, columns: torch.Tensor | None = None, due: Collection[int] = ()) -> None:
        """Make every rank's weights from the current masters, or from ``columns``. Collective.

        It repeats the latest cast, so the state of recipes does not advance. Exceptions are the
        weights ``due``, by index, whose state precedes the cast of these masters.
        """
        self._shards.wait()
        self.fail(self._shards.moved_weight())
        self.count_writes()
        own, masters = self._shards.own, self._masters
        if self._plan is not None and columns is not None:
            held = {i: columns[own[i].columns] for i, m in masters.items() if m is not None}
            self._plan.bind([held.get(i) for i in masters])
        with self._shards.repeating_the_latest_cast(due):
            self.pipeline(columns).run()
            self._shards.wait()
            self.verify()
        if self._plan is not None and columns is not None:
            self._plan.bind(list(masters.values()))
