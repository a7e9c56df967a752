"""Which elements of a shard one pass measures and casts: rows of blocks that it holds whole."""

import random

import pytest
import torch

from tests.support.partitions import draw_partition
from zerocast.layout import NOTHING, BlockGrid, Extent, whole_rows

GRIDS = [
    [BlockGrid(70, 96, 32, 32)], [BlockGrid(70, 96, 1, 32), BlockGrid(70, 96, 32, 1)],
    [BlockGrid(5, 7, 1, 7)], [BlockGrid(9, 8, 2, 3), BlockGrid(9, 8, 3, 2)],
    [BlockGrid(3, 4, 128, 128)],
]  # fmt: skip


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_rows_of_whole_blocks_are_whole(grids):
    """Of 100 partitions, by counting: the rows of blocks of all grids at once whose elements are
    all in the extent; no block of theirs has an element outside of it.
    """
    rng, numel, cols = random.Random(1), grids[0].numel, grids[0].cols
    height = next(h for h in range(1, 1000) if all(h % grid.block_h == 0 for grid in grids))
    for _ in range(100):
        for extent in draw_partition(numel, rng.randint(1, 5), rng):
            starts = range(0, numel, height * cols)
            own = [
                i for i in starts
                if extent and extent.start <= i and min(i + height * cols, numel) <= extent.end
            ]  # fmt: skip
            whole = whole_rows(grids, extent)
            if not own:
                assert whole == NOTHING
                continue
            assert whole == Extent(own[0], min(own[-1] + height * cols, numel))
            inside, outside = torch.arange(whole.start, whole.end), torch.arange(numel)
            outside = outside[(outside < extent.start) | (outside >= extent.end)]
            for grid in grids:
                assert not torch.isin(grid.block_of(inside), grid.block_of(outside)).any()


def test_the_whole_matrix_is_whole():
    """Its ragged last row of blocks included; an empty shard has nothing."""
    for grids in GRIDS:
        everything = Extent(0, grids[0].numel)
        assert whole_rows(grids, everything) == everything
        assert whole_rows(grids, NOTHING) == NOTHING


def test_rows_beside_columns_are_read_twice():
    """A row of 4,096 and a column of 4,096 meet in a rectangle that is the matrix."""
    rows, columns = BlockGrid(4096, 4096, 1, 4096), BlockGrid(4096, 4096, 4096, 1)
    everything = Extent(0, 4096 * 4096)
    assert whole_rows([rows], everything) == everything
    assert whole_rows([rows, columns], everything) == NOTHING
