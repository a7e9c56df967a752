"""Bytes that torchao and compressed-tensors made, on data where their dialects and ours agree.

All three have the same formulas in different associations, so they agree where no quotient lies
within a few roundings of a tie; that the recorded data keeps that distance is tested too.
"""

import json

import pytest
import torch

import zerocast
from tests.oracles.make_other_projects import FILE
from tests.support.same_bytes import assert_same_bytes
from zerocast.numerics import E2M1, E4M3, ElementFormat, decode, unpack_nibbles
from zerocast.recipes import (
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    QParams,
    Recipe,
)

RECORD = json.loads(FILE.read_text())
WEIGHTS = RECORD["weights"]
PROJECTS = ("torchao", "compressed-tensors")

FLOAT8_RECIPES = {
    "e4m3": zerocast.Float8CurrentScaling(),
    "e5m2": zerocast.Float8CurrentScaling(fp8_format="e5m2"),
    "e4m3, power of two": zerocast.Float8CurrentScaling(use_power_2_scales=True),
}

BLOCKS = RECORD["blocks"]
MXFP8_RECIPES = {"mxfp8": MXFP8BlockScaling(), "mxfp8, e5m2": MXFP8BlockScaling(fp8_format="e5m2")}
ROWWISE_RECIPES = {
    "rowwise": Float8RowwiseScaling(),
    "rowwise, power of two": Float8RowwiseScaling(fp8_quant_fwd_weight=QParams(power_2_scale=True)),
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


def quantize_blocks(recipe: Recipe) -> tuple[torch.Tensor, zerocast.QuantizedTensor]:
    """The [32, 64] BF16 matrix of many magnitudes, and what ``recipe`` makes of it."""
    x = from_hex(BLOCKS["bf16"], torch.bfloat16).view(BLOCKS["shape"])
    return x, zerocast.quantize(x, recipe)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", ROWWISE_RECIPES)
def test_rowwise_codes_and_scales_are_theirs(kind):
    """Both planes of torchao's axiswise casts; our stored scales are reciprocals of its scales."""
    x, ours = quantize_blocks(ROWWISE_RECIPES[kind])
    for plane in ("rowwise", "columnwise"):
        codes = from_hex(BLOCKS[kind][f"{plane} codes"], torch.uint8).view(x.shape)
        scales = from_hex(BLOCKS[kind][f"{plane} scales"], torch.float32)
        assert_same_bytes(getattr(ours, f"{plane}_data"), codes, f"{plane} codes")
        stored = getattr(ours, f"{plane}_scale_inv")
        assert_same_bytes(stored, scales.reciprocal(), f"{plane} scales")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", MXFP8_RECIPES)
def test_mxfp8_codes_and_scales_are_theirs(kind):
    """Both planes of torchao's MX tensors with scales rounded up; its planes have no padding."""
    x, ours = quantize_blocks(MXFP8_RECIPES[kind])
    stored = {
        "rowwise": ours.rowwise_scale_inv[: x.shape[0], : x.shape[1] // 32],
        "columnwise": ours.columnwise_scale_inv[: x.shape[0] // 32, : x.shape[1]],
    }
    for plane, scales in stored.items():
        codes = from_hex(BLOCKS[kind][f"{plane} codes"], torch.uint8).view(x.shape)
        theirs = from_hex(BLOCKS[kind][f"{plane} scales"], torch.uint8).view(scales.shape)
        assert_same_bytes(getattr(ours, f"{plane}_data"), codes, f"{plane} codes")
        assert_same_bytes(scales.contiguous(), theirs, f"{plane} scales")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", ["up", "floor", "even", "even, compressed-tensors"])
@pytest.mark.parametrize("name", RECORD["mx"])
def test_mxfp4_codes_and_scales_are_theirs(name, kind):
    """Both planes of torchao's MX tensors, and compressed-tensors' one, by each rounding of scales,
    at every mantissa of an amax. (Of the columnwise codes theirs are a byte each here.)
    """
    given = RECORD["mx"][name]
    x = from_hex(given["bf16"], torch.bfloat16).view(given["shape"])
    rounding, _, project = kind.partition(", ")
    theirs = {key: from_hex(text, torch.uint8) for key, text in given["mxfp4"][kind].items()}
    ours = zerocast.quantize(x, MXFP4BlockScaling(scale_rounding=rounding))
    found = {
        "rowwise codes": ours.rowwise_data,
        "rowwise scales": ours.rowwise_scale_inv[: x.shape[0], : x.shape[1] // 32],
        "columnwise codes": unpack_nibbles(ours.columnwise_data, x.shape[1]),
        "columnwise scales": ours.columnwise_scale_inv[: x.shape[0] // 32, : x.shape[1]],
    }
    assert theirs.keys() == (set(list(found)[:2]) if project else found.keys())
    for key, expected in theirs.items():
        stored = found[key].contiguous()
        assert_same_bytes(stored, expected.view(stored.shape), key)


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
