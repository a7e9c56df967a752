"""The table "What runs where" of docs/concepts.md is true: every cell of it is run."""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import zerocast
from tests.cuda_emulation.emulator import Emulator, needs_emulation
from tests.support.planned import Planned
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_storage
from tests.support.values import draw_values
from tests.support.weights import through_a_file
from zerocast.backends.cuda import CudaBackend
from zerocast.comm import Communicator, run_in_process
from zerocast.recipes import Recipe

PAGE = Path(__file__).resolve().parent.parent / "docs" / "concepts.md"
SHAPE = torch.Size((64, 96))
NUMEL = SHAPE.numel()
VALUES = draw_values("wide", NUMEL, 3).view(SHAPE)

NAMES = (
    "`DelayedScaling`", "`Float8CurrentScaling`", "`Float8RowwiseScaling`", "`Float8BlockScaling`",
    "`MXFP8BlockScaling`", "... in blocks of 32x32", "`MXFP4BlockScaling`",
    "`NVFP4BlockScaling`", "... 4-over-6", "... stochastic rounding",
)  # fmt: skip
ROWS: dict[str, Recipe] = dict(zip(NAMES, RECIPES.values(), strict=True))


def whole(recipe: Recipe) -> zerocast.QuantizedTensor:
    """The unsharded cast, by the reference."""
    with zerocast.use_backend("reference"):
        return zerocast.quantize(VALUES, recipe, name="w")


def sharded(recipe: Recipe) -> None:
    """Three ranks, cut inside rows, blocks and bytes, cast and gather the unsharded bytes."""
    options = {"cuts": (0, 1301, 1302, NUMEL), "empty": {"dtype": torch.float32, "name": "w"}}

    def on_rank(comm: Communicator) -> zerocast.QuantizedTensor:
        return Planned(comm, recipe, VALUES, **options).cast()

    for rank, weight in enumerate(run_in_process(3, on_rank)):
        assert_same_storage(weight, whole(recipe), f"rank {rank}")


def quantized(recipe: Recipe) -> None:
    """``quantize`` gives the reference's bytes, and values that resemble what was given."""
    weight = zerocast.quantize(VALUES, recipe, name="w")
    assert_same_storage(weight, whole(recipe), "quantize")


def functional(recipe: Recipe) -> None:
    """``quantize_master_weights`` and ``post_all_gather_processing`` give the unsharded bytes."""
    weight = zerocast.empty(SHAPE, recipe, dtype=torch.float32, name="w")
    zerocast.quantize_master_weights([weight], [VALUES.view(-1)], [0])
    zerocast.post_all_gather_processing([weight])
    assert_same_storage(weight, whole(recipe), "quantize_master_weights")


def zero(recipe: Recipe) -> None:
    """Two ranks train a layer by ``ZeroOptimizer``, and hold the same bytes afterwards."""

    def on_rank(comm: Communicator) -> zerocast.QuantizedTensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        zerocast.nn.convert(model, recipe)
        before = model.weight.dequantize()
        optimizer = zerocast.optim.ZeroOptimizer(model.parameters(), group=comm, lr=0.1)
        model(torch.ones(2, SHAPE[1])).square().sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight.dequantize(), before)
        return model.weight

    first, second = run_in_process(2, on_rank)
    assert_same_storage(first, second, "the ranks' weights")


def saved(recipe: Recipe) -> None:
    """A state dict, through ``torch.save`` with safe types only, brings every byte back."""
    layer = zerocast.nn.Linear(SHAPE[1], SHAPE[0], recipe=recipe)
    other = zerocast.nn.Linear(SHAPE[1], SHAPE[0], recipe=recipe)
    other.load_state_dict(through_a_file(layer.state_dict()))
    assert_same_storage(other.weight, layer.weight, "the loaded weight")
    assert_same_storage(copy.deepcopy(layer).weight, layer.weight, "the copied weight")


def autocast(recipe: Recipe) -> None:
    """A layer's forward and backward run with quantized operands; gradients are there and
    finite.
    """
    torch.manual_seed(0)
    with zerocast.model_init(recipe=recipe):
        layer = zerocast.nn.Linear(SHAPE[1], SHAPE[0])
    x = torch.randn(32, SHAPE[1], requires_grad=True)
    exact = layer(x)
    with zerocast.autocast(recipe=recipe):
        y = layer(x)
    assert not torch.equal(y, exact)  # the input was quantized, too
    y.square().sum().backward()
    for gradient in (x.grad, layer.weight.grad):
        assert gradient is not None
        assert gradient.isfinite().all()
        assert gradient.count_nonzero() > 0


COLUMNS: dict[str, Callable[[Recipe], None]] = {
    "`quantize`": quantized,
    "functional cast": functional,
    "`CastPlan`": sharded,
    "`ZeroOptimizer`": zero,
    "`state_dict`": saved,
    "`autocast`": autocast,
}
"""What a cell claims; on the CPU, and but for the optimizer and the layers on CUDA."""


def matrix() -> dict[str, dict[str, str]]:
    """The page's: row -> column -> cell."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    table = next(t for t in tables if "`ZeroOptimizer`" in t.splitlines()[0])
    head, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    ]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def test_the_matrix_has_every_recipe_and_no_empty_cell() -> None:
    """Its rows are the recipes and their options; each cell says what runs."""
    table = matrix()
    assert list(table) == list(ROWS)
    assert {type(recipe) for recipe in ROWS.values()} == set(zerocast.recipes.RECIPES.values())
    for row, cells in table.items():
        assert list(cells) == list(COLUMNS), row
        assert set(cells.values()) <= {"CPU, CUDA (emulated)", "CPU"}, row


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", ROWS)
def test_a_cell_runs_on_the_cpu(row: str, column: str) -> None:
    """Every cell says CPU."""
    assert "CPU" in matrix()[row][column]
    COLUMNS[column](ROWS[row])


@needs_emulation
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", ROWS)
def test_a_cell_runs_on_cuda(row: str, column: str, emulated: CudaBackend) -> None:
    """Where a cell says CUDA, our kernels do the arithmetic, under the emulation."""
    with zerocast.use_backend(emulated) if "CUDA" in matrix()[row][column] else nullcontext():
        if "CUDA" not in matrix()[row][column]:
            pytest.skip("the cell says CPU")
        before = emulated.launcher.launches
        COLUMNS[column](ROWS[row])
        assert emulated.launcher.launches > before


@pytest.fixture(scope="module")
def emulated() -> CudaBackend:
    """Our kernels on the CPU."""
    return CudaBackend(Emulator("forward"))
