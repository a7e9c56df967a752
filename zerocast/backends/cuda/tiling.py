"""Lists the tiles that a launch visits, as integers, once, on the host.

A kernel takes one tile a thread block and divides nothing to find it. Amax and cast follow the
shard: a tile in which this rank owns no element is not in the table. The constants and the fields
of a row are those of ``cuda_src/cuda/tiles.h`` and ``planes.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.layout import BlockGrid, Extent, ceil_div

TILE_ROWS, TILE_COLS = 16, 512
LONG_TILE_COLS = 8192
"""The columns of a tile of one row."""

ROW_BLOCK_TILE_ROWS, ROW_BLOCK_TILE_COLS = 32, 256
"""The rows and columns of a tile of blocks of one row."""

MAX_TILE_BLOCKS = 512

MAX_COLS = 2**28
"""A thread steps over up to four rows at once, which are fewer than 2^32 bytes."""

MOST_SCALE_COLS = 256
"""The columns of a tile of a stored plane of scales: four of each of at most ``MOST_ACROSS``
threads."""

TILE_SCALES, TILE_STORED = 1 << 12, 1 << 14
"""Scales of a tile, and entries that it stores where rows repeat, at most: one row of blocks at
least. Fewer leave a thread without several loads in flight, more leave processors idle."""

SQUARE = 128, 128
"""A tile that is transposed: bytes along both sides."""

PATCH = 8, 128
"""What a warp of partial_amax_cast takes at once: rows and columns."""

PATCHES = 16
"""Patches of a tile of partial_amax_cast; twice as many where sixteen warps share a block."""

CHOSEN = 1, 8
"""A tile of select: rows of blocks, and blocks side by side."""

DIGESTED = 1, 1 << 14
"""A tile of bytes whose digest is taken: whole rows of keys, 4 KiB each."""

Cut = tuple[Any, ...]
"""A way to cut one weight, or a part of it: a function of this module, and its arguments for this
weight."""


def tiled_grid(grid: BlockGrid) -> BlockGrid:
    """Return the matrix as tiles see it: a weight of one block is one row, whatever its shape."""
    return BlockGrid(1, grid.numel, 1, grid.numel) if grid.num_blocks == 1 else grid


def side_of(block_h: int, block_w: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of such blocks."""
    if block_h >= TILE_ROWS:
        return TILE_ROWS, TILE_COLS
    return 1, min(LONG_TILE_COLS, MAX_TILE_BLOCKS * block_w) // 4 * 4


def shard_tiles(
    weights: Sequence[int], grids: Sequence[BlockGrid], extents: Sequence[Extent]
) -> torch.Tensor:
    """Return the tiles of each grid that hold elements of its extent, which is not empty.

    Rows of the table go along the matrix's rows, so neighbouring thread blocks read neighbouring
    memory.

    Args:
        weights: the shards' rows in the table of shards.
        grids: as :func:`tiled_grid` gives them.
        extents: what is visited.

    Returns:
        int64 [tiles, 4], the fields of ``Tile``.
    """
    sides = [(grid.block_h, *side_of(grid.block_h, grid.block_w)) for grid in grids]
    met = _met_tiles(weights, grids, sides, extents)
    block_col = met.col // met.block_w
    offset = met.col - block_col * met.block_w
    blocks = (offset + met.cols - 1) // met.block_w + 1
    offset = torch.where(blocks == 1, 0, offset)
    fields = [
        met.weight + (met.rows << 32) + (met.cols << 48),
        blocks + (offset << 32),
        met.row * met.matrix_cols + met.col,
        met.block_row * met.blocks_w + block_col,
    ]
    return torch.stack(fields, dim=1)


def has_row_blocks(grid: BlockGrid, columnwise: BlockGrid | None) -> bool:
    """Say whether tiles of blocks of one row fit a weight: each tile holds whole blocks, or is part
    of a single one, and in the second plane blocks have one column.
    """
    width = grid.block_w
    whole = width in (16, 32, 64, 128) or width % ROW_BLOCK_TILE_COLS == 0 or width >= grid.cols
    second = columnwise is None or columnwise.block_w == 1
    return grid.block_h == 1 and whole and second and max(grid.rows, grid.cols) < 2**31


def row_block_tiles(
    weights: Sequence[int],
    grids: Sequence[BlockGrid],
    heights: Sequence[int],
    extents: Sequence[Extent],
) -> torch.Tensor:
    """Return the 32x256 tiles of each grid, which :func:`has_row_blocks`, that hold elements of its
    extent.

    Args:
        weights: the shards' rows in the table of shards.
        grids: the blocks of the rowwise planes.
        heights: the rows of a block of each second plane; of the matrix where there is none.
        extents: what is visited.

    Returns:
        int64 [tiles, 4], the fields of ``Tile32x256``.
    """
    sides = [(block_h, ROW_BLOCK_TILE_ROWS, ROW_BLOCK_TILE_COLS) for block_h in heights]
    met = _met_tiles(weights, grids, sides, extents)
    block_col = met.col // met.block_w
    blocks = (met.col + met.cols - 1) // met.block_w - block_col + 1
    fields = [
        met.weight + (met.rows << 32) + (met.cols << 48),
        met.row + (met.col << 32),
        blocks + (met.block_row << 32),
        met.row * met.blocks_w + block_col,
    ]
    return torch.stack(fields, dim=1)


def patch_tiles(
    weights: Sequence[int], grids: Sequence[BlockGrid], extents: Sequence[Extent]
) -> torch.Tensor:
    """Return the tiles of patches of each grid that make up its extent: rows of whole blocks of
    1x32, 32x32, 1x128 or 128x128.

    Returns:
        int64 [tiles, 4], the fields of ``PatchTile``.
    """
    table, downs, acrosses = [], [], []
    for weight, grid, extent in zip(weights, grids, extents, strict=True):
        (rows, cols), side = PATCH, grid.block_w
        # Warps share blocks of several rows, and those of a second plane beside blocks of 1x32.
        shares = grid.block_h > 1 or side < cols
        warps = side // rows if shares else 4
        patches = max(PATCHES, 2 * warps)
        most = patches // warps if shares else patches  # side by side
        down = patches // min(most, 1 << (ceil_div(grid.cols, cols) - 1).bit_length())
        height, width = down * rows, patches // down * cols
        begin, end = extent.start // grid.cols, extent.end // grid.cols
        table.append((weight, grid.cols, begin, end, height, width, down, warps))
        downs.append(ceil_div(end - begin, height))
        acrosses.append(ceil_div(grid.cols, width))
    fields, group, column = _laid_out(table, [0] * len(table), downs, acrosses)
    weight_of, cols_of, begin_of, end_of, height_of, width_of, down_of, warps_of = fields
    row, col = begin_of + group * height_of, column * width_of
    columns = (torch.minimum(cols_of - col, width_of) + PATCH[1] - 1) // PATCH[1]  # of patches
    steps = (columns * down_of + warps_of - 1) // warps_of
    log2_down = down_of.double().log2().long()
    first = weight_of + (log2_down << 32) + (steps << 48)
    return torch.stack([first, row, torch.minimum(row + height_of, end_of), col], dim=1)


def plane_tiles(
    weights: Sequence[int],
    planes: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    tiles: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """Return the tiles of planes, or matrices, of these shapes; int64 [tiles, 4], the fields of
    ``PlaneTile``.

    ``tiles`` defines what rows and columns count; each is one of those above.
    """
    rows = [
        (weight + (plane << 32), *shape, *tile)
        for weight, plane, shape, tile in zip(weights, planes, shapes, tiles, strict=True)
    ]
    across = [ceil_div(cols, width) for (_, cols), (_, width) in zip(shapes, tiles, strict=True)]
    down = [ceil_div(rows, height) for (rows, _), (height, _) in zip(shapes, tiles, strict=True)]
    (first, end, _, height, width), group, column = _laid_out(rows, [0] * len(rows), down, across)
    row = group * height
    return torch.stack([first, row, torch.minimum(row + height, end), column * width], dim=1)


def scale_tile(cols: int, repeat: int) -> tuple[int, int]:
    """Return the rows of blocks and the stored columns of a tile of a plane of scales.

    The plane is stored with ``cols`` columns, and each row of blocks ``repeat`` times.
    """
    width = min(MOST_SCALE_COLS, 4 << (ceil_div(cols, 4) - 1).bit_length())
    return max(1, min(TILE_SCALES, TILE_STORED // repeat) // width), width


def digest_cut(first: int, nbytes: int) -> Cut:
    """Say how bytes are cut whose first stands at place ``first``: from the row of keys on that it
    is in.
    """
    return plane_tiles, 0, (1, first % 4096 + nbytes), DIGESTED


@dataclass(frozen=True, slots=True)
class _Met:
    """Tiles, and for each tile the weight and cut that it belongs to: int64 [tiles] each."""

    weight: torch.Tensor
    block_row: torch.Tensor  # of the first row
    row: torch.Tensor
    rows: torch.Tensor
    col: torch.Tensor
    cols: torch.Tensor
    matrix_cols: torch.Tensor
    block_w: torch.Tensor
    blocks_w: torch.Tensor


def _met_tiles(
    weights: Sequence[int],
    grids: Sequence[BlockGrid],
    sides: Sequence[tuple[int, int, int]],
    extents: Sequence[Extent],
) -> _Met:
    """Return the tiles that hold some of each weight's extent; ``sides`` are the rows of a row of
    blocks, and the rows and columns of a tile.

    Each group of rows is in one row of blocks.
    """
    table, firsts, downs, acrosses = [], [], [], []
    for weight, grid, (block_h, height, width), extent in zip(
        weights, grids, sides, extents, strict=True
    ):
        per_block = ceil_div(block_h, height)  # groups of a row of blocks, numbered on from it
        begin, end = divmod(extent.start, grid.cols), divmod(extent.end - 1, grid.cols)
        first, last = (group_of(row, block_h, height) for row in (begin[0], end[0]))
        firsts.append(first)
        downs.append(last + 1 - first)
        acrosses.append(ceil_div(grid.cols, width))
        matrix = grid.rows, grid.cols, grid.block_w, grid.blocks_w
        table.append((weight, *matrix, per_block, block_h, height, width, *begin, *end))
    fields, group, column = _laid_out(table, firsts, downs, acrosses)
    weight_of, matrix_rows, matrix_cols, block_w, blocks_w, *fields = fields
    per_block_of, block_h_of, *side, first_row, first_col, last_row, last_col = fields

    block_row = group // per_block_of
    matrix_of = matrix_rows, matrix_cols, block_h_of
    row, rows, col, cols = rectangle(block_row, group % per_block_of, column, *matrix_of, *side)
    met = is_met(row, rows, col, cols, first_row, first_col, last_row, last_col)
    found = (weight_of, block_row, row, rows, col, cols, matrix_cols, block_w, blocks_w)
    return _Met(*(field[met] for field in found))


def group_of(row: int, block_h: int, height: int) -> int:
    """Return the number of the group of rows that a row is in."""
    return row // block_h * ceil_div(block_h, height) + row % block_h // height


def rectangle(
    block_row: torch.Tensor, part: torch.Tensor, column: torch.Tensor, matrix_rows: torch.Tensor,
    matrix_cols: torch.Tensor, block_h: torch.Tensor, height: torch.Tensor, width: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the first row, the rows, the first column and the columns of a tile: of a part of a
    row of blocks.
    """
    row, col = block_row * block_h + part * height, column * width
    end = torch.minimum(row + height, torch.minimum((block_row + 1) * block_h, matrix_rows))
    return row, end - row, col, torch.minimum(matrix_cols - col, width)


def is_met(
    row: torch.Tensor, rows: torch.Tensor, col: torch.Tensor, cols: torch.Tensor,
    first_row: torch.Tensor, first_col: torch.Tensor, last_row: torch.Tensor,
    last_col: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Say whether a tile holds elements from the first place to the last one."""
    # Of the tile's rows those that the shard reaches, and of a cut row the columns: the tile is met
    # if one of its rows is.
    top = torch.maximum(row, first_row)
    bottom = torch.minimum(row + rows - 1, last_row)
    starts_late = (top == first_row) & (first_col >= col + cols)
    ends_early = (bottom == last_row) & (last_col < col)
    return top + starts_late + ends_early <= bottom


def _laid_out(
    table: Sequence[tuple[int, ...]],
    firsts: Sequence[int],
    downs: Sequence[int],
    acrosses: Sequence[int],
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Lay out rectangles of tiles, one a row of ``table``, row by row. Return of each tile the
    fields of its row of the table, the group of rows and the column.

    Args:
        table: the fields of each rectangle.
        firsts: the number of its first group of rows.
        downs, acrosses: the numbers of its groups and columns.
    """
    down, across = (
        torch.tensor(each, dtype=torch.int64, device="cpu") for each in (downs, acrosses)
    )
    of, within = numbered(down * across)
    fields = torch.tensor(table, dtype=torch.int64, device="cpu").t().contiguous()
    first = torch.tensor(firsts, dtype=torch.int64, device="cpu")[of]
    return [field[of] for field in fields], first + within // across[of], within % across[of]


def numbered(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number so many things of each kind, kind by kind: return the kind of each, and its number in
    the kind.
    """
    kind = torch.repeat_interleave(counts)
    within = torch.arange(len(kind), dtype=torch.int64, device="cpu")
    return kind, within - (counts.cumsum(0) - counts)[kind]
