"""Every backend against a second opinion: the numerics restated in scalars."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerocast
from tests.support.same_bytes import assert_same_bytes
from tests.vectors import scalar_law
from zerocast.recipes import QParams, Recipe

pytestmark = pytest.mark.usefixtures("backend")

PROPERTY = settings(derandomize=True, database=None, deadline=None, max_examples=150)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])

# By their bits: zeros, infinities, NaNs of both signs, quiet, signalling and with payload, the
# smallest and largest subnormals, 1, FLT_MAX, 2^-127, and what overflows FP16 or BF16 by rounding.
SPECIAL_BITS = (
    0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF,
    0x00000001, 0x80000001, 0x007FFFFF, 0x00400000, 0x3F800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x477FEFFF,
    0x477FF000, 0x7F7F8000, 0x7F7F7FFF,
)  # fmt: skip


@st.composite
def matrices(draw: st.DrawFn, widths: tuple[int, ...]) -> torch.Tensor:
    """[M, K] FP32: arbitrary mantissas, exponents near one per matrix and row, some specials."""
    rows, cols = draw(st.sampled_from([1, 2, 3, 15, 16, 17, 33])), draw(st.sampled_from(widths))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = rng.integers(0, 2**32, (rows, cols), dtype=np.uint64) & 0x807FFFFF
    center, spread = draw(st.integers(0, 254)), draw(st.sampled_from([0, 1, 3, 12, 40, 255]))
    exponent = center + rng.integers(-spread, spread, (rows, 1), endpoint=True)
    exponent = exponent + rng.integers(-3, 0, (rows, cols), endpoint=True)
    bits |= np.clip(exponent, 0, 254).astype(np.uint64) << 23
    if draw(st.booleans()):  # values that lie half-way between two codes once they are scaled
        bits &= 0xFFE00000
    for special in draw(st.lists(st.sampled_from(SPECIAL_BITS), max_size=2)):
        bits[rng.integers(rows), rng.integers(cols)] = special
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def check(
    master: torch.Tensor, recipe: Recipe, dtype: torch.dtype, expected: scalar_law.Expected
) -> None:
    """Quantize: every stored byte, and every value, is as expected."""
    weight = zerocast.quantize(master, recipe, dtype=dtype)
    assert set(weight.storage.buffers) == set(expected.buffers)
    for name, array in expected.buffers.items():
        assert_same_bytes(weight.storage.buffers[name], torch.from_numpy(array), name)
    values = canonical(weight.dequantize(torch.float32))
    assert_same_bytes(values, canonical(torch.from_numpy(expected.values)), "values")


def canonical(x: torch.Tensor) -> torch.Tensor:
    """One NaN for all: which one an operation gives is the hardware's business."""
    return torch.where(x.isnan(), torch.nan, x)


def name_of(dtype: torch.dtype, recipe: Recipe) -> str:
    """What a master is rounded to, as the scalar law calls it."""
    return str(dtype if recipe.round_master else torch.float32).removeprefix("torch.")


@PROPERTY
@given(matrices((16, 48, 80, 96, 112)), DTYPES, st.booleans())
def test_nvfp4_equals_the_scalar_law(master, dtype, round_master):
    """Codes, scales, padding, amax, columnwise copies and values of arbitrary bit patterns."""
    recipe = zerocast.NVFP4BlockScaling(round_master=round_master)
    check(master, recipe, dtype, scalar_law.quantize_nvfp4(master.numpy(), name_of(dtype, recipe)))


@PROPERTY
@given(
    matrices((1, 7, 16, 33)), DTYPES, st.booleans(),
    st.sampled_from(["e4m3", "e5m2"]), st.booleans(),
    st.sampled_from([0.0, 1e-46, 1e-45, 1e-30, 0.7, 3.4e38]),
)  # fmt: skip
def test_float8_equals_the_scalar_law(master, dtype, round_master, name, power_2, eps):
    """Codes, scale, columnwise copy and values, over both formats and every option."""
    recipe = zerocast.Float8CurrentScaling(
        fp8_format=name, fp8_quant_fwd_weight=QParams(power_2, eps), round_master=round_master
    )
    rounded = name_of(dtype, recipe)
    expected = scalar_law.quantize_float8(master.numpy(), rounded, name, power_2, eps)
    check(master, recipe, dtype, expected)


E4M3_TIES = torch.tensor(scalar_law.FLOAT8_VALUES["e4m3"]).unfold(0, 2, 1).mean(dim=1).double()


@settings(PROPERTY, max_examples=12)
@given(st.integers(0x0C800000, 0x7F7FFFFF), st.integers(-2, 2))
def test_nvfp4_block_amaxes_beside_every_tie_of_the_stored_scale(bits, ulps):
    """One block a tie, whose amax is the float32 nearest to tie * g / 448, or one or two away.

    There the association of the formula decides the stored byte. The tensor amax is arbitrary
    above 2^-102, where S_enc is a normal float32 less than FLT_MAX.
    """
    g = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    amax = (E4M3_TIES * g.double() / 448).float().view(torch.int32).add(ulps).view(torch.float32)
    x = torch.zeros(1, 16 * (1 + len(E4M3_TIES)))
    x[0, 0] = g
    x[0, 16::16] = amax
    x[0, 17::16] = amax * -0.4
    expected = scalar_law.quantize_nvfp4(x.numpy(), "float32")
    check(x, zerocast.NVFP4BlockScaling(), torch.float32, expected)
