"""MXFP8: FP8 codes under one power of two, an E8M0 code, for 32 elements.

Rowwise blocks are 1x32 and columnwise ones 32x1. Neither copy is a transpose of the other: each is
quantized from the master. Blocks of 32x32 are the option under which one copy of the codes serves
both directions. The numerics is :class:`zerocast.numerics.MXNumerics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerocast.layout import Block, BlockGrid, ScaleLayout, Source
from zerocast.numerics import MXNumerics
from zerocast.recipes.format import Format, replace_fields
from zerocast.recipes.recipe import Recipe, fixed

BLOCK = 32
"""Elements that share a scale, along the dimension that a GEMM sums over."""

# The block-scaled GEMMs of cuBLAS read scales in tiles of 128 rows (or columns, of the columnwise
# plane) by 4 blocks, so the stored planes are whole tiles.
TILE, TILE_BLOCKS = 128, 4


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8 weights [M, K], or stacks of these, with K a multiple of 32; M is free.

    Stored are ``rowwise_data`` uint8 [M, K], ``rowwise_scale_inv`` (E8M0 codes) uint8 [M padded to
    128, K / 32 padded to 4], ``columnwise_data`` uint8 [M, K] and ``columnwise_scale_inv`` uint8
    [ceil(M / 32) padded to 4, K padded to 128]. Padding is 0.

    Attributes:
        fp8_format: a :class:`Format` or its name.
        enable_2d_quantization: weights in blocks of 32x32, whose rowwise codes are the columnwise
            ones, too: ``columnwise_data`` is not stored. Activations and gradients keep blocks of
            one dimension.
        margin, per_matrix: must stay 0, and True.
    """

    scheme = "mxfp8"

    fp8_format: Format | str = Format.E4M3
    enable_2d_quantization: bool = False
    per_matrix: bool = fixed(True, "a block lies in one matrix")
    margin: int = fixed(0, "a scale of a power of two has no margin")

    def __post_init__(self) -> None:
        super().__post_init__()
        replace_fields(self, fp8_format=Format.of(self.fp8_format))

    @property
    def numerics(self) -> MXNumerics:
        return MXNumerics(Format.of(self.fp8_format).forward)

    def of_activations(self, *, gradients: bool) -> dict[str, Any]:
        fmt = Format.of(self.fp8_format)
        fmt = fmt.of_backward if gradients else fmt
        return {"fp8_format": fmt, "enable_2d_quantization": False}

    def check_shape(self, shape: Sequence[int]) -> None:
        self._check_matrix(shape, BLOCK, "a row is whole blocks")

    @property
    def block(self) -> Block:
        return BLOCK if self.enable_2d_quantization else 1, BLOCK

    @property
    def columnwise_source(self) -> Source:
        return Source.SHARED if self.enable_2d_quantization else Source.MASTER

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
