"""swizzle puts scales where block-scaled GEMMs read them, and unswizzle takes them back."""

import pytest
import torch

from tests.support.same_bytes import assert_same_bytes
from zerocast.nn import swizzle, unswizzle


def offset(row: int, col: int, cols: int) -> int:
    """Where cuBLAS's documentation places the scale of ``row`` and ``col``, written as one sum."""
    tile = row // 128 * (cols // 4) + col // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


@pytest.mark.parametrize("shape", [(128, 4), (128, 12), (384, 4), (256, 8)])
def test_every_scale_stands_at_its_documented_offset(shape):
    """All of them, each by the formula; so the layout is a permutation, too."""
    rows, cols = shape
    plane = torch.arange(rows * cols, dtype=torch.int32).view(shape)
    swizzled = swizzle(plane)
    expected = torch.empty_like(swizzled)
    for row in range(rows):
        for col in range(cols):
            expected[offset(row, col, cols)] = plane[row, col]
    assert_same_bytes(swizzled, expected, "swizzled scales")


def test_two_offsets_that_nvidia_publishes():
    """nvmath-python's manual: of 8 scales a row, (5, 2) stands at 82 and (5, 5) at 593."""
    plane = torch.arange(128 * 8, dtype=torch.int32).view(128, 8)
    swizzled = swizzle(plane)
    assert swizzled[82] == plane[5, 2]
    assert swizzled[593] == plane[5, 5]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", [(128, 4), (256, 20), (640, 8)])
def test_unswizzle_is_the_inverse(shape, dtype):
    """Both ways round, bytes and floats, of a transposed plane, too."""
    generator = torch.Generator().manual_seed(0)
    plane = torch.randint(0, 256, shape, generator=generator).to(dtype)
    assert_same_bytes(unswizzle(swizzle(plane), shape), plane, "plane")
    flat = plane.reshape(-1)
    assert_same_bytes(swizzle(unswizzle(flat, shape)), flat, "flat scales")
    strided = plane.t().contiguous().t()
    assert_same_bytes(swizzle(strided), swizzle(plane), "swizzled from other strides")
