"""The launches of a plan: one a step and recipe, whatever the number of weights."""

from __future__ import annotations

from collections.abc import Sequence

from zerocast.cast.exchange import Exchange
from zerocast.cast.request import ShardRequest
from zerocast.ops import Backend, Launch, Masters, SelectTarget
from zerocast.recipes import Recipe

STEPS = (
    "partial_amax", "partial_select", "select", "compute_scale", "partial_cast", "transpose"
)  # fmt: skip


class Launches:
    """Prepared for the weights' buffers as they lie now.

    Attributes:
        writes_early: whether the first step writes codes already, as delayed scaling does.
        chooses_scales: whether there are steps of 4-over-6.
    """

    def __init__(
        self,
        backend: Backend,
        requests: Sequence[ShardRequest],
        exchange: Exchange,
        masters: Masters,
        *,
        check_finite: bool,
    ) -> None:
        self._backend, self._masters, self._check_finite = backend, masters, check_finite
        self._requests, self._exchange = requests, exchange
        self._by_step: dict[str, list[Launch]] = {step: [] for step in STEPS}
        self.writes_early = False
        by_recipe: dict[Recipe, list[int]] = {}
        for i, request in enumerate(requests):
            by_recipe.setdefault(request.storage.recipe, []).append(i)
        for recipe, indices in by_recipe.items():
            self._prepare(recipe, indices)
        self.chooses_scales = bool(self._by_step["select"])

    def run(self, step: str) -> None:
        """Launch what there is to do in ``step``."""
        for launch in self._by_step[step]:
            launch()

    def _prepare(self, recipe: Recipe, indices: Sequence[int]) -> None:
        backend, masters, steps = self._backend, self._masters, self._by_step
        amax_of, candidates_of = self._exchange.amax_of, self._exchange.candidates_of
        shared = self._exchange.tensor_amax_of
        requests = [(i, self._requests[i]) for i in indices]
        shards = [
            shard
            for i, r in requests
            for shard in r.storage.cast_shards(
                i,
                r.extent,
                amax_of[i],
                tensor_amax=shared.get(i),
                codes=r.codes.get("rowwise_data"),
                columnwise_codes=r.codes.get("columnwise_data"),
                codes_start=r.codes_start,
                candidates=candidates_of.get(i),
            )
        ]
        scales = [
            target
            for i, r in requests
            for target in r.storage.scale_targets(
                amax_of[i], candidates_of.get(i), tensor_amax=shared.get(i)
            )
        ]
        copies = [r.storage.transpose_target() for _, r in requests if r.storage.derived_names]
        scale = recipe.compute_scale(backend, scales)
        cast = recipe.partial_cast(backend, shards, masters)
        if recipe.casts_before_reduction and not self._check_finite:
            self.writes_early = True
            steps["partial_amax"].append(cast)
            steps["compute_scale"].append(scale)
        else:
            steps["partial_amax"].append(recipe.partial_amax(backend, shards, masters))
            if recipe.casts_before_reduction:
                # Nothing may be written before the amaxes were judged; and when the codes are
                # written, the scale that they are cast with must not have moved on yet.
                steps["compute_scale"] += [cast, scale]
            else:
                steps["compute_scale"].append(scale)
                steps["partial_cast"].append(cast)
        if recipe.chooses_scales:
            choices = []
            for i, r in requests:
                block_amax, _, tensor_amax = r.storage.split_amax(amax_of[i], shared.get(i))
                grid = r.storage.grid
                choices.append(SelectTarget(grid, block_amax, tensor_amax, candidates_of[i]))
            steps["partial_select"].append(recipe.partial_select(backend, shards, masters))
            steps["select"].append(recipe.select(backend, choices))
        steps["transpose"].append(recipe.post_all_gather_processing(backend, copies))
