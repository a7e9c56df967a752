"""FP8 with one scale a row; and, quantized independently, one a column.

A row of a weight is one output feature, so an outlier costs precision in its row only. The
transposed GEMM reduces over the rows and needs a scale for each column, so its codes are cast from
the master a second time. The numerics is
:class:`zerocast.numerics.Float8Numerics`.
"""

from dataclasses import dataclass

from zerocast.layout import FULL, Source
from zerocast.recipes.float8 import Float8Recipe
from zerocast.recipes.format import Format


@dataclass(frozen=True, kw_only=True)
class Float8RowwiseScaling(Float8Recipe):
    """FP8 weights under one FP32 scale a row; N-D weights are served, their rows being those of the
    matrix [M, K] with M the product of the leading dimensions, or with ``per_matrix`` as a stack.

    Stored are ``rowwise_data`` uint8 in the weight's shape, ``rowwise_scale_inv`` FP32 [M],
    ``columnwise_data`` uint8 in the weight's shape, too, and ``columnwise_scale_inv`` FP32 [K].
    """

    scheme = "rowwise"
    block, columnwise_block = (1, FULL), (FULL, 1)
    columnwise_source = Source.MASTER

    fp8_format: Format | str = Format.E4M3
