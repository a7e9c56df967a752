"""Functions and norms by CUDA's kernels, run on the CPU: codes, scales and amaxes of every recipe
are exactly those that the reference gives for the rounded result.
"""

from itertools import product

import pytest
import torch

import zerocast
from tests.cuda_emulation.emulator import ORDERS, Emulator, needs_emulation
from tests.support.fused_ops import (
    FUNCTIONS,
    NORMS,
    RECIPES,
    USAGES,
    assert_fused,
    quantizer_of,
    source,
)
from tests.support.same_bytes import assert_same_storage
from zerocast.backends.cuda import CudaBackend
from zerocast.nn.quantized_ops import apply_fused
from zerocast.numerics import FusedOp

pytestmark = needs_emulation

BACKENDS = {order: CudaBackend(Emulator(order, max_grid=3)) for order in ORDERS}


EVERY = ("gelu", "rmsnorm", "swiglu"), ("relu", "layernorm", "swiglu"), ("identity",) * 3
"""Functions, one for each order of threads."""
KINDS = ("zeros", "ties", "subnormal", "wide", "huge", "underflow")
"""Blocks of zeros, scales that underflow, infinities by rounding."""
SHAPES = [
    (1, 32), (2, 96), (33, 32), (128, 128), (128, 288), (130, 288), (257, 160), (32, 512), (16, 32),
    (5, 1120),
]  # fmt: skip
"""Smaller than a tile, of whole tiles, and one more."""
ODD_SHAPES = [(1, 1), (3, 5), (129, 1), (1, 131), (31, 33), (5, 130), (127, 131)]
"""Rows of any length where the recipe holds them, at addresses that are not aligned."""
FREE = ("delayed", "current", "rowwise", "blocks 1x128", "blocks 128x128")
CASES = [
    *product(RECIPES, [(function,) * 3 for function in FUNCTIONS], ["normal"], [(70, 160)]),
    *product(RECIPES, EVERY[2:], KINDS, [(36, 160)]),
    # One NaN or infinity makes NaN of all under its scale, and of nothing else.
    *product(RECIPES, [("identity", "silu", "layernorm")], ("nan", "infinity"), [(34, 160)]),
    *product(RECIPES, EVERY[:1], ["normal"], SHAPES),
    *product(FREE, EVERY[1:2], ["normal"], ODD_SHAPES),
]


@pytest.mark.parametrize(("name", "functions", "kind", "shape"), CASES, ids=str)
def test_codes_are_the_references(
    name: str, functions: tuple[str, ...], kind: str, shape: tuple[int, int]
) -> None:
    """Every function under every recipe, both copies and each alone; every kind of values, in every
    dtype; tiles that are cut at the right and below.
    """
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for function, order, usage, dtype in zip(functions, ORDERS, USAGES, dtypes, strict=True):
        x = source(function, shape, kind, 1).to(torch.bfloat16 if kind == "normal" else dtype)
        quantizer = quantizer_of(RECIPES[name], usage)
        assert_fused(BACKENDS[order], function, quantizer, x, f"{function}, {name}, {usage}")


def test_dimensions_are_flattened() -> None:
    """Leading dimensions count as rows."""
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    quantizer = quantizer_of(RECIPES["current"])
    with zerocast.use_backend(BACKENDS["random"]):
        made = apply_fused(FusedOp("gelu"), x, quantizer, output=True)
    assert made.quantized is not None
    assert made.quantized.shape == made.output.shape == x.shape
    assert_same_storage(made.quantized, quantizer.quantize(made.output), "three dimensions")


# --- launches ---


@pytest.mark.parametrize("function", ["gelu", "swiglu", *NORMS])
def test_one_launch_without_tables(function: str) -> None:
    """The result is made by one kernel, which is told everything by its argument."""
    emulator = Emulator()
    emulator.upload = None  # type: ignore[assignment,method-assign]
    with zerocast.use_backend(CudaBackend(emulator)):
        apply_fused(FusedOp(function), source(function, (40, 64), "normal", 7), statistics=True)
    assert len(emulator.names) == 1
    assert emulator.names[0].startswith("fused_op<")


def test_the_casts_are_those_of_every_tensor() -> None:
    """After it run the kernels that quantize the result where it is given."""
    x, made = torch.randn(40, 64), Emulator()
    with zerocast.use_backend(CudaBackend(made)):
        output = apply_fused(FusedOp("silu"), x, quantizer_of(RECIPES["mxfp8"]), output=True).output
    given = Emulator()
    with zerocast.use_backend(CudaBackend(given)):
        quantizer_of(RECIPES["mxfp8"]).quantize(output)
    assert made.names == ["fused_op<false>", *given.names]
