"""Every backend against a second opinion: the numerics restated in scalars."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zerocast
from tests.oracles import scalar_numerics, scalar_nvfp4, scalar_schemes
from tests.oracles.arbitrary import DTYPES, check, check_weight, matrices, name_of
from zerocast.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)
from zerocast.tensors import quantize_into

pytestmark = pytest.mark.usefixtures("backend")

PROPERTY = settings(derandomize=True, database=None, deadline=None, max_examples=60)
FEWER = settings(PROPERTY, max_examples=25)
MORE = settings(PROPERTY, max_examples=150)

NAMES, FLAGS = st.sampled_from(["e4m3", "e5m2"]), st.booleans()
EPSILONS = st.sampled_from([0.0, 1e-45, 1e-30, 0.7])


@MORE
@given(
    matrices((1, 7, 16, 33)), DTYPES, FLAGS, NAMES, FLAGS,
    st.sampled_from([0.0, 1e-46, 1e-45, 1e-30, 0.7, 3.4e38]),
)  # fmt: skip
def test_float8_equals_the_scalar_oracle(master, dtype, round_master, name, power_2, eps):
    """Codes, scale, columnwise copy and values, over both formats and every option."""
    recipe = Float8CurrentScaling(
        fp8_format=name, fp8_quant_fwd_weight=QParams(power_2, eps), round_master=round_master
    )
    expected = scalar_schemes.per_tensor(master.numpy(), name_of(dtype, recipe), name, power_2, eps)
    check(master, recipe, dtype, expected)


@PROPERTY
@given(matrices((1, 7, 16, 33)), DTYPES, NAMES, FLAGS, EPSILONS)
def test_rowwise_equals_the_scalar_oracle(master, dtype, name, power_2, eps):
    """Both planes of codes, each from the master, and a scale for every row and column."""
    recipe = Float8RowwiseScaling(fp8_format=name, fp8_quant_fwd_weight=QParams(power_2, eps))
    expected = scalar_schemes.rowwise(master.numpy(), name_of(dtype, recipe), name, power_2, eps)
    check(master, recipe, dtype, expected)


@FEWER
@given(
    st.one_of(matrices((1, 7, 128, 129, 300)), matrices((3,), (127, 129, 257))),
    DTYPES, NAMES, FLAGS, EPSILONS, st.sampled_from([1, 2]),
)  # fmt: skip
def test_float8_blocks_equal_the_scalar_oracle(master, dtype, name, power_2, eps, dim):
    """Ragged edges, padding of 1.0, and both ways to a columnwise copy."""
    recipe = Float8BlockScaling(
        fp8_format=name, fp8_quant_fwd_weight=QParams(power_2, eps), w_block_scaling_dim=dim
    )
    rounded = name_of(dtype, recipe)
    expected = scalar_schemes.float8_blocks(master.numpy(), rounded, name, power_2, eps, dim)
    check(master, recipe, dtype, expected)


@PROPERTY
@given(matrices((32, 96, 160)), DTYPES, NAMES, FLAGS)
def test_mxfp8_equals_the_scalar_oracle(master, dtype, name, two_dimensions):
    """Both planes of codes and scales in tiles; under 32x32 blocks one plane of codes."""
    recipe = MXFP8BlockScaling(fp8_format=name, enable_2d_quantization=two_dimensions)
    expected = scalar_schemes.mxfp8(master.numpy(), name_of(dtype, recipe), name, two_dimensions)
    check(master, recipe, dtype, expected)


@PROPERTY
@given(matrices((32, 96, 160)), DTYPES, st.sampled_from(["up", "floor", "even"]), FLAGS)
def test_mxfp4_equals_the_scalar_oracle(master, dtype, rounding, two_dimensions):
    """Both planes of nibbles and scales in tiles; under 32x32 blocks the transposed codes."""
    recipe = MXFP4BlockScaling(scale_rounding=rounding, enable_2d_quantization=two_dimensions)
    expected = scalar_schemes.mxfp4(
        master.numpy(), name_of(dtype, recipe), rounding, two_dimensions
    )
    check(master, recipe, dtype, expected)


@MORE
@given(matrices((16, 48, 80, 96, 112)), DTYPES, FLAGS)
def test_nvfp4_equals_the_scalar_oracle(master, dtype, round_master):
    """Codes, scales, padding, amax, columnwise copies and values of arbitrary bit patterns."""
    recipe = NVFP4BlockScaling(round_master=round_master)
    check(master, recipe, dtype, scalar_nvfp4.nvfp4(master.numpy(), name_of(dtype, recipe), 16))


TIES = torch.tensor(scalar_numerics.FLOAT8_VALUES["e4m3"]).unfold(0, 2, 1).mean(dim=1).double()


@settings(PROPERTY, max_examples=12)
@given(st.integers(0x0C800000, 0x7F7FFFFF), st.integers(-2, 2))
def test_nvfp4_block_amaxes_beside_every_tie_of_the_stored_scale(bits, ulps):
    """One block a tie, whose amax is the float32 nearest to tie * g / 448, or one or two away.

    There the association of the formula decides the stored byte. The tensor amax is arbitrary
    above 2^-102, where S_enc is a normal float32 less than FLT_MAX.
    """
    g = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    amax = (TIES * g.double() / 448).float().view(torch.int32).add(ulps).view(torch.float32)
    x = torch.zeros(1, 16 * (1 + len(TIES)))
    x[0, 0] = g
    x[0, 16::16] = amax
    x[0, 17::16] = amax * -0.4
    expected = scalar_nvfp4.nvfp4(x.numpy(), "float32", 16)
    check(x, NVFP4BlockScaling(), torch.float32, expected)


@PROPERTY
@given(matrices((16, 48, 80)), DTYPES)
def test_nvfp4_in_one_dimension_equals_the_scalar_oracle(master, dtype):
    """Blocks of 1x16, and the cast of the transpose, whose rows are whole bytes for an odd M."""
    recipe = NVFP4BlockScaling(disable_2d_quantization=True)
    check(master, recipe, dtype, scalar_nvfp4.nvfp4(master.numpy(), name_of(dtype, recipe), 1))


@PROPERTY
@given(matrices((16, 48, 80)), DTYPES, st.sampled_from(["mae", "mse"]), FLAGS, FLAGS)
def test_four_over_six_equals_the_scalar_oracle(master, dtype, mode, use_256, one_dimension):
    """Every block's choice, by either error, under either maximum, in blocks of either height."""
    recipe = NVFP4BlockScaling(
        nvfp4_4over6="weights",
        nvfp4_4over6_err_mode=mode,
        nvfp4_4over6_e4m3_use_256="all" if use_256 else "none",
        disable_2d_quantization=one_dimension,
    )
    height, scale_max = 1 if one_dimension else 16, 256 if use_256 else 448
    expected = scalar_nvfp4.nvfp4(
        master.numpy(), name_of(dtype, recipe), height, scale_max=scale_max, mode=mode
    )
    check(master, recipe, dtype, expected)


@FEWER
@example(torch.linspace(-1, 1, 16).view(1, 16), torch.float32, False, False, 1, 2, 2**32 - 1)
@example(torch.linspace(-1, 1, 16).view(1, 16), torch.float32, True, False, 1, 2, 2**33 + 6)
@given(
    matrices((16, 48)), DTYPES, FLAGS, FLAGS,
    st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**33),
)  # fmt: skip
def test_stochastic_rounding_equals_the_scalar_oracle(
    master, dtype, one_dimension, four_over_six, seed, name_hash, step
):
    """Any seed, any name, any step, of which 32 bits count; with 4-over-6 or 1x16 blocks, too."""
    recipe = NVFP4BlockScaling(
        fp4_quant_fwd_weight=QParams(
            stochastic_rounding=True, fp4_2d_quantization=not one_dimension
        ),
        nvfp4_4over6="weights" if four_over_six else "none",
        seed=seed,
    )
    weight = zerocast.empty(master.shape, recipe, dtype=dtype)
    weight.quantized_storage.buffers["rounding_counter"].copy_(torch.tensor([name_hash, step]))
    quantize_into(weight.quantized_storage, master)
    options = {"scale_max": 256, "mode": "mae"} if four_over_six else {}
    expected = scalar_nvfp4.nvfp4(
        master.numpy(), name_of(dtype, recipe), 1 if one_dimension else 16,
        random=(seed, name_hash, step + 1), **options,
    )  # fmt: skip
    check_weight(weight, expected)
