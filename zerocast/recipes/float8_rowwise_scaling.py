"""FP8 with one scale a row; and, quantized independently, one a column.

A row of a weight is one output feature, so an outlier costs precision in its own row only. The
transposed GEMM reduces over the rows and needs scales along the columns, which no row's scale can
give: its codes are cast from the master a second time. The law is
:class:`zerocast.ops.Float8Law`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.layout import BlockGrid, ScaleLayout
from zerocast.recipes.float8 import Float8Recipe
from zerocast.recipes.format import Format
from zerocast.recipes.recipe import BufferSpec, require_elements


@dataclass(frozen=True, kw_only=True)
class Float8RowwiseScaling(Float8Recipe):
    """FP8 weights under one FP32 scale a row; N-D weights are served, their rows being those of the
    matrix [M, K] with M the product of the leading dimensions.

    Stored are ``rowwise_data`` uint8 in the weight's shape, ``rowwise_scale_inv`` FP32 [M],
    ``columnwise_data`` uint8 in the weight's shape, too, and ``columnwise_scale_inv`` FP32 [K].
    """

    fp8_format: Format | str = Format.E4M3

    def check_shape(self, shape: Sequence[int]) -> None:
        require_elements("Float8RowwiseScaling", shape, "one dimension or more")

    def grid(self, shape: Sequence[int]) -> BlockGrid:
        rows, cols = self._matrix(shape)
        return BlockGrid(rows, cols, 1, cols)

    def columnwise_grid(self, shape: Sequence[int]) -> BlockGrid:
        rows, cols = self._matrix(shape)
        return BlockGrid(rows, cols, rows, 1)

    def scale_layout(self, shape: Sequence[int]) -> ScaleLayout:
        return ScaleLayout(self.grid(shape))

    def columnwise_scale_layout(self, shape: Sequence[int]) -> ScaleLayout:
        return ScaleLayout(self.columnwise_grid(shape))

    def buffers(self, shape: Sequence[int], *, columnwise: bool) -> dict[str, BufferSpec]:
        rows, cols = self._matrix(shape)
        specs = {
            "rowwise_data": BufferSpec(tuple(shape), torch.uint8),
            "rowwise_scale_inv": BufferSpec((rows,), torch.float32),
        }
        if columnwise:
            specs["columnwise_data"] = BufferSpec(tuple(shape), torch.uint8)
            specs["columnwise_scale_inv"] = BufferSpec((cols,), torch.float32)
        return specs
