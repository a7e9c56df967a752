"""Weights end to end over ranks, against a list with one entry an element."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocast.layout import Extent, FlatLayout, check_partition

PROPERTY = settings(derandomize=True, database=None, deadline=None)

NUMELS = st.lists(st.integers(1, 400), min_size=0, max_size=6).map(tuple)
LAYOUTS = st.builds(FlatLayout, NUMELS, st.integers(1, 9), st.sampled_from([1, 2, 16, 128]))


@settings(PROPERTY, max_examples=30)
@given(LAYOUTS, st.data())
def test_an_extent_of_the_buffer_has_the_owners_of_its_elements(layout, data):
    """Ascending, each with its own; an empty extent has none, wherever it stands."""
    start = data.draw(st.integers(0, layout.numel))
    extent = Extent(start, data.draw(st.integers(start, layout.numel)))
    found = layout.owners(extent)
    assert all(owned for _, owned in found)
    assert [rank for rank, _ in found] == sorted({rank for rank, _ in found})
    owned = [(rank, e) for rank, own in found for e in range(own.start, own.end)]
    assert owned == [(e // layout.rank_numel, e) for e in range(extent.start, extent.end)]


@PROPERTY
@given(LAYOUTS)
def test_weights_lie_end_to_end(layout):
    """The first at 0, each next one where the one before ends."""
    extents = layout.weight_extents()
    assert [e.size for e in extents] == list(layout.numels)
    assert [e.start for e in extents] == [0, *(e.end for e in extents)][: len(extents)]


@PROPERTY
@given(LAYOUTS)
def test_the_slices_name_the_same_elements_as_the_shards(layout):
    """Slice k of a rank's range is shard k of the weight: same length, same place in the buffer."""
    for rank in range(layout.world_size):
        owned = layout.rank_extent(rank)
        for weight, shard, part in zip(
            layout.weight_extents(), layout.shards(rank), layout.shard_slices(rank), strict=True
        ):
            assert part.stop - part.start == shard.size
            if shard:
                assert owned.start + part.start == weight.start + shard.start
                assert owned.start + part.stop <= owned.end


@PROPERTY
@given(LAYOUTS)
def test_ranges_are_equal_aligned_and_no_longer_than_needed(layout):
    """One length for every rank, a multiple of the alignment, less than one alignment too long."""
    assert layout.rank_numel % layout.alignment == 0
    needed = -(-sum(layout.numels) // layout.world_size)
    assert needed <= layout.rank_numel < needed + layout.alignment
    for rank in range(layout.world_size):
        assert layout.rank_extent(rank).size == layout.rank_numel


def test_more_ranks_than_elements():
    """257 ranks, 3 elements: the first rank owns them all, the others take part with nothing."""
    layout = FlatLayout((2, 1), 257)
    assert layout.shards(0) == [Extent(0, 2), Extent(0, 1)]
    assert all(layout.shards(rank) == [Extent(0, 0)] * 2 for rank in range(1, 257))


def test_a_weight_of_more_than_two_to_the_32_elements():
    """2^33 + 2 elements over 3 ranks; ranges of 2863311616, a multiple of 128."""
    layout = FlatLayout((2**33 + 2,), 3)
    assert layout.rank_numel == 2863311616
    assert layout.shards(1) == [Extent(2863311616, 5726623232)]
    assert layout.shards(2) == [Extent(5726623232, 2**33 + 2)]
    assert layout.shard_slices(2) == [slice(0, 2**33 + 2 - 5726623232)]


def test_no_weights():
    """Nothing is owned, nothing is padded."""
    assert FlatLayout((), 4).numel == 0
    assert FlatLayout((), 4).shards(3) == []


# --- check_partition ---


def test_every_small_choice_of_three_extents():
    """Over 3 elements, all 2,197 choices of three extents within 4: None exactly for partitions."""
    extents = [Extent(a, b) for a, b in combinations_with_replacement(range(5), 2)]
    for chosen in product(extents, repeat=3):
        owned = Counter(i for e in chosen for i in range(e.start, e.end))
        is_partition = owned == {0: 1, 1: 1, 2: 1}
        assert (check_partition(3, chosen) is None) == is_partition, [str(e) for e in chosen]


@pytest.mark.parametrize(
    ("extents", "problem"),
    [
        ([(0, 4), (3, 10)],
         "elements [3, 4) are owned twice: rank 0 holds [0, 4) and rank 1 holds [3, 10)"),
        ([(6, 10), (0, 7)],
         "elements [6, 7) are owned twice: rank 1 holds [0, 7) and rank 0 holds [6, 10)"),
        ([(0, 9), (2, 4), (9, 10)],
         "elements [2, 4) are owned twice: rank 0 holds [0, 9) and rank 1 holds [2, 4)"),
        ([(0, 4), (5, 10)], "elements [4, 5) are owned by no rank"),
        ([(1, 10)], "elements [0, 1) are owned by no rank"),
        ([(0, 4), (0, 0)], "elements [4, 10) are owned by no rank"),
        ([], "elements [0, 10) are owned by no rank"),
        ([(0, 4), (4, 12)], "rank 1 holds [4, 12), past the end of 10 elements"),
    ],
)  # fmt: skip
def test_the_problem_names_the_elements_and_the_ranks(extents, problem):
    """The first disagreement in the order of elements, with both sides of an overlap."""
    assert check_partition(10, [Extent(*e) for e in extents]) == problem


def test_empty_extents_stand_anywhere():
    """Inside another rank's range, past the end, repeated: they own nothing."""
    extents = [Extent(5, 5), Extent(0, 7), Extent(3, 3), Extent(7, 10), Extent(99, 99)]
    assert check_partition(10, extents) is None
    assert check_partition(0, [Extent(0, 0), Extent(4, 4)]) is None


def test_sizes_are_summed_once() -> None:
    """What ranks own is found weight by weight, so each look may not add up all sizes again."""

    class Counted(tuple[int, ...]):
        sums = 0

        def __iter__(self) -> Iterator[int]:
            Counted.sums += 1
            return super().__iter__()

    layout = FlatLayout(Counted((64,) * 9), 4)
    for weight in (Extent(64 * i, 64 * (i + 1)) for i in range(9)):
        assert sum(part.size for _, part in layout.owners(weight)) == 64
    assert Counted.sums == 1
