"""Recipes are values, and another one is one class."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes
from zerocast.errors import InputError
from zerocast.formats import E4M3, decode, encode
from zerocast.layout import Block, BlockGrid, ScaleLayout, Source
from zerocast.numerics import Float8Numerics
from zerocast.recipes import RECIPES, QParams, Recipe

NVFP4 = zerocast.NVFP4BlockScaling()


# --- identity ---


def test_recipes_are_values():
    """Equal configurations are equal and hash alike; any differing field makes another scheme."""
    make = zerocast.Float8CurrentScaling
    epsilon = QParams(amax_epsilon=0.5)
    assert make() == make(fp8_format="Hybrid", use_power_2_scales=False) != NVFP4
    assert hash(make()) == hash(make(fp8_quant_fwd_weight=QParams()))
    differing = [
        make(), make(fp8_format="e4m3"), make(fp8_format="e5m2"), make(use_power_2_scales=True),
        make(fp8_quant_fwd_weight=epsilon), make(fp8_quant_fwd_inp=epsilon),
        make(fp8_quant_bwd_grad=epsilon), make(round_master=False),
        NVFP4, dataclasses.replace(NVFP4, round_master=False), dataclasses.replace(NVFP4, seed=1),
        *(kind() for kind in RECIPES.values() if kind not in (make, type(NVFP4))),
    ]  # fmt: skip
    assert len(set(differing)) == len(differing)


@pytest.mark.parametrize("kind", RECIPES.values())
def test_a_recipe_cannot_be_changed(kind):
    """Weights share them, and plans are keyed by them."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().round_master = False


def test_the_table_of_recipes():
    """The short names of command lines; each makes a default configuration."""
    assert {name: type(make()).__name__ for name, make in RECIPES.items()} == {
        "delayed": "DelayedScaling",
        "current": "Float8CurrentScaling",
        "rowwise": "Float8RowwiseScaling",
        "block": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
        "nvfp4": "NVFP4BlockScaling",
    }


@pytest.mark.parametrize("kind", RECIPES.values())
def test_a_recipe_survives_pickling(kind):
    """Checkpoints hold them."""
    assert pickle.loads(pickle.dumps(kind())) == kind()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_master_decides_what_is_rounded_to(dtype):
    """The nominal dtype, or nothing, which FP32 stands for."""
    assert NVFP4.round_to(dtype) == dtype
    assert dataclasses.replace(NVFP4, round_master=False).round_to(dtype) == torch.float32


# --- another scheme is one class ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Blocks(Recipe):
    """E4M3 in blocks of 128x128 under powers of two; scale columns padded to 4 with 1.0."""

    @property
    def numerics(self) -> Float8Numerics:
        return Float8Numerics(E4M3, power_2_scale=True)

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) != 2:
            raise InputError(f"Float8Blocks needs a matrix, got shape {tuple(shape)}; reshape it.")

    @property
    def block(self) -> Block:
        return 128, 128

    @property
    def columnwise_source(self) -> Source:
        return Source.ROWWISE

    def scale_layout(self, grid: BlockGrid) -> ScaleLayout:
        return ScaleLayout(grid, col_multiple=4, padding=1.0)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", [(300, 260), (128, 128), (1, 129), (127, 5)])
def test_a_new_scheme_works_from_one_class(shape):
    """Blockwise FP8, ragged edges and FP32 padding included, by the operations that stand."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    x[0, 0] = 448 * 2.0**-3  # the first block's scale is exactly 8 where nothing exceeds it
    weight = zerocast.quantize(x, Float8Blocks())

    rows, cols = shape
    blocks_h, blocks_w = -(-rows // 128), -(-cols // 128)
    codes, values = torch.empty(shape, dtype=torch.uint8), torch.empty(shape)
    scales = torch.ones(blocks_h, -(-blocks_w // 4) * 4)
    columnwise = torch.ones(blocks_w, -(-blocks_h // 4) * 4)
    for i in range(blocks_h):
        for j in range(blocks_w):
            here = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale = 2.0 ** torch.floor(torch.log2(448 / x[here].abs().max().double())).float()
            codes[here] = encode(x[here] * scale, E4M3)
            values[here] = decode(codes[here], E4M3) / scale
            scales[i, j] = columnwise[j, i] = 1 / scale
    assert scales[0, 0] == 1 / 8

    assert_same_bytes(weight.rowwise_data, codes, "codes")
    assert_same_bytes(weight.rowwise_scale_inv, scales, "scales")
    assert_same_bytes(weight.columnwise_data, codes.t().contiguous(), "columnwise codes")
    assert_same_bytes(weight.columnwise_scale_inv, columnwise, "columnwise scales")
    assert_same_bytes(weight.dequantize(torch.float32), values, "values")


@pytest.mark.usefixtures("backend")
def test_a_new_scheme_keeps_nan_within_its_block():
    """FP8 blocks have no scale of the tensor: only the NaN's own block is lost."""
    x = torch.ones(256, 256)
    x[200, 3] = torch.nan
    values = zerocast.quantize(x, Float8Blocks()).dequantize(torch.float32)
    assert values[128:, :128].isnan().all()
    assert values.isnan().sum() == 128 * 128
    assert values[:128].eq(1).all()
