"""Publication: from FP32 columns, each rank's own, to whole weights on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from zerocast.cast import CastPlan
from zerocast.comm import raise_together
from zerocast.errors import ZerocastError
from zerocast.optim.shards import ShardedWeights


class Publication:
    """The cast of all weights and their all-gather. Making one is collective and writes no weight.

    Args:
        shards: the weights.
        masters: by place, those of this rank.
        overlaps: whether uses of the weights wait for codes, and not the phases.

    Raises:
        RankMismatchError: on every rank, where ranks differ in anything that a cast depends on.
    """

    def __init__(
        self, shards: ShardedWeights, masters: Mapping[int, torch.Tensor], *, overlaps: bool
    ) -> None:
        self._shards = shards
        self._masters = masters
        self._overlaps = overlaps
        self._quantized = [i for i, w in enumerate(shards.weights) if w.kind.is_codes]
        self._plan: CastPlan | None = None
        if self._quantized:
            weights = [shards.weights[i] for i in self._quantized]
            self._plan = CastPlan(
                [weight.param for weight in weights],
                [masters.get(i) for i in self._quantized],
                [shards.own[i].extent.start if i in masters else None for i in self._quantized],
                shards.comm,
                names=[weight.name for weight in weights],
            )

    def phases(self, columns: torch.Tensor | None = None) -> dict[str, Callable[[], None]]:
        """By name, in order, what makes the weights from the masters; plain ones from ``columns``,
        FP32 [num_columns], instead where these are given.
        """
        columns = self._shards.masters if columns is None else columns
        phases: dict[str, Callable[[], None]] = {} if self._plan is None else self._plan.steps
        phases["store_plain"] = partial(self._shards.store_plain, columns)
        phases["all_gather"] = self._shards.all_gather
        if self._plan is not None and not self._overlaps:  # else what waits for the codes does it
            phases["post_all_gather_processing"] = self._plan.post_all_gather_processing
        return phases

    def fail(self, error: ZerocastError | None) -> None:
        """Let the phases raise ``error``, where there is one on this rank, on all ranks that can
        hear of it. Collective where no weight holds codes.
        """
        if self._plan is None and self._shards.masters.device.type == "cpu":
            raise_together(self._shards.comm, error)
        elif self._plan is not None and error is not None:
            self._plan.fail(error)
        elif error is not None:
            raise error

    @torch.no_grad()
    def run(self, columns: torch.Tensor | None = None) -> None:
        """Let every rank's weights follow from the masters as they are, or from ``columns``.
        Collective. That is no new cast: of what recipes remember nothing moves on.
        """
        self._shards.wait()
        if self._plan is not None and columns is not None:
            own = self._shards.own
            self._plan.bind(
                [columns[own[i].columns] if i in self._masters else None for i in self._quantized]
            )
        with self._shards.repeating_the_latest_cast():
            for run in self.phases(columns).values():
                run()
        self._shards.wait()
        if self._plan is not None and columns is not None:
            self._plan.bind([self._masters.get(i) for i in self._quantized])
