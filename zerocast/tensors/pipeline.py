"""CastPipeline: the steps from gradients to whole weights; only this module states their order.

    reduce_scatter      ranks sum the gradients; each keeps its shards
    optimizer           updates this rank's masters
    partial_amax        the amaxes of this rank's shards (and the codes of whole blocks)
    reduce_amax         ranks take the maximum
    hold_amaxes         a refit rounds tensor amaxes up, so that few codes change
    partial_select      4-over-6: the errors of both scales (and the codes of whole blocks)
    reduce_candidates   4-over-6: ranks take the sum
    select              4-over-6: the choice of blocks that ranks share
    compute_scale       the scales of all blocks
    partial_cast        the codes of this rank's shards
    store_plain         weights that are not quantized, from their masters
    all_gather_scales   the scales that ranks made of their blocks
    all_gather          the codes
    cast_and_all_gather both in stages, in place of partial_cast and all_gather
    post_all_gather_processing  what is derived from codes

Delayed scaling multiplies by a scale from earlier casts. So its codes and its amax take one pass,
in ``partial_amax``, and ``compute_scale`` ends the cast. If scales depend on blocks alone, rows of
blocks that one shard holds whole need no other rank. They are measured and cast in one pass, in
``partial_amax``, and ``partial_cast`` writes the others. Under 4-over-6 the pass that chooses their
scales, ``partial_select``, casts them. If nothing may be written before the amaxes were judged,
codes are written after ``compute_scale``, or before it under delayed scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

ORDER = (
    "reduce_scatter", "optimizer", "partial_amax", "reduce_amax", "hold_amaxes", "partial_select",
    "reduce_candidates", "select", "compute_scale", "partial_cast", "store_plain",
    "all_gather_scales", "all_gather", "cast_and_all_gather", "post_all_gather_processing",
)  # fmt: skip
"""All steps. A pipeline has some of them."""


class CastPipeline:
    """The functions of some steps: an iterable of (name, function) in :data:`ORDER`.

    It is immutable; its methods return new pipelines.

    Args:
        runs: the functions by the names of their steps, in any order.
    """

    def __init__(self, **runs: Callable[[], None]) -> None:
        assert runs.keys() <= {*ORDER}, f"no steps of a cast: {runs.keys() - {*ORDER}}"
        self._steps = tuple((name, runs[name]) for name in ORDER if name in runs)

    def __iter__(self) -> Iterator[tuple[str, Callable[[], None]]]:
        return iter(self._steps)

    def run(self, around: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        """Run all steps, each in the context that ``around`` returns for its name."""
        if around is nullcontext:
            for _, step in self._steps:
                step()
            return
        for name, step in self._steps:
            with around(name):
                step()

    def having(self, **runs: Callable[[], None] | None) -> CastPipeline:
        """Return the pipeline with ``runs`` replaced or added by name; None removes a step."""
        steps = {**dict(self._steps), **runs}
        return CastPipeline(**{name: run for name, run in steps.items() if run is not None})

    def before(self, name: str) -> CastPipeline:
        """Return the part before the step ``name``, which the pipeline need not have."""
        return self._part(0, ORDER.index(name))

    def since(self, name: str) -> CastPipeline:
        """Return the part from the step ``name`` on, which the pipeline need not have."""
        return self._part(ORDER.index(name), len(ORDER))

    def _part(self, first: int, end: int) -> CastPipeline:
        names = ORDER[first:end]
        return CastPipeline(**{name: run for name, run in self._steps if name in names})
