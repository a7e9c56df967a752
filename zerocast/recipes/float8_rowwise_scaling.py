"""FP8 with one scale a row; and, quantized independently, one a column.

A row of a weight is one output feature, so an outlier costs precision in its own row only. The
transposed GEMM reduces over the rows and needs scales along the columns, which no row's scale can
give: its codes are cast from the master a second time. The numerics is
:class:`zerocast.numerics.Float8Numerics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerocast.layout import FULL, Block, Source
from zerocast.recipes.float8 import Float8Recipe
from zerocast.recipes.format import Format
from zerocast.recipes.recipe import require_elements


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

    @property
    def block(self) -> Block:
        return 1, FULL

    @property
    def columnwise_source(self) -> Source:
        return Source.MASTER

    @property
    def columnwise_block(self) -> Block:
        return FULL, 1
