"""NVFP4 bytes worked out by hand, above all where other projects' dialects differ from ours.

The usual set-up is a tensor amax of 2688 = 448 * 6 in a block of its own, so that S_enc = 1. Then a
block whose amax is 6 has S_dec = E4M3(6 * fl(1/6)) = 1.0 (code 0x38) and enc = 1, so its elements
are rounded to E2M1 as they stand.
"""

import pytest
import torch

import zerocast
from zerocast.tensors import QuantizedTensor

pytestmark = pytest.mark.usefixtures("backend")

NVFP4 = zerocast.NVFP4BlockScaling()
UP, DOWN = torch.tensor(torch.inf), torch.tensor(0.0)


def beside_2688(row: list[float]) -> torch.Tensor:
    """[1, 32] FP32: a block that makes S_enc 1, then the block ``row``, filled up with zeros."""
    return torch.tensor([[2688.0] + [0.0] * 15 + row + [0.0] * (16 - len(row))])


def nibbles(weight: QuantizedTensor) -> list[list[int]]:
    """[M][K] codes, the low nibble of a byte first."""
    return [[b >> s & 15 for b in row for s in (0, 4)] for row in weight.rowwise_data.tolist()]


def second_block(x: torch.Tensor) -> tuple[int, list[int]]:
    """The stored scale and the codes of the second block of a [1, 32] master, nominally FP32."""
    weight = zerocast.quantize(x, NVFP4, dtype=torch.float32)
    assert weight.rowwise_scale_inv[0, 0] == 0x7E  # 2688 * fl(1/6) = 448.00003 -> 448
    return int(weight.rowwise_scale_inv[0, 1]), nibbles(weight)[0][16:]


def test_every_tie_goes_to_the_even_code():
    """0.25 0.75 1.25 1.75 2.5 3.5 5 give 0 1 1 2 2 4 4, codes 0 2 2 4 4 6 6; minus adds 8."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    scale, codes = second_block(beside_2688([*ties, *(-t for t in ties), 6.0, -6.0]))
    assert scale == 0x38
    assert codes == [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 7, 15]


def test_the_float32_beside_a_tie_goes_to_its_side():
    """One float32 below a tie gives codes 0 to 6 in order, one above 1 to 7."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below = second_block(beside_2688([*ties.nextafter(DOWN).tolist(), 6.0]))
    above = second_block(beside_2688([*ties.nextafter(UP).tolist(), 6.0]))
    assert below == (0x38, [0, 1, 2, 3, 4, 5, 6, 7] + [0] * 8)
    assert above == (0x38, [1, 2, 3, 4, 5, 6, 7, 7] + [0] * 8)


def test_a_zero_block_has_scale_zero_and_keeps_its_signs():
    """S_dec = 0, enc = FLT_MAX, 0 * FLT_MAX = 0 and -0 * FLT_MAX = -0, which is code 8."""
    assert second_block(beside_2688([0.0, -0.0] * 8)) == (0x00, [0, 8] * 8)


def test_a_zero_tensor():
    """An amax of 0 gives S_enc = 1, S_dec = 0, codes 0 and 8; values are zeros, signs kept."""
    weight = zerocast.quantize(torch.tensor([[0.0, -0.0] * 8]), NVFP4)
    assert weight.amax.tolist() == [0.0]
    assert weight.rowwise_scale_inv.count_nonzero() == 0
    assert nibbles(weight) == [[0, 8] * 8]
    assert weight.dequantize(torch.float32).signbit().tolist() == [[False, True] * 8]


def test_a_scale_that_underflows_saturates_its_block():
    """6 * 2^-10 * fl(1/6) = 2^-10 is half the smallest E4M3 and rounds to 0, the even code.

    Then enc = FLT_MAX: whatever is not zero becomes 6, even the smallest subnormal times 2^128 is
    2^-21 and becomes 0.
    """
    row = [6 * 2.0**-10, -(2.0**-20), 2.0**-127, 2.0**-149, -0.0]
    assert second_block(beside_2688(row)) == (0x00, [7, 15, 4, 0, 8] + [0] * 11)


def test_a_scale_just_above_the_underflow():
    """The float32 above it rounds to 2^-9, code 1: enc = 512, and 6 * 2^-10 * 512 = 3, code 5."""
    row = [torch.tensor(6 * 2.0**-10).nextafter(UP).item(), -(2.0**-10), 2.0**-11]
    assert second_block(beside_2688(row)) == (0x01, [5, 9, 0] + [0] * 13)


def test_the_association_of_the_block_scale():
    """With g = 1.5, a = 1348169 * 2^-37 is just below 3 * 2^-10 * g / 448, between codes 1 and 2.

    S_enc = 1792 and S_enc * fl(1/6) = 298.66669, rounded up by 6.8e-8 of itself. a times that lies
    3.8e-8 below 3 * 2^-10 and rounds to it, a tie, which goes to code 2. (a * S_enc) * fl(1/6),
    (a / 6) * S_enc, a * (S_enc / 6) and (a * fl(1/6)) * S_enc all stay below and give code 1.
    Then enc = 458751.97, and a * enc = 4.4999990, code 6.
    """
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 1.5, 1348169 * 2.0**-37
    weight = zerocast.quantize(x, NVFP4, dtype=torch.float32)
    assert weight.rowwise_scale_inv[0].tolist() == [0x7E, 0x02, 0, 0]
    assert nibbles(weight) == [[7] + [0] * 15 + [6] + [0] * 15]


def test_a_subnormal_tensor():
    """With g = 2^-127, 2688 / g overflows and S_enc = FLT_MAX, just below 2^128.

    S_dec = E4M3(2^-127 * (2^128 / 6)) = E4M3(1/3) = 0.34375, code 0x2B (exponent -2, 1.375).
    enc = 1 / (0.34375 * 2^-128) overflows to FLT_MAX. So 2^-127 becomes 2 (code 4), 2^-128 becomes
    1 (code 2), 2^-130 becomes a quarter less a bit, which is 0.
    """
    x = torch.tensor([[2.0**-127, -(2.0**-128), 2.0**-130, 2.0**-149] + [0.0] * 12])
    weight = zerocast.quantize(x, NVFP4, dtype=torch.float32)
    assert weight.amax.tolist() == [2.0**-127]
    assert weight.rowwise_scale_inv[0].tolist() == [0x2B, 0, 0, 0]
    assert nibbles(weight) == [[4, 10, 0, 0] + [0] * 12]


NOT_FINITE = [
    (0x7F800000, torch.float32, 0x7F800000),  # infinity
    (0xFF800000, torch.bfloat16, 0x7F800000),
    (0xFFC12345, torch.float32, 0x7FC00000),  # a negative NaN with a payload
    (0x7F800001, torch.bfloat16, 0x7FC00000),  # a signalling NaN
    (0x477FF000, torch.float16, 0x7F800000),  # 65520, which FP16 rounds to infinity
    (0x7F7F8000, torch.bfloat16, 0x7F800000),  # half-way from the largest BF16 to the next
]


@pytest.mark.parametrize(("bits", "dtype", "amax"), NOT_FINITE)
def test_what_is_not_finite_makes_the_whole_tensor_nan(bits, dtype, amax):
    """Every scale is 0x7F, every code 7, every value NaN, in all blocks; padding stays 0."""
    x = torch.ones(17, 32)
    x.view(torch.int32)[16, 31] = bits if bits < 1 << 31 else bits - (1 << 32)
    weight = zerocast.quantize(x, NVFP4, dtype=dtype)
    assert weight.amax.view(torch.int32).tolist() == [amax]
    assert weight.rowwise_data.unique().tolist() == [0x77]
    assert weight.rowwise_scale_inv[:17, :2].unique().tolist() == [0x7F]
    assert weight.rowwise_scale_inv.count_nonzero() == 17 * 2
    assert weight.columnwise_scale_inv[:32, :2].unique().tolist() == [0x7F]
    assert weight.columnwise_scale_inv.count_nonzero() == 32 * 2
    assert weight.dequantize(torch.float32).isnan().all()


@pytest.mark.parametrize(
    ("bits", "dtype"), [(0x477FEFFF, torch.float16), (0x7F7F7FFF, torch.bfloat16)]
)
def test_the_largest_values_that_do_not_overflow(bits, dtype):
    """One float32 below those, a master rounds to 65504 and to the largest BF16, and is code 7."""
    x = torch.zeros(1, 16)
    x.view(torch.int32)[0, 0] = bits
    weight = zerocast.quantize(x, NVFP4, dtype=dtype)
    assert weight.amax.tolist() == [torch.finfo(dtype).max]
    assert nibbles(weight) == [[7] + [0] * 15]


@pytest.mark.parametrize("rows", [1, 16, 17, 129])
@pytest.mark.parametrize("cols", [16, 64, 80, 96, 112])
def test_ones_in_awkward_shapes(rows, cols):
    """All ones: g = a = 1, S_dec = E4M3(2688 * fl(1/6)) = 448, 0x7E, and 1 * 6 is code 7.

    What exists is that, the rest 0: scale planes padded to multiples of 128 by 4, the scales of
    rows that do not exist, and the high nibble of the last byte of a column of odd length.
    """
    weight = zerocast.quantize(torch.ones(rows, cols), NVFP4)
    assert weight.amax.tolist() == [1.0]
    assert weight.rowwise_data.shape == (rows, cols // 2)
    assert weight.rowwise_data.unique().tolist() == [0x77]

    scales = torch.zeros(128 * (1 + (rows > 128)), 4 if cols <= 64 else 8, dtype=torch.uint8)
    scales[:rows, : cols // 16] = 0x7E
    assert torch.equal(weight.rowwise_scale_inv, scales)

    codes = torch.full((cols, (rows + 1) // 2), 0x77, dtype=torch.uint8)
    codes[:, -1] = 0x07 if rows % 2 else 0x77
    assert torch.equal(weight.columnwise_data, codes)

    scales = torch.zeros(128, 4 if rows <= 64 else 12, dtype=torch.uint8)
    scales[:cols, : (rows + 15) // 16] = 0x7E
    assert torch.equal(weight.columnwise_scale_inv, scales)


def test_the_columnwise_copy_is_the_transpose_of_codes_and_blocks():
    """[17, 32] with block amaxes 6, 12 over 2688, 24: S_dec 1, 2, 448, 4 at their transposed place.

    Element (0, 0) is 6, (1, 0) is -3: codes 7 and 0xD, so column 0 starts with the byte 0xD7.
    """
    x = torch.zeros(17, 32)
    x[0, 0], x[1, 0], x[3, 16], x[16, 0], x[16, 31] = 6.0, -3.0, 12.0, 2688.0, 24.0
    weight = zerocast.quantize(x, NVFP4)
    one, two, four, most = 0x38, 0x40, 0x48, 0x7E
    assert weight.rowwise_scale_inv[:17, :2].tolist() == [[one, two]] * 16 + [[most, four]]
    assert weight.columnwise_scale_inv[:32, :2].tolist() == [[one, most]] * 16 + [[two, four]] * 16
    assert weight.columnwise_data[0].tolist() == [0xD7] + [0] * 7 + [0x07]
    assert weight.columnwise_data[31].tolist() == [0] * 8 + [0x07]
