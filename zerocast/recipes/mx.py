"""MXRecipe: the base of the MX schemes, whose scales are powers of two, stored as E8M0 codes.

Rowwise blocks are 1x32 and columnwise ones 32x1. Neither copy is a transpose of the other: each is
quantized from the master. In blocks of 32x32 one scale serves both directions. The numerics is
:class:`zerocast.numerics.MXNumerics`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zerocast.layout import Block, BlockGrid, ScaleLayout
from zerocast.recipes.recipe import Recipe, fixed

BLOCK = 32
"""Elements that share a scale, along the dimension that a GEMM sums over."""

# The block-scaled GEMMs of cuBLAS read scales in tiles of 128 rows (or columns, of the columnwise
# plane) by 4 blocks, so the stored planes are whole tiles.
TILE, TILE_BLOCKS = 128, 4


@dataclass(frozen=True, kw_only=True)
class MXRecipe(Recipe):
    """Codes under one power of two for 32 elements; K is a multiple of 32, M is free.

    Attributes:
        enable_2d_quantization: weights in blocks of 32x32. Activations and gradients keep blocks of
            one dimension.
        margin, per_matrix: must stay 0, and True.
    """

    enable_2d_quantization: bool = False
    per_matrix: bool = fixed(True, "a block lies in one matrix")
    margin: int = fixed(0, "a scale of a power of two has no margin")

    def check_shape(self, shape: Sequence[int]) -> None:
        self._check_matrix(shape, BLOCK, "a row is whole blocks")

    @property
    def block(self) -> Block:
        return BLOCK if self.enable_2d_quantization else 1, BLOCK

    @property
    def columnwise_block(self) -> Block:
        return BLOCK, BLOCK if self.enable_2d_quantization else 1

    def scale_layout(self, grid: BlockGrid) -> ScaleLayout:
        return ScaleLayout(
            grid, row_repeat=grid.block_h, row_multiple=TILE, col_multiple=TILE_BLOCKS
        )

    def columnwise_scale_layout(self, grid: BlockGrid) -> ScaleLayout:
        return ScaleLayout(
            grid, col_repeat=grid.block_w, row_multiple=TILE_BLOCKS, col_multiple=TILE
        )
