"""Elements to bytes: which bytes a range of elements touches, and which nibble an element takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocast.numerics import (
    E2M1,
    E4M3,
    E5M2,
    byte_span,
    pack_nibbles,
    packed_columns,
    unpack_nibbles,
)

PROPERTY = settings(derandomize=True, database=None, deadline=None, max_examples=200)


def test_byte_span_of_every_small_range():
    """Every range within 40 elements has exactly the bytes that hold one of its elements."""
    for fmt, per_byte in ((E2M1, 2), (E4M3, 1), (E5M2, 1)):
        for start in range(40):
            for end in range(start, 40):
                first, last = byte_span(fmt, start, end)
                assert list(range(first, last)) == sorted(
                    {i // per_byte for i in range(start, end)}
                ), (start, end)
            byte = start // per_byte  # of no element: empty, where the next one would be
            assert byte_span(fmt, start, start) == (byte, byte)


@PROPERTY
@given(start=st.integers(0, 2**62), size=st.integers(1, 2**40))
def test_byte_span_of_large_offsets(start, size):
    """Beyond 2^32, and beyond a float64's integers: floor(start / 2) and ceil(end / 2)."""
    assert byte_span(E2M1, start, start + size) == (start >> 1, (start + size + 1) >> 1)
    assert byte_span(E4M3, start, start + size) == (start, start + size)


@pytest.mark.parametrize("columns", range(1, 18))
def test_packed_columns(columns):
    """A row starts a byte of its own; an odd row leaves its last nibble unused."""
    assert packed_columns(E2M1, columns) == (columns + 1) // 2
    assert packed_columns(E5M2, columns) == columns


def test_every_byte_unpacks_to_its_two_nibbles():
    """All 256 bytes: low nibble first, and packing gives the byte back."""
    data = torch.arange(256, dtype=torch.uint8)
    codes = unpack_nibbles(data, 512)
    assert codes[0::2].tolist() == [b & 15 for b in range(256)]
    assert codes[1::2].tolist() == [b >> 4 for b in range(256)]
    assert torch.equal(pack_nibbles(codes), data)


@pytest.mark.parametrize("shape", [(1,), (0,), (3, 1), (3, 5), (2, 3, 7), (4, 16), (5, 0)])
def test_unpack_undoes_pack_for_odd_rows(shape):
    """Rows of any length come back, with any leading dimensions; each has its own bytes."""
    codes = torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).remainder(16).reshape(shape)
    data = pack_nibbles(codes)
    assert data.shape == (*shape[:-1], packed_columns(E2M1, shape[-1]))
    assert torch.equal(unpack_nibbles(data, shape[-1]), codes)
