"""MXFP8 bytes worked out by hand, and against the casts of torch and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes
from tests.support.values import draw_values
from zerocast.numerics import decode_e8m0
from zerocast.recipes import MXFP8BlockScaling

pytestmark = pytest.mark.usefixtures("backend")

E4M3, E5M2 = MXFP8BlockScaling(), MXFP8BlockScaling(fp8_format="e5m2")


def block(values: list[float], recipe: MXFP8BlockScaling = E4M3) -> tuple[int, list[int]]:
    """The stored scale and the codes of one block, filled up with zeros; nominally FP32."""
    x = torch.tensor([values + [0.0] * (32 - len(values))])
    weight = zerocast.quantize(x, recipe, dtype=torch.float32)
    return int(weight.rowwise_scale_inv[0, 0]), weight.rowwise_data[0, : len(values)].tolist()


def test_an_amax_of_448_has_scale_one():
    """448 * fl(1/448) = 1 = 2^0, code 127; 1.0625 and 1.1875 are ties of even codes."""
    assert block([448.0, -448.0, 1.0625, -1.1875, 0.0, -0.0]) == (
        127, [0x7E, 0xFE, 0x38, 0xBA, 0x00, 0x80],
    )  # fmt: skip


def test_a_scale_is_rounded_up():
    """The float32 above 448 takes the next power of two, 2: codes 448 / 2 = 224, 0x76."""
    above = torch.tensor(448.0).nextafter(torch.tensor(torch.inf)).item()
    assert block([above, 1.0]) == (128, [0x76, 0x30])


def test_e5m2_scales_to_57344():
    """57344 * fl(1/57344) = 1; twice as much has twice the scale and the same codes."""
    assert block([57344.0, -1.0], E5M2) == (127, [0x7B, 0xBC])
    assert block([2 * 57344.0, -2.0], E5M2) == (128, [0x7B, 0xBC])


def test_a_block_of_zeros():
    """Amax 0: code 0, which means 2^-127; signs are kept."""
    assert block([0.0, -0.0]) == (0, [0x00, 0x80])


def test_the_smallest_scale():
    """448 * 2^-127 has 2^-127, code 0; what is smaller has it, too. The multiplier is 2^127.

    2^-149 * 2^127 = 2^-22 is less than half of the smallest E4M3, 2^-9; 2^-136 becomes 2^-9.
    """
    assert block([448 * 2.0**-127, -(2.0**-127), 2.0**-136, 2.0**-149]) == (0, [0x7E, 0xB8, 1, 0])
    assert block([2.0**-127]) == (0, [0x38])


def test_the_largest_amax():
    """FLT_MAX / 448 is just below 2^119.2, scale 2^120, code 247; FLT_MAX / 2^120 = 256, 0x78."""
    assert block([3.4028234663852886e38, -(2.0**120)]) == (247, [0x78, 0xB8])


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_loud(bad):
    """The scales of its row's block and of its column's are NaN, 0xFF; all codes there are 0x7F."""
    x = torch.ones(64, 64)
    x[33, 3] = bad
    weight = zerocast.quantize(x, E4M3)
    rowwise, columnwise = weight.rowwise_data.eq(0x7F), weight.columnwise_data.eq(0x7F)
    assert rowwise.nonzero().tolist() == [[33, j] for j in range(32)]
    assert columnwise.nonzero().tolist() == [[i, 3] for i in range(32, 64)]
    assert weight.rowwise_scale_inv.eq(0xFF).nonzero().tolist() == [[33, 0]]
    assert weight.columnwise_scale_inv.eq(0xFF).nonzero().tolist() == [[1, 3]]
    assert weight.dequantize(torch.float32).isnan().sum() == 32


@pytest.mark.parametrize("kind", ["normal", "wide", "ties", "subnormal", "underflow", "bits"])
@pytest.mark.parametrize("recipe", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_codes_are_the_casts_of_torch_and_ml_dtypes(kind, recipe):
    """Of the elements divided by their scale, which never exceeds the format's largest value."""
    x = draw_values(kind, 40 * 96, 3).view(40, 96)
    weight = zerocast.quantize(x, recipe, dtype=torch.float32)
    theirs = {E4M3: (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
              E5M2: (torch.float8_e5m2, ml_dtypes.float8_e5m2)}[recipe]  # fmt: skip
    by_row = decode_e8m0(weight.rowwise_scale_inv[:40, :3]).double().repeat_interleave(32, dim=1)
    by_col = decode_e8m0(weight.columnwise_scale_inv[:2, :96]).double().repeat_interleave(32, dim=0)
    for name, scale in (("rowwise_data", by_row), ("columnwise_data", by_col[:40])):
        quotient = x.double() / scale
        assert quotient.abs().max() <= recipe.numerics.fmt.max * (1 + 2.0**-23)
        # 0 / 2^-127 and the like are exact in FP32, as every quotient by a power of two is.
        quotient = quotient.float()
        codes = getattr(weight, name)
        assert_same_bytes(codes, quotient.to(theirs[0]).view(torch.uint8), f"{name}, torch")
        cast = quotient.numpy().astype(theirs[1]).view(np.uint8)
        assert_same_bytes(codes, torch.from_numpy(cast), f"{name}, ml_dtypes")
