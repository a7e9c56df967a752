"""Functions and norms by CUDA's kernels, run on the CPU: codes, scales and amaxes of every recipe
are exactly those that the reference gives for the rounded result.
"""

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

EMULATORS = {order: Emulator(order, max_grid=3) for order in ORDERS}
BACKENDS = {order: CudaBackend(emulator) for order, emulator in EMULATORS.items()}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_codes_of_every_recipe(function: str, name: str) -> None:
    """Every function under every recipe, both copies and each alone, in tiles that are cut at the
    right and below; BF16 in and out.
    """
    x = source(function, (70, 160), "normal", 1).bfloat16()
    for order, usage in zip(ORDERS, USAGES, strict=True):
        quantizer = quantizer_of(RECIPES[name], usage)
        assert_fused(BACKENDS[order], function, quantizer, x, f"{function}, {name}, {usage}")


@pytest.mark.parametrize("kind", ["zeros", "ties", "subnormal", "wide", "huge", "underflow"])
@pytest.mark.parametrize("name", RECIPES)
def test_values_of_every_kind(name: str, kind: str) -> None:
    """Blocks of zeros, scales that underflow, infinities by rounding: as the reference."""
    for dtype, order in zip((torch.bfloat16, torch.float32, torch.float16), ORDERS, strict=True):
        x = source("identity", (36, 144 if "mxfp" not in name else 160), kind, 2).to(dtype)
        quantizer = quantizer_of(RECIPES[name])
        assert_fused(BACKENDS[order], "identity", quantizer, x, f"{kind} of {dtype}, {name}")


@pytest.mark.parametrize("kind", ["nan", "infinity"])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_not_finite(name: str, kind: str) -> None:
    """One NaN or infinity makes NaN of all under its scale, and of nothing else."""
    for function, order in zip(("identity", "silu", "layernorm"), ORDERS, strict=True):
        x = source(function, (34, 160), kind, 3)
        quantizer = quantizer_of(RECIPES[name])
        assert_fused(BACKENDS[order], function, quantizer, x, f"{function} of {kind}, {name}")


SHAPES = [
    (1, 32), (2, 96), (33, 32), (128, 128), (128, 288), (130, 288), (257, 160), (32, 512), (16, 32),
    (5, 1120),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_shapes_around_the_tiles(name: str, shape: tuple[int, int]) -> None:
    """Matrices smaller than a tile, of whole tiles, and one more."""
    for function, order in zip(("gelu", "rmsnorm", "swiglu"), ORDERS, strict=True):
        x = source(function, shape, "normal", 4).bfloat16()
        quantizer = quantizer_of(RECIPES[name])
        assert_fused(BACKENDS[order], function, quantizer, x, f"{function} {shape}, {name}")


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 5), (129, 1), (1, 131), (31, 33), (5, 130), (127, 131)], ids=str
)
@pytest.mark.parametrize(
    "name", ["delayed", "current", "rowwise", "blocks 1x128", "blocks 128x128"]
)
def test_odd_shapes(name: str, shape: tuple[int, int]) -> None:
    """Rows of any length where the recipe holds them, at addresses that are not aligned."""
    for function, order in zip(("relu", "layernorm", "swiglu"), ORDERS, strict=True):
        x = source(function, shape, "normal", 5).bfloat16()
        quantizer = quantizer_of(RECIPES[name])
        assert_fused(BACKENDS[order], function, quantizer, x, f"{function} {shape}, {name}")


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
