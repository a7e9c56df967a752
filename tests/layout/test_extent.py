"""Extents against sets of integers."""

from itertools import combinations_with_replacement

import pytest
import torch

from zerocast.layout import NOTHING, Extent, chunk

SMALL = [Extent(a, b) for a, b in combinations_with_replacement(range(7), 2)]


def members(extent: Extent) -> set[int]:
    """The elements, one by one."""
    return set(range(extent.start, extent.end))


def test_size_and_truth_of_every_small_extent():
    """``size`` counts the elements; an extent is true where it has any."""
    for e in SMALL:
        assert e.size == len(members(e))
        assert bool(e) == (len(members(e)) > 0)


def test_shifted_counts_from_elsewhere():
    """Every element moves by the offset, also past 2^32 and back."""
    for e in SMALL:
        assert members(e.shifted(3)) == {i + 3 for i in members(e)}
        assert e.shifted(2**40).shifted(-(2**40)) == e


def test_extents_order_by_start_then_end():
    """So a sort puts the shards of a weight in the order of its elements."""
    shuffled = sorted(SMALL, key=lambda e: (e.end, e.start))
    assert sorted(shuffled) == sorted(SMALL, key=lambda e: (e.start, e.end))


def test_it_is_written_as_the_half_open_interval():
    """The form that error messages use."""
    assert str(Extent(2**32 + 5, 2**32 + 1005)) == "[4294967301, 4294968301)"


@pytest.mark.parametrize(("start", "end"), [(-1, 0), (3, 2), (-5, -2)])
def test_an_extent_that_cannot_be_is_our_mistake(start, end):
    """Negative, or ending before it starts: an assertion, because callers check user input."""
    with pytest.raises(AssertionError):
        Extent(start, end)


@pytest.mark.parametrize("size", range(1, 6))
def test_chunks_are_those_of_torch(size):
    """``torch.chunk`` leaves out ranks that have nothing; they have empty extents here."""
    for length in range(1, 12):
        pieces = [piece.tolist() for piece in torch.arange(length).chunk(size)]
        ours = [chunk(length, rank, size) for rank in range(size)]
        assert [sorted(members(e)) for e in ours if e] == pieces
        assert all(e == Extent(length, length) for e in ours[len(pieces) :])


def test_nothing_has_no_element():
    """And begins where everything does."""
    assert (NOTHING.start, NOTHING.end, NOTHING.size, bool(NOTHING)) == (0, 0, 0, False)
