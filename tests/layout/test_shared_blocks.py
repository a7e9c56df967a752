"""Which rows of blocks, and which rows inside blocks, more than one rank owns."""

import random
from itertools import combinations_with_replacement, product

import pytest
import torch

from tests.support.partitions import draw_partition
from zerocast.layout import BlockGrid, CutBlocks, Extent, Owners, SharedBlocks

GRIDS = [BlockGrid(33, 48, 16, 16), BlockGrid(1, 32, 16, 16), BlockGrid(5, 7, 2, 3),
         BlockGrid(8, 16, 1, 16), BlockGrid(1, 1, 16, 16)]  # fmt: skip


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


@pytest.mark.parametrize("grid", GRIDS, ids=str)
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


def owners_of_blocks(grid: BlockGrid, extents: list[Extent]) -> dict[int, set[int]]:
    """By block the ranks that own elements of it."""
    owners: dict[int, set[int]] = {b: set() for b in range(grid.num_blocks)}
    for rank, extent in enumerate(extents):
        for element in range(extent.start, extent.end):
            owners[grid.block_of(element)].add(rank)
    return owners


def assert_entries(planes: list[tuple[int, BlockGrid]], extents: list[list[Extent]]) -> None:
    """That the blocks of these planes which two ranks own, by counting owners, have one entry each,
    which all of their owners know. ``extents`` are by weight and rank.
    """
    pairs = [[[e.start, e.end] for e in of_rank] for of_rank in zip(*extents, strict=True)]
    cut = CutBlocks(planes, Owners.of_extents(torch.tensor(pairs)))
    owners = [owners_of_blocks(grid, extents[weight]) for weight, grid in planes]
    expected = {(p, b) for p, of in enumerate(owners) for b in of if len(of[b]) > 1}
    entries: dict[tuple[int, int], int] = {}
    for rank in range(len(pairs)):
        known = set()
        fields = map(torch.Tensor.tolist, cut.of_rank(rank))
        for plane, block, entry in zip(*fields, strict=True):
            assert entries.setdefault((plane, block), entry) == entry
            known.add((plane, block))
        assert {(p, b) for p, b in expected if rank in owners[p][b]} <= known <= expected
    assert entries.keys() == expected
    assert sorted(entries.values()) == list(range(cut.count))


def test_every_cut_block_has_one_entry_which_all_of_its_owners_know():
    """Of 60 random partitions of weights over 1 to 9 ranks, some of them of two planes, one of them
    without elements.
    """
    rng = random.Random(0)
    all_planes = [*enumerate(GRIDS), (2, BlockGrid(5, 7, 1, 4)), (3, BlockGrid(8, 16, 8, 1)),
                  (len(GRIDS), BlockGrid(0, 4, 1, 2))]  # fmt: skip
    for _ in range(60):
        size = rng.randint(1, 9)
        planes = sorted(rng.sample(all_planes, rng.randint(1, 8)), key=lambda plane: plane[0])
        drawn = [draw_partition(grid.numel, size, rng) for grid in GRIDS]
        assert_entries(planes, [*drawn, [Extent(0, 0)] * size])


def test_entries_of_all_small_matrices():
    """Of up to 3 x 4 elements in blocks of all sizes, cut in two and in three at all places: one
    table for each matrix, of whose weights each is cut otherwise.
    """
    for rows, cols, block_h, block_w in product((1, 2, 3), (1, 3, 4), (1, 2, 3), (1, 2, 4)):
        grid = BlockGrid(rows, cols, block_h, block_w)
        cuts = combinations_with_replacement(range(grid.numel + 1), 2)
        extents = [[Extent(0, a), Extent(a, b), Extent(b, grid.numel)] for a, b in cuts]
        assert_entries([(weight, grid) for weight in range(len(extents))], extents)
