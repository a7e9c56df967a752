"""MXFP4 bytes worked out by hand, of each rounding of scales."""

import pytest
import torch

import zerocast
from zerocast.recipes import MXFP4BlockScaling

pytestmark = pytest.mark.usefixtures("backend")

UP, FLOOR, EVEN = (MXFP4BlockScaling(scale_rounding=name) for name in ("up", "floor", "even"))


def block(values: list[float], recipe: MXFP4BlockScaling = UP) -> tuple[int, list[int]]:
    """The stored scale and the bytes of one block, filled up with zeros; nominally FP32."""
    x = torch.tensor([values + [0.0] * (32 - len(values))])
    weight = zerocast.quantize(x, recipe, dtype=torch.float32)
    return int(weight.rowwise_scale_inv[0, 0]), weight.rowwise_data[0, : len(values) // 2].tolist()


def scale(amax: float, recipe: MXFP4BlockScaling) -> int:
    """The stored scale of a block with this amax."""
    return block([amax, 0.0], recipe)[0]


def next_to(x: float, end: float) -> float:
    """The float32 beside ``x``, towards ``end``."""
    return torch.tensor(x).nextafter(torch.tensor(end)).item()


def test_an_amax_of_6_has_scale_one():
    """By every rounding: 6 = 1.5 * 2^2. The even element is the low nibble; ties go to even: 2.5 to
    2 (4), 5 to 4 (6), and signs of zeros stay.
    """
    for recipe in (UP, FLOOR, EVEN):
        assert block([6.0, -0.5, 2.5, 5.0, 0.0, -0.0], recipe) == (127, [0x97, 0x64, 0x80])


def test_what_each_rounding_does_between_two_powers():
    """Up goes up just above 6; even from 7 on, which would round past 6; floor at 8 only."""
    amaxes = [4.0, 6.0, next_to(6.0, 8), next_to(7.0, 0), 7.0, next_to(8.0, 0), 8.0]
    assert [scale(amax, UP) for amax in amaxes] == [127, 127, 128, 128, 128, 128, 128]
    assert [scale(amax, EVEN) for amax in amaxes] == [127, 127, 127, 127, 128, 128, 128]
    assert [scale(amax, FLOOR) for amax in amaxes] == [127, 127, 127, 127, 127, 127, 128]


def test_what_floor_does_not_reach_saturates():
    """7.5 under 1 becomes 6; under 2, by the other roundings, it is 3.75, which becomes 4."""
    assert block([7.5, -7.5], FLOOR) == (127, [0xF7])
    assert block([7.5, -7.5], UP) == block([7.5, -7.5], EVEN) == (128, [0xE6])


def test_the_ends_of_the_range():
    """Amax 0 has code 0, as have all that would have less; FLT_MAX is far from the largest scale:
    up and even make it 2^126, floor 2^125.
    """
    for recipe in (UP, FLOOR, EVEN):
        assert [scale(amax, recipe) for amax in (0.0, 2.0**-149, 2.0**-126, 2.0**-125)] == [0] * 4
        assert scale(2.0**-124, recipe) == 1
        assert block([2.0**-127, 2.0**-128], recipe) == (0, [0x12])
    largest = 3.4028234663852886e38
    assert [scale(largest, recipe) for recipe in (UP, EVEN, FLOOR)] == [253, 253, 252]


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("recipe", [UP, FLOOR, EVEN], ids=str)
def test_what_is_not_finite_is_loud(recipe, bad):
    """The scales of its row's block and of its column's are NaN, 0xFF; all codes there are 7."""
    x = torch.zeros(64, 64)
    x[33, 3] = bad
    weight = zerocast.quantize(x, recipe)
    rowwise, columnwise = weight.rowwise_data, weight.columnwise_data
    assert rowwise.nonzero().tolist() == [[33, j] for j in range(16)]
    assert rowwise[33, :16].eq(0x77).all()
    assert columnwise.nonzero().tolist() == [[i, 1] for i in range(32, 64)]
    assert columnwise[32:, 1].eq(0x70).all()
    assert weight.rowwise_scale_inv.eq(0xFF).nonzero().tolist() == [[33, 0]]
    assert weight.columnwise_scale_inv.eq(0xFF).nonzero().tolist() == [[1, 3]]
    assert weight.dequantize(torch.float32).isnan().sum() == 32
