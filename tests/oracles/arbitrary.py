"""Matrices of arbitrary bit patterns, and the comparison of a cast with the scalar numerics'."""

import numpy as np
import torch
from hypothesis import strategies as st

import zerocast
from tests.oracles.scalar_numerics import Expected
from tests.support.same_bytes import assert_same_bytes
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedTensor

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])

# By their bits: zeros, infinities, NaNs of both signs, quiet, signalling and with payload, the
# smallest and largest subnormals, 1, FLT_MAX, 2^-127, and what overflows FP16 or BF16 by rounding.
SPECIAL_BITS = (
    0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF,
    0x00000001, 0x80000001, 0x007FFFFF, 0x00400000, 0x3F800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x477FEFFF,
    0x477FF000, 0x7F7F8000, 0x7F7F7FFF,
)  # fmt: skip

HEIGHTS = (1, 2, 3, 15, 16, 17, 33)


@st.composite
def matrices(
    draw: st.DrawFn, widths: tuple[int, ...], heights: tuple[int, ...] = HEIGHTS
) -> torch.Tensor:
    """[M, K] FP32: arbitrary mantissas, exponents near one per matrix and row, some specials."""
    rows, cols = draw(st.sampled_from(heights)), draw(st.sampled_from(widths))
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


def check(master: torch.Tensor, recipe: Recipe, dtype: torch.dtype, expected: Expected) -> None:
    """Quantize: every stored byte, and every value, is as expected."""
    check_weight(zerocast.quantize(master, recipe, dtype=dtype), expected)


def check_weight(weight: QuantizedTensor, expected: Expected) -> None:
    """Every stored byte, and every value, is as expected."""
    assert set(weight.quantized_storage.buffers) == set(expected.buffers)
    for name, array in expected.buffers.items():
        assert_same_bytes(weight.quantized_storage.buffers[name], torch.from_numpy(array), name)
    values = canonical(weight.dequantize(torch.float32))
    assert_same_bytes(values, canonical(torch.from_numpy(expected.values)), "values")


def canonical(x: torch.Tensor) -> torch.Tensor:
    """One NaN for all: which one an operation gives is the hardware's business."""
    return torch.where(x.isnan(), torch.nan, x)


def name_of(dtype: torch.dtype, recipe: Recipe) -> str:
    """What a master is rounded to, as the scalar numerics calls it."""
    return str(dtype if recipe.round_master else torch.float32).removeprefix("torch.")
