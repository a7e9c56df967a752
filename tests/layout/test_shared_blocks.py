"""Which rows of blocks, and which rows inside blocks, more than one rank owns."""

import random

import pytest

from tests.support.partitions import draw_partition
from zerocast.layout import BlockGrid, Extent, SharedBlocks


def by_definition(grid: BlockGrid, extents: list[Extent]) -> SharedBlocks:
    """Element by element: whatever has elements of two ranks is cut."""
    owner = {i: rank for rank, e in enumerate(extents) for i in range(e.start, e.end)}
    rows: dict[int, set[int]] = {}
    segments: dict[int, set[int]] = {}
    for i, rank in owner.items():
        row, col = divmod(i, grid.cols)
        rows.setdefault(row // grid.block_h, set()).add(rank)
        segments.setdefault(i - col % grid.block_w, set()).add(rank)
    return SharedBlocks(
        tuple(sorted(row for row, ranks in rows.items() if len(ranks) > 1)),
        tuple(sorted(start for start, ranks in segments.items() if len(ranks) > 1)),
    )


@pytest.mark.parametrize(
    "grid",
    [BlockGrid(33, 48, 16, 16), BlockGrid(1, 32, 16, 16), BlockGrid(5, 7, 2, 3),
     BlockGrid(8, 16, 1, 16), BlockGrid(1, 1, 16, 16)],
    ids=str,
)  # fmt: skip
def test_what_two_ranks_own_is_cut(grid):
    """Of 200 random partitions over 1 to 9 ranks, by counting owners."""
    rng = random.Random(grid.numel)
    for _ in range(200):
        extents = draw_partition(grid.numel, rng.randint(1, 9), rng)
        assert SharedBlocks.of(grid, extents) == by_definition(grid, extents), extents


def test_one_rank_cuts_nothing():
    """Nor do empty extents, wherever they stand."""
    grid = BlockGrid(33, 48, 16, 16)
    extents = [Extent(7, 7), Extent(0, grid.numel), Extent(100, 100)]
    assert SharedBlocks.of(grid, extents) == SharedBlocks() == SharedBlocks((), ())


def test_boundaries_between_rows_of_blocks_cut_nothing():
    """16 rows of 48 elements are whole blocks; one row more cuts a row of blocks, no segment."""
    grid = BlockGrid(33, 48, 16, 16)
    assert SharedBlocks.of(grid, [Extent(0, 768), Extent(768, 1584)]) == SharedBlocks()
    assert SharedBlocks.of(grid, [Extent(0, 816), Extent(816, 1584)]) == SharedBlocks((1,), ())
    assert SharedBlocks.of(grid, [Extent(0, 817), Extent(817, 1584)]) == SharedBlocks((1,), (816,))
