"""4-over-6 worked out by hand, and where the order of a sum decides.

Beside 2688 = 448 * 6 in a block of its own, S_enc is 1 (1536 = 256 * 6 under the smaller maximum).
A block whose amax is 6 then has the candidates map6 = 1.0 (code 0x38), which reaches 0 0.5 1 1.5 2
3 4 6, and map4 = 1.5 (code 0x3C), which reaches 0 0.75 1.5 2.25 3 4.5 6 and 9.
"""

import numpy as np
import pytest
import torch

import zerocast
from tests.oracles import scalar_nvfp4
from zerocast.numerics import unpack_nibbles
from zerocast.recipes import NVFP4BlockScaling

pytestmark = pytest.mark.usefixtures("backend")


def recipe(mode: str = "MAE", use_256: str = "none", flat: bool = False) -> NVFP4BlockScaling:
    """4-over-6 for weights, in 16x16 blocks or in 1x16."""
    return NVFP4BlockScaling(
        nvfp4_4over6="weights",
        nvfp4_4over6_err_mode=mode,
        nvfp4_4over6_e4m3_use_256=use_256,
        disable_2d_quantization=flat,
    )


def second_block(row: list[float], mode: str = "MAE") -> tuple[int, list[int]]:
    """The stored scale and the codes of ``row``, filled up with zeros, beside 2688."""
    x = torch.tensor([[2688.0] + [0.0] * 15 + row + [0.0] * (16 - len(row))])
    flat = zerocast.quantize(x, recipe(mode, flat=True), dtype=torch.float32)
    weight = zerocast.quantize(x, recipe(mode), dtype=torch.float32)
    for plane in ("rowwise_scale_inv", "rowwise_data"):  # equal, in a matrix of one row
        assert torch.equal(getattr(flat, plane)[:1], getattr(weight, plane)[:1])
    assert weight.rowwise_scale_inv[0, 0] == 0x7E  # base is 448, and so is its half more, capped
    codes = unpack_nibbles(weight.rowwise_data, 32)[0, 16 : 16 + len(row)].tolist()
    return int(weight.rowwise_scale_inv[0, 1]), codes


def test_a_block_that_fits_map4():
    """6 4.5 2.25 0.75 are exact under 1.5, as 4 3 1.5 0.5; under 1 they miss by 0 .5 .25 .25."""
    for mode in ("MAE", "MSE"):
        assert second_block([6.0, -4.5, 2.25, 0.75], mode) == (0x3C, [6, 13, 3, 1])


def test_a_block_that_fits_map6():
    """6 4 3 1 are exact under 1; under 1.5 the 4 becomes 4.5, and the 1 becomes 0.75."""
    for mode in ("MAE", "MSE"):
        assert second_block([6.0, -4.0, 3.0, 1.0], mode) == (0x38, [7, 14, 5, 2])


def test_equal_errors_take_map6():
    """6 3 1.5 are exact under both."""
    assert second_block([6.0, 3.0, -1.5]) == (0x38, [7, 5, 11])
    assert second_block([0.0, -0.0]) == (0x00, [0, 8])


def test_the_errors_can_disagree():
    """6, 3.75 and three times 2.25: one error of 0.75 under map4, four of 0.25 under map6.

    Sums 0.75 and 1.0: map4. Squares 0.5625 and 0.25: map6. 3.75 / 1.5 = 2.5 is a tie, which goes to
    2 (code 4); 3.75 is 4 (code 6) under map6, 2.25 is 1.5 (code 3) under map4 and 2 under map6.
    """
    row = [6.0, 3.75, 2.25, 2.25, 2.25]
    assert second_block(row, "MAE") == (0x3C, [6, 4, 3, 3, 3])
    assert second_block(row, "MSE") == (0x38, [7, 6, 4, 4, 4])


def test_under_256_the_largest_block_has_a_choice():
    """Beside g = 1536 the base of the block that holds it is 256: 384 (0x7C) is not capped.

    1536 1152 576 are 4 3 1.5 times 384. Under 448 the same block has one candidate, 448 * fl(1/1):
    2688 / 1536 = 1.75 and base = 448.
    """
    x = torch.tensor([[1536.0, 1152.0, -576.0] + [0.0] * 13])
    weight = zerocast.quantize(x, recipe(use_256="all"), dtype=torch.float32)
    assert weight.rowwise_scale_inv[0, 0] == 0x7C
    assert unpack_nibbles(weight.rowwise_data, 16)[0, :3].tolist() == [6, 5, 11]
    assert weight.dequantize(torch.float32)[0, :3].tolist() == [1536.0, 1152.0, -576.0]
    weight = zerocast.quantize(x, recipe(), dtype=torch.float32)
    assert weight.rowwise_scale_inv[0, 0] == 0x7E


def test_a_block_of_rows_decides_as_one():
    """Two rows, 6 4 3 1 and 6 4.5 2.25 0.75, with errors 0 and 1 under map6, 0.75 and 0 under map4.

    So the rows by themselves would choose differently; together map4 wins by 0.75 against 1.
    """
    x = torch.zeros(2, 32)
    x[0, 0] = 2688.0
    x[0, 16:20] = torch.tensor([6.0, 4.0, 3.0, 1.0])
    x[1, 16:20] = torch.tensor([6.0, 4.5, 2.25, 0.75])
    weight = zerocast.quantize(x, recipe(), dtype=torch.float32)
    assert weight.rowwise_scale_inv[:2, 1].tolist() == [0x3C, 0x3C]
    x[0, 20] = 1.0  # one more element that map4 misses by 0.25 makes it even: 1 against 1
    weight = zerocast.quantize(x, recipe(), dtype=torch.float32)
    assert weight.rowwise_scale_inv[:2, 1].tolist() == [0x38, 0x38]


def test_blocks_of_one_row_decide_by_themselves():
    """The rows of the test above: map6 is exact in the first, map4 in the second."""
    x = torch.zeros(2, 32)
    x[0, 0] = 2688.0
    x[0, 16:20] = torch.tensor([6.0, 4.0, 3.0, 1.0])
    x[1, 16:20] = torch.tensor([6.0, 4.5, 2.25, 0.75])
    weight = zerocast.quantize(x, recipe(flat=True), dtype=torch.float32)
    assert weight.rowwise_scale_inv[:2, 1].tolist() == [0x38, 0x3C]
    assert torch.equal(weight.dequantize(torch.float32), x)
    # The columnwise copy has them of the columns: of a matrix whose first columns are these rows.
    turned = torch.zeros(32, 16)
    turned[:, :2] = x.T
    copy = zerocast.quantize(turned, recipe(flat=True), dtype=torch.float32).columnwise_scale_inv
    assert torch.equal(copy[:2, :2], weight.rowwise_scale_inv[:2, :2])


def near_ties(mode: str, scale_max: int, pairs: int) -> torch.Tensor:
    """[16, 16 + 32 * pairs] FP32: after a block that holds the tensor's amax, pairs of blocks which
    differ in one element, by one float32, and of which one takes map4 and the other map6.

    There the two sums are as near as they come, and another order of adding would often turn them.
    """
    rng, g, amax = np.random.default_rng(scale_max), np.float32(1000), np.float32(200)
    numerics = scalar_nvfp4.FourOverSix(amax, g, scale_max, mode)
    found = [np.full((16, 16), g)]

    def gain(x: np.float32) -> float:
        """By how much map6 is better for an element."""
        return float(numerics.error(x, numerics.maps[0])) - float(
            numerics.error(x, numerics.maps[1])
        )

    def takes(value: np.float32, block: np.ndarray) -> int:
        x = {ij: block[ij] for ij in np.ndindex(16, 16)}
        return numerics.better(x | {(7, 7): value})

    while len(found) < 1 + 2 * pairs:
        block, balance = np.zeros((16, 16), np.float32), gain(amax)
        for at in np.ndindex(16, 16):  # of three draws the one that keeps the sums together
            drawn = [np.float32(x) for x in rng.uniform(-199, 199, 3)]
            block[at] = min(drawn, key=lambda x: abs(balance + gain(x)))
            balance += gain(block[at])
        block[0, 0] = amax
        low, high = np.float32(1), np.float32(199)
        if takes(low, block) == takes(high, block):
            continue
        while np.nextafter(low, high) != high:
            middle = np.float32((float(low) + float(high)) / 2)
            same = takes(middle, block) == takes(low, block)
            low, high = (middle, high) if same else (low, middle)
        for value in (low, high):
            block[7, 7] = value
            found.append(block.copy())
    return torch.from_numpy(np.concatenate(found, axis=1))


@pytest.mark.parametrize("mode", ["MAE", "MSE"])
def test_sums_that_nearly_agree(mode):
    """The choice turns between one float32 and the next, where the scalar numerics turns."""
    x = near_ties(mode.lower(), 256, 4)
    weight = zerocast.quantize(x, recipe(mode, "all"), dtype=torch.float32)
    expected = scalar_nvfp4.nvfp4(x.numpy(), "float32", 16, scale_max=256, mode=mode.lower())
    stored = weight.rowwise_scale_inv[0, 1 : x.shape[1] // 16].tolist()
    assert stored == expected.buffers["rowwise_scale_inv"][0, 1 : 1 + len(stored)].tolist()
    pairs = list(zip(stored[::2], stored[1::2], strict=True))
    assert all(a != b for a, b in pairs), pairs
