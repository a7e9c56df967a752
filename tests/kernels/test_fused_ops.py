"""The fused kernels, run on the CPU: codes, scales and amaxes of every recipe are exactly those
that the reference gives for the rounded result.
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
from tests.support.operations import plane
from tests.support.same_bytes import assert_same_storage
from zerocast.backends.cuda import CudaBackend
from zerocast.errors import BackendError
from zerocast.formats import E4M3
from zerocast.layout import BlockGrid
from zerocast.nn.fused import apply_fused
from zerocast.numerics import Float8Numerics, FusedOp, FusedOperand, MXNumerics

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

ONE_PASS = ("delayed", "blocks 1x128", "blocks 128x128", "mxfp8", "mxfp8 32x32", "mxfp4")


@pytest.mark.parametrize("function", ["gelu", *NORMS])
@pytest.mark.parametrize("name", RECIPES)
def test_how_many_launches(name: str, function: str) -> None:
    """One kernel where no scale waits for the whole tensor, else two, whatever else is wanted."""
    emulator = Emulator()
    x = source(function, (40, 64), "normal", 7)
    quantizer = quantizer_of(RECIPES[name])
    with zerocast.use_backend(CudaBackend(emulator)):
        apply_fused(FusedOp(function), x, quantizer, output=True, statistics=True)
    passes = 1 if name in ONE_PASS else 2
    assert emulator.launches == passes, emulator.names
    assert all(n.startswith("fused_op<") for n in emulator.names)


def test_nothing_is_uploaded() -> None:
    """A call sends no table to the device: all that a kernel is told is its argument."""
    emulator = Emulator()
    emulator.upload = None  # type: ignore[assignment,method-assign]
    with zerocast.use_backend(CudaBackend(emulator)):
        apply_fused(FusedOp("silu"), torch.randn(8, 64), quantizer_of(RECIPES["mxfp8"]))


# --- what it refuses ---


@pytest.mark.parametrize(
    ("numerics", "grid", "message"),
    [
        (Float8Numerics(E4M3), BlockGrid(64, 64, 8, 8), "blocks of 1, 16, 32 or 128"),
        (
            MXNumerics(),
            BlockGrid(256, 256, 128, 128),
            "blocks of 128 rows for FP8 with FP32 scales",
        ),
    ],
)
def test_other_blocks_are_refused(numerics: object, grid: BlockGrid, message: str) -> None:
    """Blocks that no tile holds are refused when the operation is prepared, with the way out."""
    x = torch.zeros(grid.rows, grid.cols)
    scale_inv = torch.empty(grid.blocks_h, grid.blocks_w)
    planes = (plane(grid, None, x.to(torch.uint8), scale_inv),)
    target = FusedOperand(FusedOp("relu"), x, torch.float32, planes=planes)
    with pytest.raises(BackendError, match=message):
        BACKENDS["forward"].fused_op(numerics, target)  # type: ignore[arg-type]
