"""BlockGrid: the blocks of elements that share a scale. ScaleLayout: the places of those scales.

Every scaling scheme is a grid of blocks over the weight seen as a matrix [rows, cols]: FP8 per
tensor is one block, NVFP4 is 16x16, a row-wise scheme 1 x cols. Blocks at the edges may be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from zerocast.layout.extent import Extent

Index = TypeVar("Index", int, torch.Tensor)

TILE_ROWS = 32
"""The rows of the highest tile of a kernel. A kernel may update the amaxes of blocks in as many
rows around a shard, with 0 where a block has no element of the shard."""


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up, for non-negative integers."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``a``."""
    return ceil_div(a, multiple) * multiple


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """A [rows, cols] matrix cut into blocks of [block_h, block_w].

    Block ``(i, j)`` has the number ``i * blocks_w + j``; that is its place in an amax buffer. A
    matrix without rows (an empty shard of a weight) has no block, unless blocks are as high as the
    matrix, ``block_h == rows``: then it has that one. Columns likewise.
    """

    rows: int
    cols: int
    block_h: int
    block_w: int

    @property
    def numel(self) -> int:
        """The number of elements of the matrix."""
        return self.rows * self.cols

    @property
    def blocks_h(self) -> int:
        """Blocks along a column."""
        return ceil_div(self.rows, self.block_h) if self.block_h else 1

    @property
    def blocks_w(self) -> int:
        """Blocks along a row."""
        return ceil_div(self.cols, self.block_w) if self.block_w else 1

    @property
    def num_blocks(self) -> int:
        """The number of blocks, which is the length of this weight's block amaxes."""
        return self.blocks_h * self.blocks_w

    @property
    def amax_slots(self) -> int:
        """The entries of these blocks in a separate amax buffer: one each, and one of the tensor
        unless there is a single block.
        """
        return self.num_blocks + (self.num_blocks != 1)

    def block_of(self, index: Index) -> Index:
        """Return the number of the block that holds the element with flat index ``index``: an int,
        or a tensor of int64 indices.
        """
        return (
            index // self.cols // self.block_h * self.blocks_w + index % self.cols // self.block_w
        )

    def touched(self, extent: Extent) -> range:
        """Return the blocks whose amaxes the owner of ``extent`` keeps: whole rows of blocks that
        contain its rows, after these are rounded out to multiples of :data:`TILE_ROWS`.
        """
        if not extent or not self.numel:
            return range(0)
        first = extent.start // self.cols // TILE_ROWS * TILE_ROWS
        last = round_up(ceil_div(extent.end, self.cols), TILE_ROWS)
        rows = first // self.block_h, min(ceil_div(last, self.block_h), self.blocks_h)
        return range(rows[0] * self.blocks_w, rows[1] * self.blocks_w)

    def owned(self, extent: Extent) -> range:
        """Return the blocks whose first elements are in ``extent``; its owner makes their
        scales.
        """
        return range(self.blocks_before(extent.start), self.blocks_before(extent.end))

    def blocks_before(self, element: int) -> int:
        """Return the number of blocks that begin before ``element``, in a matrix that has some. The
        first elements of blocks ascend with the numbers of the blocks.
        """
        row, in_row = divmod(element, self.cols * self.block_h)
        return row * self.blocks_w + min(ceil_div(in_row, self.block_w), self.blocks_w)

    def transposed(self) -> BlockGrid:
        """Return the same blocks over the transposed matrix."""
        return BlockGrid(self.cols, self.rows, self.block_w, self.block_h)


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """A stored plane of block scales.

    Entry ``(r, c)`` is the scale of block ``(r // row_repeat, c // col_repeat)`` of ``grid``; the
    entries past the existing ones pad both dimensions to a multiple and hold ``padding``. Where
    ``transposed``, the plane is stored the other way round: the entry stands at ``(c, r)``, and the
    multiples are those of the stored dimensions.

    Attributes:
        grid: the blocks that the scales belong to.
        row_repeat: how often a block's scale is repeated downwards: ``grid.block_h`` where a GEMM
            reads one row of scales a row of codes (NVFP4), else 1. Repeats past the matrix's last
            row are padding, not scale.
        col_repeat: the same to the right: ``grid.block_w`` or 1.
        row_multiple, col_multiple: the multiples to which the stored dimensions are padded.
        padding: the value (FP32 scales) or the code (uint8 scales) of entries that belong to no
            block.
        transposed: whether the plane is stored the other way round.
    """

    grid: BlockGrid
    row_repeat: int = 1
    row_multiple: int = 1
    col_multiple: int = 1
    padding: float = 0
    col_repeat: int = 1
    transposed: bool = False

    def of_transposed(self) -> ScaleLayout:
        """Return the same stored plane, by the blocks of the transposed matrix."""
        repeats = {"row_repeat": self.col_repeat, "col_repeat": self.row_repeat}
        return replace(self, grid=self.grid.transposed(), transposed=not self.transposed, **repeats)

    @property
    def rows(self) -> int:
        """The rows that hold scales, before the plane is transposed."""
        return self.grid.rows if self.row_repeat == self.grid.block_h else self.grid.blocks_h

    @property
    def cols(self) -> int:
        """The columns that hold scales, before the plane is transposed."""
        return self.grid.cols if self.col_repeat == self.grid.block_w else self.grid.blocks_w

    @property
    def shape(self) -> tuple[int, int]:
        """The stored shape, padding included."""
        rows, cols = (self.cols, self.rows) if self.transposed else (self.rows, self.cols)
        return round_up(rows, self.row_multiple), round_up(cols, self.col_multiple)
