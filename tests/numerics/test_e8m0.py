"""E8M0 block scales against exact rationals: the smallest power of two that is not below.

torch and ml_dtypes round E8M0 to nearest, so neither is an oracle for encoding; CUDA's rounding is
compared in ``tests/oracles/test_cuda_conversions.py``.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

from zerocast.numerics import decode_e8m0, encode_e8m0, reciprocal_e8m0

EVERY_CODE = torch.arange(256, dtype=torch.uint8)


def smallest_power_not_below(x: float) -> int:
    """The code by definition: the least c in 0..254 with 2^(c - 127) >= x, else 254."""
    return next((c for c in range(254) if Fraction(2) ** (c - 127) >= Fraction(x)), 254)


def test_every_non_negative_bf16_rounds_up():
    """All 32,640 finite BF16 values that are not negative; probes worked out in rationals."""
    x = torch.arange(0x7F80, dtype=torch.int32).bitwise_left_shift(16).view(torch.float32)
    starts, expected = (
        [0.0, *(2.0 ** (c - 127) for c in range(254))],
        torch.empty(0x7F80, dtype=torch.uint8),
    )
    for code, start in enumerate(starts):  # above 2^(code - 128): code, until the next power
        expected[x > start if code else x >= 0] = code
    assert torch.equal(encode_e8m0(x), expected)
    probes = x[:: 0x7F80 // 97]
    assert encode_e8m0(probes).tolist() == [smallest_power_not_below(p) for p in probes.tolist()]


def test_every_power_of_two_and_its_neighbours():
    """2^e keeps its exponent, as does the float32 below it; the one above takes the next."""
    for exponent in range(-127, 128):
        power = torch.tensor([2.0**exponent])
        below, above = power.nextafter(torch.tensor(0.0)), power.nextafter(torch.tensor(torch.inf))
        expected = [exponent + 127, exponent + 127, min(exponent + 128, 254)]
        assert encode_e8m0(torch.cat([power, below, above])).tolist() == expected, f"2^{exponent}"


def test_the_ends_of_the_range():
    """Zero and subnormals to 2^-127 give 0, FLT_MAX 254, what is not finite NaN's 255."""
    x = torch.tensor([0.0, 1e-45, 2.0**-127, 3.4028235e38, torch.inf, torch.nan])
    assert encode_e8m0(x).tolist() == [0, 0, 0, 254, 255, 255]


def test_decode_equals_ml_dtypes_for_every_code():
    """Code c means 2^(c - 127), the subnormal 2^-127 included, and 255 is NaN."""
    expected = torch.from_numpy(
        EVERY_CODE.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    )
    value = decode_e8m0(EVERY_CODE)
    assert torch.equal(value[:255].view(torch.int32), expected[:255].view(torch.int32))
    assert value[255].isnan()


def test_the_reciprocal_is_exact_for_every_code():
    """1 / 2^(c - 127) is a float32 for every code, 2^-127 for code 254, and NaN for 255."""
    reciprocal = reciprocal_e8m0(EVERY_CODE).double()
    for code in range(255):
        assert Fraction(reciprocal[code].item()) == Fraction(2) ** (127 - code), code
    assert reciprocal[255].isnan()
