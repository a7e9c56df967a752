"""StagedCast: the codes of a plan, written stage by stage, so that those of one stage travel while
the next are cast.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerocast.cast.plan import CastPlan
from zerocast.tensors.untraced import untraced


class StagedCast:
    """Takes the place of the last step of :meth:`CastPlan.cast`, "partial_cast".

    What ranks exchange before it stays one collective for all weights, and the bytes are the same.

    Args:
        plan: the plan, which this rank alone changes.
        stages: the places of the weights of each stage, all weights once.

    Attributes:
        plan: as given.
    """

    def __init__(self, plan: CastPlan, stages: Sequence[Sequence[int]]) -> None:
        self.plan, self._last = plan, len(stages) - 1
        plan._prepared.divide(stages)

    @untraced
    def cast(self, stage: int) -> None:
        """Write this rank's codes of one stage, in order. Its weights may be gathered from then
        on.
        """
        self.plan._prepared.steps.run_stage(stage)
        if stage == self._last:
            self.plan.end_writing("cast")
