"""FP8 with one scale a tensor, made from the amax of the data being cast ("current scaling").

The whole weight is one block, whatever its shape. The numerics is
:class:`zerocast.numerics.Float8Numerics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerocast.layout import FULL, Block, Source
from zerocast.recipes.float8 import Float8Recipe
from zerocast.recipes.format import QParams
from zerocast.recipes.recipe import require_elements


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Float8Recipe):
    """FP8 weights under one FP32 scale a tensor; N-D weights are served.

    Stored are ``rowwise_data`` uint8 in the weight's shape, ``rowwise_scale_inv`` FP32 [1], and as
    a derived copy ``columnwise_data`` uint8 [K, product of the leading dimensions], whose scale is
    the same one.

    Attributes:
        use_power_2_scales: powers of two for every tensor, whatever its :class:`QParams` say.
    """

    use_power_2_scales: bool = False

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return True

    def power_2_scale(self, params: QParams) -> bool:
        return self.use_power_2_scales or params.power_2_scale

    @property
    def scales_tensor(self) -> bool:
        return True

    def check_shape(self, shape: Sequence[int]) -> None:
        require_elements("Float8CurrentScaling", shape, "one dimension or more")

    @property
    def block(self) -> Block:
        return FULL, FULL

    @property
    def columnwise_source(self) -> Source:
        return Source.ROWWISE
