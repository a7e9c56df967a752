"""Compiled layers under recipes with state: the bytes of an uncompiled model, its state included;
one graph where the forward has no state and the release of torch can hold it.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import zerocast
import zerocast.nn.regions
from tests.support.claims import assert_same_tensors
from tests.support.layers import RECIPES, breaks, gradients
from tests.support.models import every_layer, recipe_state
from zerocast import nn
from zerocast.nn.regions import GRAPHS_HOLD_PRODUCTS

DELAYED, DRAWN = RECIPES["delayed"], RECIPES["nvfp4"]
pytestmark = breaks
remembering = pytest.mark.parametrize("recipe", [DELAYED, DRAWN], ids=["delayed", "nvfp4"])

Step = Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No graphs of earlier tests."""
    torch._dynamo.reset()


def data(seed: int, rows: int = 32) -> torch.Tensor:
    """[rows, 64], larger by the seed."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)) * 2**seed
    return x.requires_grad_()


def results(model, run, recipe, steps=3, batches=1, rows=32):
    """Of each step: outputs and gradients of microbatches whose backwards come after all of their
    forwards, the first one first, then an evaluation; and what is remembered after each.
    """
    found = {}
    for i in range(steps):
        model.zero_grad()
        inputs, outputs = [data(i + j, rows) for j in range(batches)], []
        for x in inputs:
            with zerocast.autocast(recipe=recipe):
                outputs.append(run(x))
        for j, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
            y.square().sum().backward()
            found |= gradients(model, x, y, f"{i}, {j}, ")
        found |= {f"{i}, {key}": tensor for key, tensor in recipe_state(model).items()}
        with torch.no_grad(), zerocast.autocast(recipe=recipe):
            found[f"{i}, evaluation"] = run(inputs[0].detach())
        found |= {f"{i}, evaluated, {key}": tensor for key, tensor in recipe_state(model).items()}
    return found


def assert_compiles(recipe, run, *, expected=None, backend="aot_eager", weights=None, **options):
    """``run(model, x)`` compiled as one graph gives what ``expected`` gives uncompiled."""
    model = every_layer(weights)
    twin, expected = copy.deepcopy(model), expected or run
    wanted = results(model, lambda x: expected(model, x), recipe, **options)
    whole = GRAPHS_HOLD_PRODUCTS and not recipe.has_forward_state
    compiled = torch.compile(lambda x: run(twin, x), backend=backend, fullgraph=whole)
    assert_same_tensors(results(twin, compiled, recipe, **options), wanted)


@remembering
def test_every_layer_under_a_recipe_with_state(recipe):
    """Three layers: forward, backward, an evaluation; several steps. (Under recipes without state:
    :mod:`tests.nn.test_compile`.)
    """
    weights = recipe if recipe is DRAWN else None
    assert_compiles(recipe, lambda model, x: model(x), weights=weights, steps=2)


def several(model, x, again=lambda model, x: model(x)):
    """Two of the layers three times, in and out of checkpoints."""
    model = model[1:]
    return again(lambda x: -model(x), x) + again(model, model(x))


def recomputed(model, x):
    """:func:`several`, whose checkpoints compute half of it again."""
    return several(model, x, lambda f, x: checkpoint(f, x, use_reentrant=False))


def test_a_layer_that_runs_several_times():
    """In one graph, in and out of activation checkpoints, with forwards of other steps before its
    backward: draws come in the order of an uncompiled model's, and none twice.
    """
    assert_compiles(DRAWN, recomputed, expected=several, steps=2, batches=2)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.parametrize("recipe", [DRAWN, RECIPES["mxfp8"]], ids=["nvfp4", "mxfp8"])
@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_inductor(recipe, weights):
    """As the two tests above; torch's own layers in between round as uncompiled ones."""
    of = recipe if weights == "quantized" else None
    options = {"backend": "inductor", "weights": of, "steps": 2, "batches": 2}
    assert_compiles(recipe, recomputed, expected=several, **options)


@remembering
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_our_checkpoint_around_a_compiled_function(recipe, use_reentrant):
    """Computed again in the backward, after its region: under it, from the state of the first run.
    (Others: :mod:`tests.nn.test_activation_checkpoint`.)
    """
    model = every_layer()[1:]
    twin = copy.deepcopy(model)
    whole = GRAPHS_HOLD_PRODUCTS and not recipe.has_forward_state
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=whole)
    expected = results(model, model, recipe, steps=2)

    def run(x):
        if not x.requires_grad:
            return compiled(x)
        return nn.checkpoint(compiled, x, use_reentrant=use_reentrant)

    assert_same_tensors(results(twin, run, recipe, steps=2), expected)


def test_a_graph_is_for_all_layers_of_a_kind():
    """Copies, loaded and unpickled ones as well, each with what it remembers itself; whose weights
    are frozen is compiled for that.
    """
    models = [torch.nn.Sequential(nn.Linear(64, 64)) for _ in range(3)]
    models += [copy.deepcopy(models[0]), copy.copy(models[1])]
    twins = copy.deepcopy(models)
    torch._dynamo.utils.counters.clear()
    whole = GRAPHS_HOLD_PRODUCTS
    compiled = [torch.compile(twin, backend="aot_eager", fullgraph=whole) for twin in twins]
    for _ in range(2):
        for model, twin, run in zip(models, twins, compiled, strict=True):
            expected = results(model, model, DRAWN, steps=1)
            assert_same_tensors(results(twin, run, DRAWN, steps=1), expected)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2 or not whole  # and an evaluation
    for each in (models[0], twins[0]):
        each.load_state_dict(models[1].state_dict())
        each.requires_grad_(False)
    remembered = []
    for model, run in ((models[0], models[0]), (twins[0], compiled[0])):
        with zerocast.autocast(recipe=DRAWN):
            y = run(data(1))
        y.sum().backward()
        remembered.append(recipe_state(model))
    assert_same_tensors(*remembered[::-1])


@remembering
def test_what_happens_between_forward_and_backward(recipe):
    """A forward under another recipe, hooks on saved tensors, a rank without rows, a region that is
    left by an error: as uncompiled.
    """
    model = every_layer()[1:]
    twin = copy.deepcopy(model)
    found = []
    for each, run in (
        (model, model),
        (twin, torch.compile(twin, backend="aot_eager")),
    ):
        grads = {}
        for i, rows in enumerate((32, 0)):
            x, other = data(i, rows), data(2)
            with zerocast.autocast(recipe=recipe):
                y = run(x)
            with zerocast.autocast(recipe=recipe), torch.autograd.graph.save_on_cpu():
                z = run(other)
            z.square().sum().backward()
            with pytest.raises(KeyError), zerocast.autocast(recipe=recipe):
                {}[run(data(5))]
            grads |= {f"{i}, {key}": tensor for key, tensor in recipe_state(each).items()}
            with zerocast.autocast(recipe=DELAYED if recipe is DRAWN else DRAWN):
                run(data(3)).sum().backward()
            y.square().sum().backward()
            grads |= {f"{i}, x": x.grad, f"{i}, other": other.grad}
            grads |= {f"{i}, drawn, {key}": tensor for key, tensor in recipe_state(each).items()}
        found.append(grads | {name: p.grad for name, p in each.named_parameters()})
    assert_same_tensors(*found[::-1])


PROGRAM = """
import torch, zerocast
from tests.nn.test_compile_memory import DRAWN, assert_compiles, recomputed, several
assert_compiles(DRAWN, recomputed, expected=several, backend="inductor", steps=2)
found = torch._dynamo.utils.counters
print(found["inductor"]["fxgraph_cache_hit"], found["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.nightly
def test_graphs_that_another_process_made(tmp_path):
    """Of the compiler's cache on disk: handles and places in the graph are this process's own."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONWARNINGS": "ignore",
    }
    hits = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment, check=True, capture_output=True, text=True,
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert hits[0] != hits[1], hits
