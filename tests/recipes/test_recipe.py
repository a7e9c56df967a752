"""Recipes are values, and another one is one class."""

import dataclasses
import pickle
from collections.abc import Sequence

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast.errors import InputError
from zerocast.layout import Block, BlockGrid, ScaleLayout, Source
from zerocast.numerics import E4M3, Float8Numerics
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
        "mxfp4": "MXFP4BlockScaling",
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
@pytest.mark.parametrize("bad", [1.0, torch.nan])
@pytest.mark.parametrize("shape", [(300, 260), (128, 128), (1, 129), (127, 5)])
def test_a_new_scheme_works_from_one_class(shape, bad):
    """Blockwise FP8, ragged edges and FP32 padding included, by the operations that stand: the
    bytes of the recipe that is there, a NaN kept within its block, and their values.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[-1, 3] = bad
    made, expected = zerocast.quantize(x, Float8Blocks()), zerocast.quantize(x, "block")
    assert_same_storage(made, expected, "Float8Blocks")
    values = made.dequantize(torch.float32)
    assert_same_bytes(values, expected.dequantize(torch.float32), "values")
    assert values[:-128].isfinite().all()
