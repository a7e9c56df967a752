"""Blocks against a count of their elements; scale planes against a list of what they hold."""

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocast.layout import BlockGrid, Extent, ScaleLayout, ceil_div, round_up

PROPERTY = settings(derandomize=True, database=None, deadline=None)

SMALL = [BlockGrid(*dims) for dims in product((1, 2, 3, 5), (1, 2, 4, 7), (1, 2, 3, 6), (1, 3, 4))]


def block_by_position(grid: BlockGrid, row: int, col: int) -> int:
    """Which block, counted row by row, holds element (row, col)."""
    return (row // grid.block_h) * grid.blocks_w + col // grid.block_w


def test_kept_blocks_follow_the_shard():
    """Of [1000, 64] in 16x16 blocks elements of rows 40 to 69 keep those of rows 32 to 95; nothing
    keeps none.
    """
    grid = BlockGrid(1000, 64, 16, 16)
    assert grid.touched(Extent(40 * 64 + 5, 69 * 64 + 1)) == range(2 * 4, 6 * 4)
    assert grid.touched(Extent(990 * 64, 1000 * 64)) == range(60 * 4, 63 * 4)
    for nothing in (Extent(0, 0), Extent(700, 700)):
        assert grid.touched(nothing) == range(0)
        assert BlockGrid(0, 64, 16, 16).touched(nothing) == range(0)
        assert BlockGrid(5, 0, 16, 16).touched(nothing) == range(0)


def test_a_matrix_without_elements_has_the_blocks_that_are_as_high_or_wide():
    """One along a side whose blocks are the side, of no rows or columns; else none."""
    sides = {(0, 16): 0, (0, 0): 1, (5, 16): 1, (5, 2): 3}
    for (rows, block_h), (cols, block_w) in product(sides, sides):
        grid = BlockGrid(rows, cols, block_h, block_w)
        counts = sides[rows, block_h], sides[cols, block_w]
        assert (grid.blocks_h, grid.blocks_w) == counts, grid
        assert grid.num_blocks == counts[0] * counts[1], grid


@PROPERTY
@given(st.integers(0, 2**64), st.integers(1, 2**33))
def test_ceil_div_and_round_up_are_exact(a, multiple):
    """The smallest q with q * multiple >= a, in integers of any size."""
    q = ceil_div(a, multiple)
    assert q * multiple >= a > (q - 1) * multiple
    assert round_up(a, multiple) == q * multiple


def test_every_element_of_every_small_grid_is_in_its_block():
    """``block_of`` a flat index is the block of its row and column, all blocks are used."""
    for grid in SMALL:
        found = Counter()
        for row, col in product(range(grid.rows), range(grid.cols)):
            block = grid.block_of(row * grid.cols + col)
            assert block == block_by_position(grid, row, col), f"({row}, {col}) of {grid}"
            found[block] += 1
        assert sorted(found) == list(range(grid.num_blocks)), grid
        assert sum(found.values()) == grid.numel, grid


def test_block_of_serves_a_tensor_of_indices():
    """The same numbers, for all elements at once, in int64."""
    for grid in SMALL:
        blocks = grid.block_of(torch.arange(grid.numel))
        assert blocks.dtype == torch.int64
        assert blocks.tolist() == [grid.block_of(i) for i in range(grid.numel)], grid


@PROPERTY
@given(
    st.integers(1, 2**40), st.integers(1, 2**20),
    st.integers(1, 300), st.integers(1, 300), st.data(),
)  # fmt: skip
def test_block_of_in_64_bits(rows, cols, block_h, block_w, data):
    """Matrices of up to 2^60 elements: a Python integer and an int64 tensor agree exactly."""
    grid = BlockGrid(rows, cols, block_h, block_w)
    row, col = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    expected = block_by_position(grid, row, col)
    index = row * cols + col
    assert grid.block_of(index) == expected < grid.num_blocks
    assert grid.block_of(torch.tensor(index)).item() == expected


def test_the_transposed_grid_has_the_transposed_blocks():
    """Element (r, c) in block (i, j) is element (c, r) in block (j, i); twice is the same grid."""
    for grid in SMALL:
        other = grid.transposed()
        assert other.transposed() == grid
        for row, col in product(range(grid.rows), range(grid.cols)):
            i, j = divmod(grid.block_of(row * grid.cols + col), grid.blocks_w)
            assert divmod(other.block_of(col * grid.rows + row), other.blocks_w) == (j, i)


def test_one_block_needs_one_amax_and_many_need_one_more():
    """The tensor's own amax has a slot of its own unless the one block is the tensor."""
    for grid in SMALL:
        assert grid.amax_slots == (1 if grid.num_blocks == 1 else grid.num_blocks + 1)


@pytest.mark.parametrize(
    ("layout", "rows_cols", "shape"),
    [
        (ScaleLayout(BlockGrid(17, 80, 16, 16), 16, 128, 4), (17, 5), (128, 8)),
        (ScaleLayout(BlockGrid(80, 17, 16, 16), 16, 128, 4), (80, 2), (128, 4)),
        (ScaleLayout(BlockGrid(129, 1024, 16, 16), 16, 128, 4), (129, 64), (256, 64)),
        (ScaleLayout(BlockGrid(7, 9, 7, 9)), (1, 1), (1, 1)),
        (ScaleLayout(BlockGrid(1, 9, 1, 9)), (1, 1), (1, 1)),
        (ScaleLayout(BlockGrid(300, 300, 128, 128), 1, 1, 4, 1.0), (3, 3), (3, 4)),
        (ScaleLayout(BlockGrid(5, 33, 1, 32), 1, 128, 4), (5, 2), (128, 4)),
        # MXFP8: columnwise 32x1, and 32x32 in both planes.
        (ScaleLayout(BlockGrid(70, 32, 32, 1), 1, 4, 128), (3, 32), (4, 128)),
        (ScaleLayout(BlockGrid(70, 160, 32, 32), 32, 128, 4), (70, 5), (128, 8)),
        (ScaleLayout(BlockGrid(70, 160, 32, 32), 1, 4, 128, col_repeat=32), (3, 160), (4, 256)),
        # FP8 in 1x128: [5, 3] scales, stored [3, 5 padded to 4].
        (ScaleLayout(BlockGrid(5, 300, 1, 128), 1, 1, 4, 1.0, transposed=True), (5, 3), (3, 8)),
        # One scale a row, one a column.
        (ScaleLayout(BlockGrid(6, 9, 1, 9)), (6, 1), (6, 1)),
        (ScaleLayout(BlockGrid(6, 9, 6, 1)), (1, 9), (1, 9)),
    ],
    ids=str,
)
def test_the_shape_of_a_scale_plane(layout, rows_cols, shape):
    """A scale is repeated on the rows (NVFP4) or columns that exist, or has one of its own; then
    the plane is turned, where it is, and padded. By the transposed blocks it is stored alike.
    """
    assert (layout.rows, layout.cols) == rows_cols
    assert layout.shape == shape
    other = layout.of_transposed()
    assert other.of_transposed() == layout
    assert (other.rows, other.cols, other.shape) == (*rows_cols[::-1], shape)
