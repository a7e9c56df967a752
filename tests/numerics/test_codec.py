"""Encoding and decoding of E2M1, E4M3 and E5M2 against ml_dtypes and torch.

Neither was written by this project. Both are given inputs clipped to the format's largest value,
because ours saturate, and a NaN, whose code differs between libraries, has one code here.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.support.same_bytes import assert_same_codes
from tests.support.values import every_bf16
from zerocast.numerics import (
    E2M1,
    E4M3,
    E5M2,
    ELEMENT_FORMATS,
    FLT_MAX,
    ElementFormat,
    decode,
    encode,
)

FORMATS = pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2], ids=lambda f: f.name)
FLOAT8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)

ML_DTYPES = {
    E2M1: ml_dtypes.float4_e2m1fn,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
}
TORCH_DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}

# Low halves of a float32: a BF16 value, just above it, around the middle, just below the next.
LOW_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def around_every_bf16() -> torch.Tensor:
    """[6 * 65536] FP32: every BF16 value and float32 values right beside it and its middles."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = torch.cat([upper | low for low in LOW_HALVES])
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def ties(fmt: ElementFormat) -> torch.Tensor:
    """[n] FP32: the points half way between neighbouring values, both signs, saturation included.

    The values come from ml_dtypes, so the ties do not depend on our decoder.
    """
    finite = np.arange(fmt.max_code + 1, dtype=np.uint8).view(ML_DTYPES[fmt]).astype(np.float64)
    past_the_largest = 2 * finite[-1] - finite[-2]
    values = np.append(finite, past_the_largest)
    middles = torch.from_numpy((values[1:] + values[:-1]) / 2)
    assert torch.equal(middles.float().double(), middles), "a tie is exact in float32"
    return torch.cat([middles, -middles]).float()


def with_neighbours(x: torch.Tensor) -> torch.Tensor:
    """[n] FP32 -> [3 n]: the values and the float32 next to each on either side."""
    return torch.cat(
        [x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(torch.tensor(-torch.inf))]
    )


def ml_dtypes_codes(x: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """[n] FP32 -> [n] uint8: ml_dtypes' codes of the clipped values, with our one code for NaN."""
    clipped = x.clamp(-fmt.max, fmt.max).nan_to_num(0.0).numpy()
    codes = torch.from_numpy(clipped.astype(ML_DTYPES[fmt]).view(np.uint8))
    return torch.where(x.isnan(), fmt.nan_code, codes).to(torch.uint8)


@FORMATS
def test_encode_equals_ml_dtypes_around_every_bf16(fmt):
    """All 65,536 BF16 inputs, and the float32 values around them, round as ml_dtypes rounds: zeros
    of both signs keep them, infinities saturate, every NaN has ``nan_code``.
    """
    x = around_every_bf16()
    assert_same_codes(x, encode(x, fmt), ml_dtypes_codes(x, fmt))


@FORMATS
def test_encode_equals_ml_dtypes_at_every_tie_and_beside_it(fmt):
    """Every tie, and the two float32 values next to it, of both signs."""
    x = with_neighbours(ties(fmt))
    assert_same_codes(x, encode(x, fmt), ml_dtypes_codes(x, fmt))


@FLOAT8
def test_encode_equals_torch_once_clamped(fmt):
    """The float8 casts of torch agree on clamped inputs (unclamped, its E5M2 overflows)."""
    x = torch.cat([every_bf16(), with_neighbours(ties(fmt))])
    x = x[~x.isnan()]
    expected = x.clamp(-fmt.max, fmt.max).to(TORCH_DTYPES[fmt]).view(torch.uint8)
    assert_same_codes(x, encode(x, fmt), expected)


@FORMATS
def test_decode_equals_ml_dtypes_for_every_code(fmt):
    """Every code has ml_dtypes' value: the sign of zero, infinities and NaN included."""
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
    expected = torch.from_numpy(codes.numpy().view(ML_DTYPES[fmt]).astype(np.float32))
    value = decode(codes, fmt)
    assert value.dtype == torch.float32
    same = (value.view(torch.int32) == expected.view(torch.int32)) | (
        value.isnan() & expected.isnan()
    )
    wrong = [(c, value[c].item(), expected[c].item()) for c in codes.tolist() if not same[c]]
    assert not wrong, f"(code, got, expected): {wrong}"


@FORMATS
def test_every_nan_has_the_code_that_numerics_says(fmt):
    """0x7F, a NaN of both float8 formats; of E2M1, which has none, 7, the code of the largest."""
    nans = torch.tensor([0x7F800001, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32)
    assert encode(nans.view(torch.float32), fmt).tolist() == [0x7 if fmt.bits == 4 else 0x7F] * 4
    value = decode(torch.tensor([fmt.nan_code], dtype=torch.uint8), fmt).item()
    assert value == fmt.max if fmt.bits == 4 else math.isnan(value)


@FORMATS
def test_the_table_of_formats_is_that_of_ml_dtypes(fmt):
    """Largest value, smallest normal and subnormal, and width, as ``finfo`` states them."""
    info = ml_dtypes.finfo(ML_DTYPES[fmt])
    assert (fmt.max, fmt.min_normal, fmt.min_normal / 2**fmt.mantissa_bits, fmt.bits) == (
        float(info.max), float(info.smallest_normal), float(info.smallest_subnormal), info.bits
    )  # fmt: skip
    assert 2.0**fmt.max_exponent <= fmt.max < 2.0 ** (fmt.max_exponent + 1)
    assert ELEMENT_FORMATS[fmt.name] is fmt
    assert torch.finfo(torch.float32).max == FLT_MAX


@FORMATS
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3, 5)])
def test_codes_have_the_shape_of_the_input(fmt, shape):
    """Scalars, empty tensors and N-D tensors are encoded and decoded in their own shape."""
    x = torch.ones(shape)
    assert encode(x, fmt).shape == decode(encode(x, fmt), fmt).shape == shape
    assert torch.equal(decode(encode(x, fmt), fmt), x)
