"""Our formats against the conversions in CUDA's headers, recorded and, where they are, live."""

import shutil

import pytest
import torch

import zerocast
from tests.oracles.cuda_conversions import (
    COMPILER,
    NAMES,
    convert,
    find_headers,
    read_record,
)
from tests.support.same_bytes import assert_same_codes
from tests.support.values import every_bf16
from zerocast.numerics import ELEMENT_FORMATS, decode, encode, encode_e8m0
from zerocast.recipes import MXFP8BlockScaling

HEADERS = find_headers()
RECORDED = read_record()


def our_codes(name: str, x: torch.Tensor) -> torch.Tensor:
    """[n] FP32 -> [n] uint8, by zerocast, an infinite block scale being the one agreed difference.

    CUDA saturates it to 2^127; ours is NaN, so that a weight that is not finite shows.
    """
    if name != "e8m0":
        return encode(x, ELEMENT_FORMATS[name])
    return torch.where(x.isinf(), 0xFE, encode_e8m0(x)).to(torch.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_every_bf16_converts_as_recorded(name):
    """All 65,536 BF16 inputs (E8M0: the 32,768 without a sign bit) give the recorded codes."""
    expected = RECORDED[name]
    x = every_bf16()[: len(expected)]
    assert len(x) == (1 << 15 if name == "e8m0" else 1 << 16)
    assert_same_codes(x, our_codes(name, x), expected)


def probes() -> torch.Tensor:
    """[n] FP32: every BF16 value, every value and tie of every format, all their neighbours."""
    values = [decode(torch.arange(1 << f.bits).byte(), f) for f in ELEMENT_FORMATS.values()]
    values = [v[v.isfinite()].unique().double() for v in values]
    ties = [(v[1:] + v[:-1]) / 2 for v in values]
    exact = torch.cat([every_bf16(), *(v.float() for v in (*values, *ties))])
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    return torch.cat([exact, exact.nextafter(up), exact.nextafter(down)])


@pytest.fixture(scope="module")
def converted() -> dict[str, torch.Tensor]:
    """What the headers of this machine make of :func:`probes`, by format name."""
    if HEADERS is None:
        pytest.skip("CUDA's headers (cuda_fp4.h and what it includes) are not here")
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C++ compiler {COMPILER}")
    return convert(probes(), HEADERS)


@pytest.mark.parametrize("name", NAMES)
def test_every_probe_converts_as_cuda_does(name, converted):
    """Every BF16 input, every value and tie, and the float32 next to each."""
    x, expected = probes(), converted[name]
    if name == "e8m0":  # a block scale has no sign
        x, expected = x[~x.signbit()], expected[~x.signbit()]
    assert_same_codes(x, our_codes(name, x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_what_the_headers_give(name, converted):
    """The recorded runs, spread over all BF16 values, are what this CUDA computes."""
    recorded = RECORDED[name]
    assert_same_codes(every_bf16(), recorded, converted[name][: len(recorded)])


# --- the scales that MXFP8 stores ---

INVERSE = torch.tensor(1 / 448).float()
"""What MXFP8 multiplies an amax by, in FP32."""


def stored_scales(amax: torch.Tensor) -> torch.Tensor:
    """[n] FP32 -> [n] uint8: the scales of n blocks with these amaxes, rows of a weight."""
    x = torch.zeros(len(amax), 32)
    x[:, 7] = amax * torch.tensor([1.0, -1.0]).repeat(len(amax))[: len(amax)]
    weight = zerocast.quantize(x, MXFP8BlockScaling(), dtype=torch.float32, columnwise=False)
    return weight.rowwise_scale_inv[: len(amax), 0].contiguous()


@pytest.mark.usefixtures("backend")
def test_mxfp8_scales_are_what_cuda_recorded():
    """For BF16 values y, the scale of an amax whose product with fl(1/448) is y.

    448 y or one of its neighbours is such an amax for two of three y, for zero and all subnormals,
    and for all powers of two, where the code changes.
    """
    y = every_bf16()[: 1 << 15]
    y = y[(448 * y).isfinite()]
    up, down = torch.tensor(torch.inf), torch.tensor(0.0)
    amax = 448 * y
    for other in (amax.nextafter(up), amax.nextafter(down)):
        amax = torch.where((amax * INVERSE != y) & (other * INVERSE == y), other, amax)
    hit = amax * INVERSE == y
    assert hit.sum() > 0.6 * len(y)
    assert hit[y < 2.0**-126].all()
    assert hit[torch.frexp(y).mantissa == 0.5].all()
    assert_same_codes(y[hit], stored_scales(amax[hit]), RECORDED["e8m0"][: len(y)][hit])


@pytest.mark.usefixtures("backend")
def test_mxfp8_scales_are_what_cuda_gives():
    """Of every BF16 amax, every power of two times 448, and the two float32 beside each."""
    if HEADERS is None or shutil.which(COMPILER) is None:
        pytest.skip("CUDA's headers (cuda_fp4.h and what it includes) or a compiler are not here")
    exact = torch.cat([every_bf16()[: 1 << 15], 448 * torch.exp2(torch.arange(-149.0, 120.0))])
    up, down = torch.tensor(torch.inf), torch.tensor(0.0)
    amax = torch.cat([exact, exact.nextafter(up), exact.nextafter(down)])
    amax = amax[amax.isfinite()]
    expected = convert(amax * INVERSE, HEADERS)["e8m0"]
    assert_same_codes(amax, stored_scales(amax), expected)
