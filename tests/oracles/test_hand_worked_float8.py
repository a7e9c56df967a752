"""FP8 bytes under one scale, worked out by hand. E4M3 where nothing else is said: largest 448."""

import pytest
import torch

import zerocast
from zerocast.recipes import QParams

pytestmark = pytest.mark.usefixtures("backend")

E4M3 = zerocast.Float8CurrentScaling()
E5M2 = zerocast.Float8CurrentScaling(fp8_format="e5m2")
POWER_2 = zerocast.Float8CurrentScaling(use_power_2_scales=True)
EPSILON = zerocast.Float8CurrentScaling(fp8_quant_fwd_weight=QParams(amax_epsilon=0.875))


def cast(
    values: list[float],
    recipe: zerocast.Recipe = E4M3,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[int], int]:
    """The codes of a vector and the bits of its scale_inv."""
    weight = zerocast.quantize(torch.tensor(values), recipe, dtype=dtype)
    bits = weight.rowwise_scale_inv.view(torch.int32).item()
    return weight.rowwise_data.tolist(), bits


ONE = 0x3F800000


def test_scale_one_rounds_to_nearest_even():
    """448 / 448 = 1. 1.0625 and 1.1875 are ties of 1, 1.125 and 1.25: 0x38 and 0x3A are even."""
    codes = [0x7E, 0xFE, 0x38, 0xBA, 0x00, 0x80, 0x00, 0x01]
    x = [448.0, -448.0, 1.0625, -1.1875, 0.0, -0.0, 2.0**-10, 1.5 * 2.0**-10]
    assert cast(x) == (codes, ONE)


def test_e5m2_scales_to_57344():
    """Amax 1: 57344 = 1.75 * 2^15 is 0x7B, its half 0x77, and 1/57344 rounds to 0x37924925."""
    codes, scale_inv = cast([1.0, -0.5, 2.0**-33, 0.0], E5M2)
    # 57344 * 2^-33 = 1.75 * 2^-18: no normal (2^-14), no subnormal but 2^-16 * 0.4375, which is 0.
    assert codes == [0x7B, 0xF7, 0x00, 0x00]
    assert scale_inv == 0x37924925


def test_a_power_of_two_scale_is_rounded_down():
    """448 / 3 = 149.3 becomes 128, stored as 2^-7: 3 * 128 = 384 = 1.5 * 2^8, code 0x7C."""
    assert cast([3.0, -1.5, 1.0], POWER_2) == ([0x7C, 0xF4, 0x70], 0x3C000000)


def test_an_exact_power_of_two_stays():
    """448 / 7 = 64, with or without the rounding."""
    assert cast([7.0, 1.0], POWER_2) == cast([7.0, 1.0], E4M3) == ([0x7E, 0x68], 0x3C800000)


def test_a_smaller_amax_is_replaced_by_epsilon():
    """448 / 0.875 = 512, stored as 2^-9, also where everything is zero; 2^-9 * 512 = 1."""
    assert cast([2.0**-9, 0.0], EPSILON) == ([0x38, 0x00], 0x3B000000)
    assert cast([0.0, -0.0], EPSILON) == ([0x00, 0x80], 0x3B000000)


def test_an_amax_of_epsilon_or_more_is_kept():
    """0.875 gives 512 by itself; 1.75 gives 256, stored as 2^-8."""
    assert cast([0.875], EPSILON) == ([0x7E], 0x3B000000)
    assert cast([1.75, 0.875], EPSILON) == ([0x7E, 0x76], 0x3B800000)


def test_zeros_have_scale_one():
    """Amax 0, epsilon 0: no division, and the signs stay."""
    assert cast([0.0, -0.0]) == cast([0.0, -0.0], POWER_2) == ([0x00, 0x80], ONE)


@pytest.mark.parametrize(("recipe", "scale_inv"), [(E4M3, 0x00200000), (POWER_2, 0x00400000)])
def test_a_scale_that_overflows_becomes_the_largest(recipe, scale_inv):
    """448 / 2^-127 overflows: FLT_MAX, stored as the subnormal 2^-128, or 2^127 and 2^-127.

    2^-127 times almost 2^128 is 2 less a bit, 0x40; times 2^127 it is 1, 0x38.
    """
    code = 0x40 if recipe is E4M3 else 0x38
    assert cast([2.0**-127, -(2.0**-149)], recipe) == ([code, 0x80], scale_inv)


@pytest.mark.parametrize("recipe", [E4M3, E5M2, POWER_2, EPSILON])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_makes_everything_nan(recipe, bad):
    """scale_inv is the NaN 0x7FC00000 and every code 0x7F, zeros and the smallest included."""
    assert cast([1.0, bad, 0.0, -(2.0**-149)], recipe) == ([0x7F] * 4, 0x7FC00000)


@pytest.mark.parametrize(
    ("dtype", "round_master", "code"),
    [(torch.bfloat16, True, 0x38), (torch.float16, True, 0x38), (torch.float32, True, 0x39),
     (torch.bfloat16, False, 0x39), (torch.float16, False, 0x39)],
)  # fmt: skip
def test_the_master_is_rounded_to_the_nominal_dtype_first(dtype, round_master, code):
    """1.0625 + 2^-20 is above the tie; rounded to BF16 or FP16 it is the tie, which goes to 1."""
    recipe = zerocast.Float8CurrentScaling(round_master=round_master)
    assert cast([448.0, 1.0625 + 2.0**-20], recipe, dtype) == ([0x7E, code], ONE)


def test_the_amax_is_taken_after_rounding():
    """BF16 rounds 447.5 to 448, so the scale is 1 and not 448 / 447.5."""
    assert cast([447.5, 1.0], E4M3, torch.bfloat16) == ([0x7E, 0x38], ONE)
    assert cast([447.5, 1.0], E4M3, torch.float32)[1] != ONE


def test_fp16_overflows_at_65520():
    """65519 rounds to 65504 and is fine, 65520 rounds to infinity and so makes NaN."""
    assert cast([65519.0], E4M3, torch.float16)[0] == [0x7E]
    assert cast([65520.0, 1.0], E4M3, torch.float16) == ([0x7F, 0x7F], 0x7FC00000)


def test_fp16_underflows_at_two_to_the_minus_25():
    """2^-25 is half the smallest FP16 and rounds to 0, amax 0; one float32 more gives 2^-24."""
    above = torch.tensor(2.0**-25).nextafter(torch.tensor(1.0)).item()
    assert cast([2.0**-25, -(2.0**-25)], E4M3, torch.float16) == ([0x00, 0x80], ONE)
    assert cast([above], E4M3, torch.float16)[0] == [0x7E]


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3, 5), (1, 1, 1, 3), (257, 3)])
def test_the_columnwise_copy_is_the_byte_transpose_of_the_matrix(shape):
    """Codes keep the weight's shape; columnwise they are [last, product of the others]."""
    numel = torch.Size(shape).numel()
    x = torch.arange(numel).remainder(16).float().reshape(shape)
    x.view(-1)[0] = 448.0
    weight = zerocast.quantize(x, E4M3)
    codes = weight.rowwise_data
    assert codes.shape == shape
    assert torch.equal(weight.columnwise_data, codes.reshape(-1, shape[-1]).t())
    assert torch.equal(weight.dequantize(torch.float32), x)
