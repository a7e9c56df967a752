"""FP8 with one scale a tensor, made from the amax of the data being cast ("current scaling").

The whole weight is one block, whatever its shape. The law is :class:`zerocast.ops.Float8Law`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.errors import InputError
from zerocast.formats import E4M3, E5M2, FLT_MAX
from zerocast.layout import BlockGrid, ScaleLayout
from zerocast.ops import Float8Law
from zerocast.recipes.recipe import BufferSpec, Recipe, require_elements

_FORMATS = {f.name: f for f in (E4M3, E5M2)}


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """FP8 weights under one FP32 scale a tensor; N-D weights are served.

    Stored are ``rowwise_data`` uint8 in the weight's shape, ``rowwise_scale_inv`` FP32 [1], and as
    a derived copy ``columnwise_data`` uint8 [K, product of the leading dimensions], whose scale is
    the same one.

    Attributes:
        fp8_format: ``"e4m3"`` or ``"e5m2"``.
        power_2_scale: round the scale down to a power of two.
        amax_epsilon: a smaller amax is replaced by this one; FP32, not negative.
    """

    fp8_format: str = "e4m3"
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.fp8_format not in _FORMATS:
            raise InputError(
                f"fp8_format must be one of {sorted(_FORMATS)}, got {self.fp8_format!r}."
            )
        if not 0 <= self.amax_epsilon <= FLT_MAX:
            raise InputError(
                f"amax_epsilon must be finite in FP32 and not negative, got {self.amax_epsilon}; 0 "
                f"keeps every amax as it is."
            )

    @property
    def law(self) -> Float8Law:
        return Float8Law(_FORMATS[self.fp8_format], self.power_2_scale, self.amax_epsilon)

    def check_shape(self, shape: Sequence[int]) -> None:
        require_elements("Float8CurrentScaling", shape, "one dimension or more")

    def grid(self, shape: Sequence[int]) -> BlockGrid:
        rows, cols = self._matrix(shape)
        return BlockGrid(rows, cols, rows, cols)

    def scale_layout(self, shape: Sequence[int]) -> ScaleLayout:
        return ScaleLayout(self.grid(shape))

    def columnwise_scale_layout(self, shape: Sequence[int]) -> ScaleLayout:
        return ScaleLayout(self.grid(shape).transposed())

    def buffers(self, shape: Sequence[int], *, columnwise: bool) -> dict[str, BufferSpec]:
        specs = self._code_buffers(shape, columnwise=columnwise)
        specs["rowwise_scale_inv"] = BufferSpec((1,), torch.float32)
        return specs
