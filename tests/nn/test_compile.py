"""Quantized products inside torch.compile: one graph, and the bytes of an uncompiled layer. Before
torch 2.13 the same bytes with breaks.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest
import torch

import zerocast
import zerocast.nn.regions
from tests.support.claims import assert_same_tensors
from tests.support.layers import RECIPES, breaks, step
from tests.support.models import InRegion
from tests.support.nightly import first_of_each
from tests.support.same_bytes import assert_same_bytes
from zerocast import nn
from zerocast.nn.regions import GRAPHS_HOLD_PRODUCTS
from zerocast.recipes import NVFP4BlockScaling, Recipe
from zerocast.tensors import quantized_tensor
from zerocast.tensors.dequantize import NAMES_IN_GRAPHS

STATELESS = {name: r for name, r in RECIPES.items() if not r.for_role("grad_output").state} | {
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True)
}


class Fused(torch.nn.Module):
    """The fused layers, of which one returns what its norm made, too; and those of another model
    behind them.
    """

    def __init__(self, weights: str, recipe: Recipe, model: torch.nn.Module):
        super().__init__()
        of = recipe if weights == "quantized" else None
        self.norm = nn.LayerNormLinear(64, 64, recipe=of, return_layernorm_output=True)
        self.mlp = nn.LayerNormMLP(64, 96, normalization="RMSNorm", recipe=of)
        self.model = model

    def forward(self, x):
        y, normed = self.norm(x)
        return self.model(self.mlp(y + normed))


def make(weights: str, recipe: Recipe, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Two layers, whose weights hold codes or are in high precision."""
    torch.manual_seed(0)
    of = recipe if weights == "quantized" else None
    return torch.nn.Sequential(
        nn.Linear(64, 96, recipe=of, dtype=dtype),
        torch.nn.ReLU(),
        nn.Linear(96, 32, bias=False, recipe=of, dtype=dtype),
    )


def results(model, run, rows=(6,), dtype=torch.float32):
    """Outputs and gradients."""
    found = {}
    for i, count in enumerate(rows):
        x = torch.linspace(-2, 3, count * 64, dtype=dtype).view(count, 64).requires_grad_()
        found |= step(model, x, run=run, when=f"{i}, ")
    return found


def in_region(run, recipe):
    """``run`` inside of a region."""

    def run_in_region(x):
        with zerocast.autocast(recipe=recipe):
            return run(x)

    return run_in_region


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No graphs of earlier tests."""
    torch._dynamo.reset()


# Each recipe once; which weights, and where the region is entered, in turn. CI takes each of these
# once, and each recipe in test_export_and_trace.
WEIGHTS, ENTERED = cycle(("quantized", "high_precision")), cycle(("inside", "outside", "outside"))
CASES = [*zip(WEIGHTS, ENTERED, STATELESS, strict=False), ("quantized", "nowhere", "nvfp4")]


@breaks
@first_of_each(("weights", "entered", "name"), CASES, columns=2)
def test_one_graph_with_the_bytes_of_an_uncompiled_model(weights, entered, name):
    """Without a graph break, the region entered around the compiled function or in it, or none;
    also after the codes were written.
    """
    recipe = STATELESS[name]
    layers = make(weights, recipe)
    model = Fused(weights, recipe, layers)
    eager = model if entered == "nowhere" else in_region(model, recipe)
    inside = eager if entered == "inside" else model
    whole = GRAPHS_HOLD_PRODUCTS or entered == "nowhere"
    compiled = torch.compile(inside, backend="aot_eager", fullgraph=whole)
    run = in_region(compiled, recipe) if entered == "outside" else compiled
    for _ in range(2):
        assert_same_tensors(results(model, run), results(model, eager))
        with torch.no_grad():
            layers[0].weight.copy_(torch.randn(96, 64))


@breaks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_inductor_with_dynamic_shapes(weights):
    """Three numbers of rows by graphs that are compiled once or twice; BF16."""
    recipe = STATELESS["block"]
    model = make(weights, recipe, torch.bfloat16)
    whole = GRAPHS_HOLD_PRODUCTS
    compiled = torch.compile(model, backend="inductor", fullgraph=whole, dynamic=True)

    shapes = {"rows": (6, 8, 13), "dtype": torch.bfloat16}
    expected = results(model, in_region(model, recipe), **shapes)
    torch._dynamo.utils.counters.clear()
    assert_same_tensors(results(model, in_region(compiled, recipe), **shapes), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 or not whole


@breaks
def test_no_region_is_a_constant():
    """Other recipes, none, a nested region that is not enabled, another thread: each call runs
    under its own, and one recipe has one graph whatever the object.
    """
    model, x = make("high_precision", STATELESS["current"]), torch.ones(32, 64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=GRAPHS_HOLD_PRODUCTS)

    def run(module):
        outputs = [module(x)]
        for recipe in ("current", "mxfp8", "current"):
            with zerocast.autocast(recipe=recipe):
                outputs.append(module(x))
                with zerocast.autocast(enabled=False):
                    outputs.append(module(x))
        outputs.append(module(x))
        return dict(zip("abcdefgh", outputs, strict=True))

    torch._dynamo.utils.counters.clear()
    assert_same_tensors(run(compiled), run(model))
    assert not GRAPHS_HOLD_PRODUCTS or torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    with zerocast.autocast(recipe="current"), ThreadPoolExecutor(1) as pool:
        in_no_region = pool.submit(torch.compile(model, backend="aot_eager"), x).result()
    assert_same_bytes(in_no_region, model(x), "another thread")


@breaks
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_state_of_the_forward_breaks_the_graph(recipe):
    """With the same bytes, the region entered in the compiled function or around it; fullgraph=True
    says why not. State of the gradients alone is no such state.
    (:mod:`tests.nn.test_compile_memory` has the rest.)
    """
    whole = GRAPHS_HOLD_PRODUCTS and not RECIPES[recipe].has_forward_state
    models = [make("high_precision", RECIPES[recipe]) for _ in range(3)]
    entered = [in_region(model, RECIPES[recipe]) for model in models[:2]]
    runs = [
        entered[0],
        torch.compile(entered[1], backend="aot_eager", fullgraph=whole),
        in_region(torch.compile(models[2], backend="aot_eager", fullgraph=whole), RECIPES[recipe]),
    ]
    expected, *others = (
        results(model, run, rows=(6, 6)) for model, run in zip(models, runs, strict=True)
    )
    for other in others:
        assert_same_tensors(other, expected)
    torch._dynamo.reset()
    unsupported = pytest.raises(torch._dynamo.exc.Unsupported, match="keeps? state between")
    if not whole:
        with unsupported:
            torch.compile(entered[0], backend="aot_eager", fullgraph=True)(torch.ones(6, 64))
        with zerocast.autocast(recipe=RECIPES[recipe]), unsupported:
            torch.compile(models[0], fullgraph=True)(torch.ones(6, 64))
    with (
        zerocast.autocast(enabled=False, calibrating=True, recipe=RECIPES[recipe]),
        pytest.raises(torch._dynamo.exc.Unsupported, match="calibrating=True"),
    ):
        torch.compile(models[0], fullgraph=True)(torch.ones(6, 64))


@breaks
def test_a_graph_that_breaks_inside_of_a_region():
    """The rest of the function runs in the region all the same, compiled or not."""
    model, recipe = make("high_precision", STATELESS["current"]), STATELESS["current"]
    last = torch.compiler.disable(model[2])

    def broken(x):
        with zerocast.autocast(recipe=recipe):
            x = model[0](x)
            torch._dynamo.graph_break()
            return model[2](model[1](x))

    def by_hand(x):
        region = zerocast.autocast(recipe=recipe)
        region.__enter__()
        x = model[0](x)
        torch._dynamo.graph_break()
        x = last(model[1](x))
        region.__exit__(None, None, None)
        return x

    expected = results(model, broken)
    assert_same_tensors(results(model, torch.compile(broken, backend="aot_eager")), expected)
    assert_same_tensors(results(model, torch.compile(by_hand, backend="aot_eager")), expected)
    assert not zerocast.nn.regions.current().enabled


def test_a_compiled_function_takes_weights_of_several_shapes():
    """It is compiled for each; a shape that varies would be that of no bytes."""
    product = torch.compile(torch.nn.functional.linear, backend="eager")
    for shape in ((48, 64), (32, 64), (64, 96)):
        weight = zerocast.quantize(torch.randn(shape), STATELESS["nvfp4"])
        x = torch.ones(2, shape[1])
        assert_same_bytes(product(x, weight), torch.nn.functional.linear(x, weight), f"{shape}")


def planned(model, **options):
    """A plan for the model's quantized weights, on one rank, and their masters."""
    weights = [p for p in model.parameters() if isinstance(p, zerocast.QuantizedTensor)]
    masters = [w.dequantize().float().contiguous() for w in weights]
    return zerocast.CastPlan(weights, masters, [0] * len(weights), **options), masters


@breaks
@pytest.mark.parametrize("in_region", [False, True])
def test_a_cast_before_the_backward(in_region):
    """The backward of a graph that saved codes, which a cast has written since, is an error; that
    of one which saved the decoded weight has the gradients of its forward.
    """
    recipe = STATELESS["block"]
    model = make("quantized", recipe)
    whole = GRAPHS_HOLD_PRODUCTS or not in_region
    compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
    plan, masters = planned(model)

    def loss_of(x):
        with zerocast.autocast(enabled=in_region, recipe=recipe):
            return compiled(x).square().sum()

    x = torch.randn(6, 64, requires_grad=True)
    (wanted,) = torch.autograd.grad(loss_of(x), x)
    loss = loss_of(x)
    masters[0].mul_(-3)
    plan.cast()
    plan.all_gather()
    if in_region:
        with pytest.raises(RuntimeError, match="modified by an inplace|have been written since"):
            loss.backward()
    else:
        assert_same_bytes(torch.autograd.grad(loss, x)[0], wanted, "gradient")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_between_a_cast_and_its_all_gather(backend):
    """A graph does not run on weights whose codes are those of other ranks' last step; where the
    next forward may rebuild the copies derived from them, it does.
    """
    for is_manual in (True, False):
        with zerocast.use_backend(backend):
            model, x = make("quantized", STATELESS["nvfp4"]), torch.randn(6, 64)
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            plan, masters = planned(model, manual_post_all_gather_processing=is_manual)
            compiled(x)
            masters[0].mul_(-3)
            plan.cast()
            if is_manual:
                with pytest.raises(Exception, match="StaleCopyError: .* All-gather the codes"):
                    compiled(x)
                plan.all_gather()
            assert_same_bytes(compiled(x), model(x), "output")


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("recipe", RECIPES)
def test_export_and_trace(recipe):
    """torch.export holds codes, and quantized products without state of the forward; it is refused
    elsewhere, as torch.jit.trace is, which would hold a constant.
    """
    model, x = make("quantized", RECIPES[recipe]), torch.randn(32, 64)
    exported = torch.export.export(model, (x,)).module()
    assert_same_bytes(exported(x), model(x), "output")

    region = InRegion(model, RECIPES[recipe])
    if GRAPHS_HOLD_PRODUCTS and not RECIPES[recipe].has_forward_state:
        exported = torch.export.export(region, (x,)).module()
        assert_same_bytes(exported(x), region(x), "output in a region")
    else:
        with pytest.raises(zerocast.UnsupportedError, match="outside of the region"):
            torch.export.export(region, (x,), strict=False)
        with (
            zerocast.autocast(recipe=RECIPES[recipe]),
            pytest.raises(Exception, match="outside of the region"),
        ):
            torch.export.export(model, (x,), strict=True)
    with pytest.raises(zerocast.UnsupportedError, match="as a constant"):
        torch.jit.trace(model, x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.filterwarnings("ignore:.*_stable_hash_for_caching:UserWarning")
def test_the_cache_on_disk_offers_no_graph_from_before_a_renaming(tmp_path, monkeypatch):
    """A graph is found again under the names of today, and under no others."""
    if not GRAPHS_HOLD_PRODUCTS:
        pytest.skip("needs torch 2.13: the cache looks at what a weight states to the compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters, hits = torch._dynamo.utils.counters, []
    for names in (NAMES_IN_GRAPHS, NAMES_IN_GRAPHS, ("OfAnotherVersion", *NAMES_IN_GRAPHS[1:])):
        monkeypatch.setattr(quantized_tensor, "NAMES_IN_GRAPHS", names)
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            torch.compile(nn.Linear(64, 32, recipe="nvfp4"))(torch.randn(4, 64))
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0]
