"""What a recipe accepts, stores and refuses, and that another one is one class."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes
from zerocast.errors import InputError
from zerocast.formats import E4M3, decode, encode
from zerocast.layout import BlockGrid, ScaleLayout
from zerocast.ops import Float8Law
from zerocast.recipes import RECIPES, BufferSpec, Recipe

NVFP4 = zerocast.NVFP4BlockScaling()
FLOAT8 = zerocast.Float8CurrentScaling()


# --- identity ---


def test_recipes_are_values():
    """Equal configurations are equal and hash alike; any differing field makes another scheme."""
    make = zerocast.Float8CurrentScaling
    assert make() == make(fp8_format="e4m3", amax_epsilon=0) != NVFP4
    assert hash(make()) == hash(make())
    differing = [
        make(), make(fp8_format="e5m2"), make(power_2_scale=True), make(amax_epsilon=0.5),
        make(round_master=False), NVFP4, dataclasses.replace(NVFP4, round_master=False),
    ]  # fmt: skip
    assert len(set(differing)) == len(differing)


@pytest.mark.parametrize("recipe", [NVFP4, FLOAT8])
def test_a_recipe_cannot_be_changed(recipe):
    """Weights share them, and plans are keyed by them."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.round_master = False


def test_the_table_of_recipes():
    """The short names of command lines; each makes a default configuration."""
    assert {name: make() for name, make in RECIPES.items()} == {"nvfp4": NVFP4, "fp8": FLOAT8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_master_decides_what_is_rounded_to(dtype):
    """The nominal dtype, or nothing, which FP32 stands for."""
    assert NVFP4.round_to(dtype) == dtype
    assert dataclasses.replace(NVFP4, round_master=False).round_to(dtype) == torch.float32


# --- what is stored ---


def test_the_buffers_of_an_awkward_nvfp4_weight():
    """[17, 80]: rows of 40 bytes, columns of 9, scale planes padded to 128 by 4."""
    specs = {
        "rowwise_data": BufferSpec((17, 40), torch.uint8),
        "rowwise_scale_inv": BufferSpec((128, 8), torch.uint8),
        "amax": BufferSpec((1,), torch.float32),
    }
    assert NVFP4.buffers((17, 80), columnwise=False) == specs
    assert NVFP4.buffers((17, 80), columnwise=True) == specs | {
        "columnwise_data": BufferSpec((80, 9), torch.uint8),
        "columnwise_scale_inv": BufferSpec((128, 4), torch.uint8),
    }


@pytest.mark.parametrize(
    ("shape", "rowwise", "columnwise"),
    [
        ((1, 16), (128, 4), (128, 4)),
        ((129, 64), (256, 4), (128, 12)),
        ((16, 272), (128, 20), (384, 4)),
    ],
)
def test_the_scale_planes_of_nvfp4(shape, rowwise, columnwise):
    """[M to 128, K / 16 to 4] and [K to 128, ceil(M / 16) to 4]."""
    specs = NVFP4.buffers(shape, columnwise=True)
    assert specs["rowwise_scale_inv"].shape == rowwise
    assert specs["columnwise_scale_inv"].shape == columnwise


@pytest.mark.parametrize(
    ("shape", "columnwise"),
    [((5,), (5, 1)), ((3, 7), (7, 3)), ((2, 3, 5), (5, 6)), ((1, 1, 1), (1, 1))],
)
def test_the_buffers_of_a_float8_weight(shape, columnwise):
    """Codes in the weight's shape; columnwise the transposed matrix under the same one scale."""
    specs = {
        "rowwise_data": BufferSpec(shape, torch.uint8),
        "rowwise_scale_inv": BufferSpec((1,), torch.float32),
    }
    assert FLOAT8.buffers(shape, columnwise=False) == specs
    codes = BufferSpec(columnwise, torch.uint8)
    assert FLOAT8.buffers(shape, columnwise=True) == specs | {"columnwise_data": codes}


# --- what is refused ---


def refusal(recipe: Recipe, shape: tuple[int, ...]) -> str:
    """The message with which ``recipe`` refuses ``shape``."""
    with pytest.raises(InputError) as error:
        recipe.check_shape(shape)
    return str(error.value)


def test_nvfp4_refuses_a_ragged_row():
    """K = 10 is neither whole blocks nor whole bytes of scales."""
    assert refusal(NVFP4, (16, 10)) == (
        "NVFP4BlockScaling needs K, the last dimension, to be a multiple of 16 (a row is whole "
        "blocks and whole bytes), got K = 10 in shape (16, 10); pad the weight or leave it in high "
        "precision."
    )


@pytest.mark.parametrize("shape", [(32,), (2, 16, 16)])
def test_nvfp4_refuses_what_is_not_a_matrix(shape):
    """Blocks have two sides."""
    assert refusal(NVFP4, shape) == (
        f"NVFP4BlockScaling needs a 2-D weight [M, K], got shape {shape}; reshape it to a matrix "
        f"first."
    )


@pytest.mark.parametrize("shape", [(), (0, 16), (16, 0)])
def test_a_weight_without_elements_is_refused(shape):
    """By both recipes, each saying what it takes."""
    assert refusal(NVFP4, shape) == (
        f"NVFP4BlockScaling needs a weight of shape [M, K] with at least one element, got shape "
        f"{shape}."
    )
    assert refusal(FLOAT8, shape) == (
        f"Float8CurrentScaling needs a weight of one dimension or more with at least one element, "
        f"got shape {shape}."
    )


@pytest.mark.parametrize("shape", [(1, 16), (17, 80), (257, 112)])
def test_nvfp4_takes_any_number_of_rows(shape):
    """K is whole blocks, M is free."""
    NVFP4.check_shape(shape)


def test_an_unknown_float8_format_is_refused():
    """When the recipe is made, not at the first cast."""
    with pytest.raises(InputError) as error:
        zerocast.Float8CurrentScaling(fp8_format="e3m4")
    assert str(error.value) == "fp8_format must be one of ['e4m3', 'e5m2'], got 'e3m4'."


@pytest.mark.parametrize("epsilon", [-1.0, float("nan"), float("inf"), 1e39])
def test_an_epsilon_that_fp32_does_not_hold_is_refused(epsilon):
    """Negative, or not finite once it is FP32, as 1e39 is not."""
    with pytest.raises(InputError) as error:
        zerocast.Float8CurrentScaling(amax_epsilon=epsilon)
    assert str(error.value) == (
        f"amax_epsilon must be finite in FP32 and not negative, got {epsilon}; 0 keeps every amax "
        f"as it is."
    )


# --- another scheme is one class ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Blocks(Recipe):
    """E4M3 in blocks of 128x128 under powers of two; scale columns padded to 4 with 1.0."""

    @property
    def law(self) -> Float8Law:
        return Float8Law(E4M3, power_2_scale=True)

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) != 2:
            raise InputError(f"Float8Blocks needs a matrix, got shape {tuple(shape)}; reshape it.")

    def grid(self, shape: Sequence[int]) -> BlockGrid:
        return BlockGrid(shape[0], shape[1], 128, 128)

    def scale_layout(self, shape: Sequence[int]) -> ScaleLayout:
        return ScaleLayout(self.grid(shape), col_multiple=4, padding=1.0)

    def columnwise_scale_layout(self, shape: Sequence[int]) -> ScaleLayout:
        return ScaleLayout(self.grid(shape).transposed(), col_multiple=4, padding=1.0)

    def buffers(self, shape: Sequence[int], *, columnwise: bool) -> dict[str, BufferSpec]:
        specs = self._code_buffers(shape, columnwise=columnwise)
        layout = self.scale_layout(shape)
        specs["rowwise_scale_inv"] = BufferSpec(layout.shape, torch.float32, layout.padding)
        if columnwise:
            layout = self.columnwise_scale_layout(shape)
            specs["columnwise_scale_inv"] = BufferSpec(layout.shape, torch.float32, layout.padding)
        return specs


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
