"""What a weight of each scheme stores, and the shapes that a scheme refuses."""

import pytest
import torch

from tests.support.claims import message_of
from tests.support.recipes import VARIANTS
from zerocast.errors import InputError
from zerocast.recipes import (
    RECIPES,
    BufferSpec,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

CURRENT, ROWWISE, NVFP4 = Float8CurrentScaling(), Float8RowwiseScaling(), NVFP4BlockScaling()
BLOCK, BLOCK_1D = Float8BlockScaling(), Float8BlockScaling(w_block_scaling_dim=1)
MXFP8, MXFP8_2D = MXFP8BlockScaling(), MXFP8BlockScaling(enable_2d_quantization=True)
MXFP4, MXFP4_2D = MXFP4BlockScaling(), MXFP4BlockScaling(enable_2d_quantization=True)
NVFP4_1D, DRAWN = VARIANTS["nvfp4-1x16"], VARIANTS["nvfp4-drawn"]
SCHEMES = (CURRENT, ROWWISE, DelayedScaling(), BLOCK, BLOCK_1D, MXFP8, MXFP8_2D, MXFP4, MXFP4_2D,
           NVFP4, NVFP4_1D)  # fmt: skip


def codes(*shape: int) -> BufferSpec:
    """Bytes."""
    return BufferSpec(shape, torch.uint8)


def scales(*shape: int, fill: float = 0) -> BufferSpec:
    """FP32."""
    return BufferSpec(shape, torch.float32, fill)


def gathered(recipe: Recipe, shape: tuple[int, ...], *, columnwise: bool = True) -> tuple[str, ...]:
    """The buffers that an all-gather moves."""
    planes = recipe.planes(shape, columnwise=columnwise)
    return tuple(plane.codes_name for plane in planes if plane.is_gathered)


def derived(recipe: Recipe, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The buffers that post-all-gather processing rebuilds."""
    return tuple(name for p in recipe.planes(shape) if p.is_derived for name in p.buffers)


# --- what is stored ---


def test_the_buffers_of_an_awkward_nvfp4_weight():
    """[17, 80]: rows of 40 bytes, columns of 9, scale planes padded to 128 by 4."""
    specs = {"rowwise_data": codes(17, 40), "rowwise_scale_inv": codes(128, 8), "amax": scales(1)}
    columnwise = {"columnwise_data": codes(80, 9), "columnwise_scale_inv": codes(128, 4)}
    for recipe in (NVFP4, NVFP4_1D, NVFP4BlockScaling(nvfp4_4over6="weights")):
        assert recipe.buffers((17, 80), columnwise=False) == specs
        assert recipe.buffers((17, 80), columnwise=True) == specs | columnwise


@pytest.mark.parametrize(
    ("shape", "rowwise", "columnwise"),
    [
        ((1, 16), (128, 4), (128, 4)),
        ((129, 64), (256, 4), (128, 12)),
        ((16, 272), (128, 20), (384, 4)),
    ],
)
@pytest.mark.parametrize("recipe", [NVFP4, NVFP4_1D], ids=["16x16", "1x16"])
def test_the_scale_planes_of_nvfp4(recipe, shape, rowwise, columnwise):
    """[M to 128, K / 16 to 4] and [K to 128, ceil(M / 16) to 4], whatever the blocks are."""
    specs = recipe.buffers(shape, columnwise=True)
    assert specs["rowwise_scale_inv"].shape == rowwise
    assert specs["columnwise_scale_inv"].shape == columnwise


def test_the_counter_of_stochastic_rounding():
    """Two int64 beside the rest: the name's hash and the step; state, and not gathered."""
    extra = {"rounding_counter": BufferSpec((2,), torch.int64)}
    specs = NVFP4.buffers((16, 16), columnwise=True)
    assert DRAWN.buffers((16, 16), columnwise=True) == specs | extra
    assert DRAWN.state == ("rounding_counter",)
    assert gathered(DRAWN, (16, 16)) == ("rowwise_data",)


@pytest.mark.parametrize(
    ("shape", "columnwise"),
    [((5,), (5, 1)), ((3, 7), (7, 3)), ((2, 3, 5), (5, 6)), ((1, 1, 1), (1, 1))],
)
def test_the_buffers_under_one_scale_a_tensor(shape, columnwise):
    """Codes in the weight's shape; columnwise the transposed matrix under the same one scale.

    Delayed scaling adds its state: a scale of 1 for the first cast, a history of zeros.
    """
    specs = {"rowwise_data": codes(*shape), "rowwise_scale_inv": scales(1)}
    state = {"scale": scales(1, fill=1), "cast_scale": scales(1, fill=1),
             "amax_history": scales(7), "amax": scales(1)}  # fmt: skip
    second = {"columnwise_data": codes(*columnwise)}
    for recipe, more in ((CURRENT, {}), (DelayedScaling(amax_history_len=7), state)):
        assert recipe.buffers(shape, columnwise=False) == specs | more
        assert recipe.buffers(shape, columnwise=True) == specs | more | second
        assert recipe.state == tuple(more)
        assert derived(recipe, shape) == ("columnwise_data",)


@pytest.mark.parametrize(
    ("shape", "rows", "cols"), [((5,), 1, 5), ((3, 7), 3, 7), ((2, 3, 5), 6, 5)]
)
def test_the_buffers_of_a_rowwise_weight(shape, rows, cols):
    """Both planes of codes in the weight's shape, both gathered; a scale a row and one a column."""
    specs = {"rowwise_data": codes(*shape), "rowwise_scale_inv": scales(rows)}
    second = {"columnwise_data": codes(*shape), "columnwise_scale_inv": scales(cols)}
    assert ROWWISE.buffers(shape, columnwise=False) == specs
    assert ROWWISE.buffers(shape, columnwise=True) == specs | second
    assert derived(ROWWISE, shape) == ()
    assert gathered(ROWWISE, shape) == ("rowwise_data", "columnwise_data")
    assert gathered(ROWWISE, shape, columnwise=False) == ("rowwise_data",)


@pytest.mark.parametrize(
    ("shape", "square", "rowwise", "columnwise"),
    [
        # [M/128, K/128 to 4] and its transpose; [K/128, M to 4]; [M/128, K to 4]
        ((1, 1), ((1, 4), (1, 4)), (1, 4), (1, 4)),
        ((300, 260), ((3, 4), (3, 4)), (3, 300), (3, 260)),
        ((641, 130), ((6, 4), (2, 8)), (2, 644), (6, 132)),
    ],
)
def test_the_scale_planes_of_float8_blocks(shape, square, rowwise, columnwise):
    """Padding is 1.0, and what is unfilled already holds it."""
    for recipe, planes in ((BLOCK, square), (BLOCK_1D, (rowwise, columnwise))):
        assert recipe.buffers(shape, columnwise=True) == {
            "rowwise_data": codes(*shape),
            "columnwise_data": codes(*shape[::-1]),
            "rowwise_scale_inv": scales(*planes[0], fill=1),
            "columnwise_scale_inv": scales(*planes[1], fill=1),
        }
    assert derived(BLOCK, shape) == ("columnwise_data", "columnwise_scale_inv")
    assert derived(BLOCK_1D, shape) == ()


@pytest.mark.parametrize(
    ("shape", "rowwise", "columnwise"),
    [((1, 32), (128, 4), (4, 128)), ((129, 160), (256, 8), (8, 256))],
)
def test_the_buffers_of_an_mxfp8_weight(shape, rowwise, columnwise):
    """[M to 128, K/32 to 4] and [ceil(M/32) to 4, K to 128]; 32x32 blocks need one plane of codes.

    Nothing is derived: both planes of scales are written when scales are.
    """
    planes = {"rowwise_scale_inv": codes(*rowwise), "columnwise_scale_inv": codes(*columnwise)}
    one = {"rowwise_data": codes(*shape)}
    assert MXFP8_2D.buffers(shape, columnwise=True) == one | planes
    two = one | {"columnwise_data": codes(*shape)}
    assert MXFP8.buffers(shape, columnwise=True) == two | planes
    assert gathered(MXFP8, shape) == tuple(two)
    assert gathered(MXFP8_2D, shape) == tuple(one)
    for recipe in (MXFP8, MXFP8_2D):
        assert derived(recipe, shape) == ()
        assert set(recipe.buffers(shape, columnwise=False)) == {"rowwise_data", "rowwise_scale_inv"}


@pytest.mark.parametrize(
    ("shape", "columnwise", "square"),
    [((1, 32), (4, 128), (128, 4)), ((129, 160), (8, 256), (256, 8))],
)
def test_the_buffers_of_an_mxfp4_weight(shape, columnwise, square):
    """Nibbles along K in both planes, which are gathered; in 32x32 blocks the second one is derived
    and lies as [K, ceil(M/2)].
    """
    (m, k), rowwise = shape, square if shape[0] == 1 else (256, 8)
    one = {"rowwise_data": codes(m, k // 2), "rowwise_scale_inv": codes(*rowwise)}
    assert MXFP4.buffers(shape, columnwise=True) == one | {
        "columnwise_data": codes(m, k // 2), "columnwise_scale_inv": codes(*columnwise)
    }  # fmt: skip
    assert MXFP4_2D.buffers(shape, columnwise=True) == one | {
        "columnwise_data": codes(k, -(-m // 2)), "columnwise_scale_inv": codes(*square)
    }  # fmt: skip
    assert gathered(MXFP4, shape) == ("rowwise_data", "columnwise_data")
    assert gathered(MXFP4_2D, shape) == ("rowwise_data",)
    assert derived(MXFP4, shape) == ()
    assert derived(MXFP4_2D, shape) == ("columnwise_data", "columnwise_scale_inv")


@pytest.mark.parametrize("recipe", SCHEMES, ids=str)
def test_every_layout_has_the_shape_of_its_buffer(recipe):
    """What a plane says of its scales is what is stored, but for planes of one row or column."""
    for shape in ((1, 32), (33, 96), (160, 32)):
        specs = recipe.buffers(shape, columnwise=True)
        for plane in recipe.planes(shape):
            if plane.stores_scales:
                stored, layout = specs[plane.scales_name].shape, plane.scales
                assert layout.shape == (stored if len(stored) == 2 else layout.shape), shape
                assert layout.shape[0] * layout.shape[1] == torch.Size(stored).numel(), shape


# --- what is refused ---


@pytest.mark.parametrize(
    ("recipe", "k", "multiple"),
    [
        (NVFP4, 10, "16 (a row is whole blocks and whole bytes)"),
        (MXFP8, 48, "32 (a row is whole blocks)"),
        (MXFP8_2D, 48, "32 (a row is whole blocks)"),
        (MXFP4, 48, "32 (a row is whole blocks)"),
    ],
)
def test_a_ragged_row_is_refused(recipe, k, multiple):
    """K = 10 is neither whole blocks of NVFP4 nor whole bytes of scales, 48 is one block of MXFP8
    and a half.
    """
    assert message_of(InputError, recipe.check_shape, (32, k)) == (
        f"{type(recipe).__name__} needs K, the last dimension, to be a multiple of {multiple}, "
        f"got K = {k} in shape (32, {k}); pad the weight or leave it in high precision."
    )


@pytest.mark.parametrize("recipe", [NVFP4, MXFP8, BLOCK], ids=str)
def test_a_scheme_with_blocks_refuses_a_vector(recipe):
    """Blocks have two sides."""
    assert message_of(InputError, recipe.check_shape, (32,)) == (
        f"{type(recipe).__name__} needs a 2-D weight [M, K] or a stack of them [..., M, K], got "
        f"shape (32,); reshape it first."
    )


@pytest.mark.parametrize("shape", [(), (0, 32), (32, 0)])
@pytest.mark.parametrize("kind", RECIPES.values())
def test_a_weight_without_elements_is_refused(kind, shape):
    """By every recipe, each saying what it takes."""
    matrices = (NVFP4BlockScaling, MXFP4BlockScaling, MXFP8BlockScaling, Float8BlockScaling)
    dims = "shape [M, K] or [..., M, K]" if kind in matrices else "one dimension or more"
    assert message_of(InputError, kind().check_shape, shape) == (
        f"{kind.__name__} needs a weight of {dims} with at least one element, got shape {shape}."
    )


@pytest.mark.parametrize("recipe", SCHEMES, ids=str)
def test_shapes_that_are_taken(recipe):
    """M is free in every scheme; without blocks so is every dimension, of any number of them."""
    for shape in ((1, 32), (17, 96), (257, 160)):
        recipe.check_shape(shape)
    if recipe in (CURRENT, ROWWISE, DelayedScaling()):
        for shape in ((1,), (7,), (3, 5), (2, 3, 5), (1, 1, 1, 1)):
            recipe.check_shape(shape)
