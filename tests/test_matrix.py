"""Every recipe runs wherever docs/concepts.md, "What runs where", says that it does."""

import copy
from collections.abc import Callable
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


CLAIMS: dict[str, Callable[[Recipe], None]] = {
    "`quantize`": quantized,
    "the functional cast": functional,
    "`CastPlan`": sharded,
    "`ZeroOptimizer`": zero,
    "`state_dict`": saved,
    "`autocast`": autocast,
}


def test_the_page_names_every_claim_and_recipe() -> None:
    """And nothing else runs every recipe."""
    text = " ".join(PAGE.read_text().split("## What runs where")[1].split())
    *first, last = CLAIMS
    assert f"in {', '.join(first)} and {last}, on CPUs and by the CUDA kernels" in text
    assert {type(recipe) for recipe in RECIPES.values()} == set(zerocast.recipes.RECIPES.values())


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_a_recipe_runs_on_the_cpu(recipe: Recipe, claim: str) -> None:
    """As the claim's own function says."""
    CLAIMS[claim](recipe)


@needs_emulation
@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_a_recipe_runs_by_the_kernels(recipe: Recipe, claim: str, emulated: CudaBackend) -> None:
    """Our kernels do the arithmetic, under the emulation."""
    with zerocast.use_backend(emulated):
        before = emulated.launcher.launches
        CLAIMS[claim](recipe)
        assert emulated.launcher.launches > before


@pytest.fixture(scope="module")
def emulated() -> CudaBackend:
    """Our kernels on the CPU."""
    return CudaBackend(Emulator("forward"))
