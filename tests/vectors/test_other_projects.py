"""Bytes that torchao and compressed-tensors made, on data where their dialects and ours agree.

All three have the same formulas in different associations, so they agree where no quotient lies
within a few roundings of a tie; that the recorded data keeps that distance is tested too.
"""

import json

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes
from tests.vectors.make_other_projects import FILE
from zerocast.formats import E2M1, E4M3, ElementFormat, decode

RECORD = json.loads(FILE.read_text())
WEIGHTS = RECORD["weights"]
PROJECTS = ("torchao", "compressed-tensors")

FLOAT8_RECIPES = {
    "e4m3": zerocast.Float8CurrentScaling(),
    "e5m2": zerocast.Float8CurrentScaling(fp8_format="e5m2"),
    "e4m3, power of two": zerocast.Float8CurrentScaling(use_power_2_scales=True),
}

# Their few roundings move a quotient by less than 2^-20 of itself; the data keeps 16 times that.
MARGIN = 2.0**-16


def from_hex(text: str, dtype: torch.dtype) -> torch.Tensor:
    """[n] values of ``dtype`` from their bytes."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype)


def weight(name: str) -> torch.Tensor:
    """[M, K] BF16: what was quantized."""
    return from_hex(WEIGHTS[name]["bf16"], torch.bfloat16).view(WEIGHTS[name]["shape"])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_nvfp4_codes_and_scales_are_theirs(name, project):
    """Every byte of codes and block scales; our scale planes are padded where theirs are not."""
    x, theirs = weight(name), WEIGHTS[name]["nvfp4"][project]
    rows, cols = x.shape
    ours = zerocast.quantize(x, zerocast.NVFP4BlockScaling())
    codes = from_hex(theirs["codes"], torch.uint8).view(rows, cols // 2)
    scales = from_hex(theirs["scales"], torch.uint8).view(rows, cols // 16)
    assert_same_bytes(ours.rowwise_data, codes, f"codes, {project}")
    stored = ours.rowwise_scale_inv[:rows, : cols // 16].contiguous()
    assert_same_bytes(stored, scales, f"scales, {project}")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", FLOAT8_RECIPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_float8_codes_and_scale_are_theirs(name, kind):
    """Every code of torchao's tensorwise cast; our stored scale is the reciprocal of its scale."""
    x, theirs = weight(name), WEIGHTS[name]["float8"][kind]
    ours = zerocast.quantize(x, FLOAT8_RECIPES[kind])
    codes = from_hex(theirs["codes"], torch.uint8).view(x.shape)
    scale = from_hex(theirs["scale"], torch.float32)
    assert_same_bytes(ours.rowwise_data, codes, "codes")
    assert_same_bytes(ours.rowwise_scale_inv, scale.reciprocal(), "scale_inv")


def nearest_tie(x: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """[n] FP64 magnitudes -> [n] the relative distance to the nearest tie of ``fmt``."""
    values = decode(torch.arange(fmt.max_code + 1).byte(), fmt).double()
    ties = (values[1:] + values[:-1]) / 2
    return ((x[:, None] - ties).abs() / ties).amin(dim=1)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_weights_keep_away_from_ties(name):
    """No stored scale and no code was within MARGIN of a tie, and every scale is a normal E4M3."""
    x = weight(name).double().abs()
    rows, cols = x.shape
    scales = from_hex(WEIGHTS[name]["nvfp4"]["torchao"]["scales"], torch.uint8)
    scale = decode(scales, E4M3).double().view(rows, cols // 16, 1)
    groups = x.view(rows, cols // 16, 16)
    assert nearest_tie((groups.amax(dim=2) * (448 / x.max())).flatten(), E4M3).min() > MARGIN
    assert nearest_tie((groups * (2688 / x.max()) / scale).flatten(), E2M1).min() > MARGIN
    assert scale.min() >= E4M3.min_normal
