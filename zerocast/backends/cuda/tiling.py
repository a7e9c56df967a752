"""Which tiles a launch visits: integers only, made once, on the host.

A kernel takes one tile a thread block and divides nothing to find it. Amax and cast follow the
shard: a tile in which this rank owns no element is not in the table. The constants and the fields
of a row are those of ``cuda_src/cuda/tiles.h`` and ``planes.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zerocast.layout import BlockGrid, Extent, ceil_div

TILE_ROWS, TILE_COLS = 16, 512
LONG_TILE_COLS = 8192
"""Of a tile of one row."""

ROW_BLOCK_TILE_ROWS, ROW_BLOCK_TILE_COLS = 32, 256
"""Of a tile of blocks of one row."""

MAX_TILE_BLOCKS = 512

SCALES, COPIED_SCALES = (4, 256), (8, 128)
"""A tile of a stored plane that compute_scale makes, or transpose: rows of blocks, stored
columns."""

SQUARE = 128, 128
"""A tile that is transposed: bytes along both sides."""

CHOSEN = 1, 8
"""A tile of select: rows of blocks, and blocks side by side."""

Cut = tuple[Any, ...]
"""How one weight is cut: a function of this module, and its arguments but the weight's number."""


def tiled_grid(grid: BlockGrid) -> BlockGrid:
    """The matrix as tiles see it: a weight of one block is one row, whatever its shape."""
    return BlockGrid(1, grid.numel, 1, grid.numel) if grid.num_blocks == 1 else grid


def shard_tiles(weight: int, grid: BlockGrid, extent: Extent) -> torch.Tensor:
    """The tiles of ``grid`` that hold elements of ``extent``, which is not empty.

    Rows of the table go along the matrix's rows, so neighbouring thread blocks read neighbouring
    memory.

    Args:
        weight: the shard's row in the table of shards.
        grid: as :func:`tiled_grid` gives it.

    Returns:
        int64 [tiles, 4], the fields of ``Tile``.
    """
    several = grid.block_h >= TILE_ROWS
    height = TILE_ROWS if several else 1
    width = TILE_COLS if several else min(LONG_TILE_COLS, MAX_TILE_BLOCKS * grid.block_w)
    width = min(width, LONG_TILE_COLS) // 4 * 4
    block_row, row, row_end, col, cols = _met_tiles(
        grid.rows, grid.cols, grid.block_h, height, width, extent
    )
    block_col = col // grid.block_w
    offset = col - block_col * grid.block_w
    blocks = (offset + cols - 1) // grid.block_w + 1
    offset = torch.where(blocks == 1, 0, offset)
    fields = [
        weight + ((row_end - row) << 32) + (cols << 48),
        blocks + (offset << 32),
        row * grid.cols + col,
        block_row * grid.blocks_w + block_col,
    ]
    return torch.stack(fields, dim=1)


def has_row_blocks(grid: BlockGrid, columnwise: BlockGrid | None) -> bool:
    """Whether tiles of blocks of one row serve a weight: a tile cuts none of them but a single one,
    and in the second plane blocks have one column.
    """
    width = grid.block_w
    whole = width in (16, 32, 64, 128) or width % ROW_BLOCK_TILE_COLS == 0 or width >= grid.cols
    second = columnwise is None or columnwise.block_w == 1
    return grid.block_h == 1 and whole and second and max(grid.rows, grid.cols) < 2**31


def row_block_tiles(weight: int, grid: BlockGrid, block_h: int, extent: Extent) -> torch.Tensor:
    """The 32x256 tiles of ``grid``, which :func:`has_row_blocks`, that hold elements of ``extent``.

    Args:
        weight: the shard's row in the table of shards.
        grid: the blocks of the rowwise plane.
        block_h: the rows of a block of the second plane; of the matrix where there is none.

    Returns:
        int64 [tiles, 4], the fields of ``Tile32x256``.
    """
    block_row, row, row_end, col, cols = _met_tiles(
        grid.rows, grid.cols, block_h, ROW_BLOCK_TILE_ROWS, ROW_BLOCK_TILE_COLS, extent
    )
    block_col = col // grid.block_w
    blocks = (col + cols - 1) // grid.block_w - block_col + 1
    fields = [
        weight + ((row_end - row) << 32) + (cols << 48),
        row + (col << 32),
        blocks + (block_row << 32),
        row * grid.blocks_w + block_col,
    ]
    return torch.stack(fields, dim=1)


def plane_tiles(
    weight: int, plane: int, shape: tuple[int, int], tile: tuple[int, int]
) -> torch.Tensor:
    """The tiles of a plane, or matrix, of ``shape``; int64 [tiles, 4], the fields of ``PlaneTile``.

    What rows and columns count is up to ``tile``, one of those above.
    """
    (rows, cols), (height, width) = shape, tile
    down, across = ceil_div(rows, height), ceil_div(cols, width)
    row = torch.arange(down, dtype=torch.int64, device="cpu").repeat_interleave(across) * height
    col = torch.arange(across, dtype=torch.int64, device="cpu").repeat(down) * width
    first = torch.full_like(row, weight + (plane << 32))
    return torch.stack([first, row, (row + height).clamp(max=rows), col], dim=1)


def tiles_of(cuts: Sequence[Sequence[Cut]]) -> torch.Tensor:
    """The tiles of all weights, of each in the order of its cuts; int64 [tiles, 4]."""
    tiles = [cut(i, *arguments) for i, weight in enumerate(cuts) for cut, *arguments in weight]
    return torch.cat([torch.empty(0, 4, dtype=torch.int64, device="cpu"), *tiles])


def _met_tiles(
    rows: int, cols: int, block_h: int, height: int, width: int, extent: Extent
) -> tuple[torch.Tensor, ...]:
    """The tiles of ``height`` x ``width`` elements that hold some of ``extent``: of each its row of
    blocks, its first row and the one past its last, its first column and its columns.

    Groups of rows lie in one row of blocks, ``block_h`` high, each.
    """
    across = ceil_div(cols, width)
    per_block = ceil_div(block_h, height)  # groups of a row of blocks, numbered on from one to next

    def group_of(row: int) -> int:
        return row // block_h * per_block + row % block_h // height

    first_row, first_col = divmod(extent.start, cols)
    last_row, last_col = divmod(extent.end - 1, cols)
    first, last = group_of(first_row), group_of(last_row)
    group = torch.arange(first, last + 1, dtype=torch.int64, device="cpu").repeat_interleave(across)
    column = torch.arange(across, dtype=torch.int64, device="cpu").repeat(last + 1 - first)

    block_row = group // per_block
    row = block_row * block_h + group % per_block * height
    row_end = torch.minimum(row + height, ((block_row + 1) * block_h).clamp(max=rows))
    col = column * width
    tile_cols = (cols - col).clamp(max=width)
    # Of the tile's rows those that the shard reaches, and of a cut row the columns: it is enough
    # that one row of the tile is met.
    top = row.clamp(min=first_row)
    bottom = (row_end - 1).clamp(max=last_row)
    starts_late = (top == first_row) & (first_col >= col + tile_cols)
    ends_early = (bottom == last_row) & (last_col < col)
    met = top + starts_late.long() <= bottom - ends_early.long()
    return tuple(field[met] for field in (block_row, row, row_end, col, tile_cols))
