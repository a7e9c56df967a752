"""Recomputed activations give the gradients of kept ones, bit for bit, and record amaxes once."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.support.layers import RECIPES, every_recipe
from tests.support.llama import HIDDEN_96, checkpoint_activations, llama, tokens
from tests.support.models import every_layer, recipe_state
from tests.support.same_bytes import assert_same_bytes
from zerocast import nn
from zerocast.errors import UnsupportedError
from zerocast.nn.autocast import autocast, checkpoint_contexts
from zerocast.recipes import NVFP4BlockScaling, QParams, Recipe

Run = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def plain(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Everything is kept."""
    return model(x)


def ours(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """nn.checkpoint, the mode that torch recommends."""
    return nn.checkpoint(model, x)


def ours_reentrant(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """nn.checkpoint, torch's older mode."""
    return nn.checkpoint(model, x, use_reentrant=True)


def torchs(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """torch's own function, given our contexts."""
    return torch_checkpoint(model, x, use_reentrant=False, context_fn=checkpoint_contexts)


def layer_by_layer(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Each layer by itself."""
    for module in model:
        x = nn.checkpoint(module, x)
    return x


def torchs_alone(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """torch's own function and nothing else."""
    return torch_checkpoint(model, x, use_reentrant=False)


def torchs_alone_reentrant(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The same in its older mode."""
    return torch_checkpoint(model, x, use_reentrant=True)


def torchs_wrapper(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What accelerate wraps layers with."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for module in model:
        x = checkpoint_wrapper(module)(x)
    return x


def torchs_nested(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Its two modes around each other."""
    first, rest = model[:2], model[2:]
    y = torchs_alone(lambda x: rest(torchs_alone_reentrant(first, x)), x)
    return torchs_alone_reentrant(lambda y: torchs_alone(model, torchs_alone(model, y)), y)


def not_nested(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What :func:`torchs_nested` computes."""
    return model(model(model(x)))


def nested(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A checkpoint inside a checkpoint."""
    first, rest = model[:2], model[2:]
    return nn.checkpoint(lambda x: rest(nn.checkpoint(first, x)), x)


WAYS = [ours, ours_reentrant, torchs, layer_by_layer, nested]
WAYS += [torchs_alone, torchs_alone_reentrant, torchs_wrapper]
every_way = pytest.mark.parametrize("run", WAYS)
torchs_ways = pytest.mark.parametrize("run", [torchs_alone, torchs_alone_reentrant])


def train(recipe: Recipe, run: Run, *, inside: bool = False) -> dict[str, torch.Tensor]:
    """Three steps, the backward after the region or inside; all gradients, and the final state."""
    model, results = every_layer(), {}
    generator = torch.Generator().manual_seed(1)
    for i in range(3):
        x = (torch.randn(6, 64, generator=generator) * 2**i).requires_grad_()
        model.zero_grad()
        with autocast(recipe=recipe):
            y = run(model, x)
            if inside:
                y.square().sum().backward()
        if not inside:
            y.square().sum().backward()
        results |= {f"step {i}, output": y.detach(), f"step {i}, input": x.grad}
        for name, parameter in model.named_parameters():
            results[f"step {i}, {name}"] = parameter.grad.clone()
    return results | recipe_state(model)


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Byte for byte, name by name."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_same_bytes(actual[name], expected[name], name)


@every_recipe
@every_way
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_gradients_and_state_are_those_without_recomputation(
    recipe: Recipe, run: Run, inside: bool
) -> None:
    """Delayed scales that moved on, stochastic rounding of gradients, and all the others; the
    backward inside the region or after it.
    """
    assert_same(train(recipe, run, inside=inside), train(recipe, plain, inside=inside))


@every_recipe
def test_checkpoints_inside_of_checkpoints(recipe: Recipe) -> None:
    """Of both kinds, each layer three times."""
    assert_same(train(recipe, torchs_nested), train(recipe, not_nested))


@torchs_ways
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_each_run_of_a_layer_is_under_its_own_region(recipe: str, run: Run) -> None:
    """Regions inside of the function, a layer that runs under several of them, and outside."""

    def regions(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with autocast(enabled=False, recipe=RECIPES[recipe]):
            y = model(x)
        with autocast(recipe=RECIPES["mxfp8"]):
            y = model(y)
        return model(y)

    def checkpointed(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return run(lambda x: regions(model, x), x)

    assert_same(train(RECIPES[recipe], checkpointed), train(RECIPES[recipe], regions))


@torchs_ways
def test_a_region_of_the_function_itself_reduces_once(run: Run) -> None:
    """Delayed scaling: amaxes are reduced on leaving the first run's region and not again."""
    results = []
    for wrapped in (False, True):
        model, grads = every_layer(), {}

        def function(x: torch.Tensor, model: torch.nn.Module = model) -> torch.Tensor:
            with autocast(recipe=RECIPES["delayed"]):
                return model(x)

        for i in range(3):
            x = (torch.linspace(-1, 1, 256).view(4, 64) * 2**i).requires_grad_()
            (run(function, x) if wrapped else function(x)).square().sum().backward()
            grads[f"step {i}"] = x.grad
        results.append(grads)
    assert_same(*results)


@torchs_ways
def test_microbatches_before_their_backwards(run: Run) -> None:
    """Several forwards, each in a region with another recipe, then the backwards in reverse."""
    results = []
    for way in (plain, run):
        model, grads, losses = every_layer(), {}, []
        for i, name in enumerate(["delayed", "current", "delayed"]):
            x = (torch.linspace(-1, 1, 256).view(4, 64) * 4**i).requires_grad_()
            with autocast(recipe=RECIPES[name]):
                losses.append((x, way(model, x).square().sum()))
        for i, (x, loss) in reversed(list(enumerate(losses))):
            loss.backward()
            grads[f"microbatch {i}"] = x.grad
        grads |= {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append(grads)
    assert_same(*results)


class Foreign(torch.autograd.Function):
    """A checkpoint of somebody's own."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def foreign(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A framework's own checkpoint."""
    return Foreign.apply(model, x)


def test_another_checkpoint_is_refused_where_it_gives_other_codes() -> None:
    """Outside of the region, or under scales that may have moved on; inside it, without such scales
    it is right.
    """
    with pytest.raises(UnsupportedError, match=r"outside of that region.*checkpoint_contexts"):
        train(RECIPES["current"], foreign)
    with pytest.raises(UnsupportedError, match=r"DelayedScaling.*zerocast\.checkpoint"):
        train(RECIPES["delayed"], foreign, inside=True)
    inside = {"inside": True}
    assert_same(
        train(RECIPES["current"], foreign, **inside), train(RECIPES["current"], plain, **inside)
    )


@every_way
def test_a_drawn_input_is_drawn_the_same_again(run: Run) -> None:
    """Stochastic rounding of inputs: the second run draws the words of the first."""
    recipe = NVFP4BlockScaling(fp4_quant_fwd_inp=QParams(stochastic_rounding=True))
    assert_same(train(recipe, run), train(recipe, plain))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_second_region_between_does_not_disturb(use_reentrant: bool) -> None:
    """Two forwards, two regions, then their backwards in turn: the scales have moved on for the
    first.
    """
    results = []
    for wrapped in (False, True):
        model, recipe = every_layer(), RECIPES["delayed"]
        generator = torch.Generator().manual_seed(1)
        xs = [torch.randn(6, 64, generator=generator, requires_grad=True) for _ in range(2)]
        outputs = []
        for x in xs:
            with autocast(recipe=recipe):
                outputs.append(
                    nn.checkpoint(model, x, use_reentrant=use_reentrant) if wrapped else model(x)
                )
        for y in outputs:
            y.square().sum().backward()
        results.append({str(i): x.grad for i, x in enumerate(xs)})
        results[-1] |= {n: p.grad for n, p in model.named_parameters()}
    assert_same(*results)


def test_a_graph_that_is_kept_can_be_gone_through_twice() -> None:
    """retain_graph: the second backward recomputes once more, the same."""
    grads = []
    for run in (plain, ours):
        model, x = every_layer(), torch.ones(4, 64, requires_grad=True)
        for _ in range(2):
            with autocast(recipe=RECIPES["delayed"]):
                y = run(model, x)
            y.sum().backward()
        with autocast(recipe=RECIPES["delayed"]):
            y = run(model, x).sum()
        with autocast(recipe=RECIPES["delayed"]), torch.no_grad():
            model(100 * x)
        y.backward(retain_graph=True)
        x.grad = None
        y.backward()
        grads.append(x.grad)
    assert_same_bytes(grads[1], grads[0], "input")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_outside_of_autocast_it_is_torchs(use_reentrant: bool) -> None:
    """Values, gradients and keyword arguments, with quantized weights."""
    model = torch.nn.Sequential(nn.Linear(32, 32, recipe=RECIPES["nvfp4"]), torch.nn.ReLU())
    x = torch.randn(4, 32, requires_grad=True)
    model(x).sum().backward()
    expected = x.grad.clone()
    x.grad = None
    nn.checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert_same_bytes(x.grad, expected, "input")
    scaled = nn.checkpoint(lambda x, *, by: by * x, x, by=3)
    assert_same_bytes(scaled, 3 * x, "keyword argument")


def test_activations_are_not_kept() -> None:
    """What lives between forward and backward is the input, not the codes."""
    sizes: list[int] = []
    for run in (plain, ours):
        saved: list[int] = []

        def pack(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.nbytes)
            return tensor

        model, x = every_layer(), torch.randn(64, 64, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with hooks, autocast(recipe=RECIPES["current"]):
            run(model, x)
        sizes.append(sum(saved))
    assert sizes[1] < sizes[0] / 5, sizes


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_evaluation_inside_a_checkpoint_records_nothing(use_reentrant: bool) -> None:
    """Without gradients the histories stay as they are."""
    model, recipe = every_layer(), RECIPES["delayed"]
    with torch.no_grad(), autocast(recipe=recipe):
        nn.checkpoint(model, torch.randn(4, 64, requires_grad=True), use_reentrant=use_reentrant)
    assert all((m._states[0].amax_history == 0).all() for m in (model[0], model[1], model[3]))


@pytest.mark.slow
@pytest.mark.own_defaults
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_transformers_own_switch_is_enough(recipe: str) -> None:
    """Llama with gradient_checkpointing_enable, as its trainer calls it and in both modes: loss and
    gradients are those without checkpoints.
    """
    pytest.importorskip("transformers")
    results = []
    for options in ("none", None, {"use_reentrant": True}, {"use_reentrant": False}):
        model = llama(HIDDEN_96)
        nn.convert(model, RECIPES["current"], weights="high_precision", filter_fqns=["lm_head"])
        if options != "none":
            checkpoint_activations(model, options)
        for step in range(2):
            with autocast(recipe=RECIPES[recipe]):
                loss = model(input_ids=tokens(step), labels=tokens(step)).loss
            loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters()} | {"loss": loss.detach()})
    for result in results[1:]:
        assert_same(result, results[0])
