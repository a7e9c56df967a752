"""Recomputed activations give the gradients of kept ones, bit for bit, and record amaxes once."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.support.layers import RECIPES, every_recipe
from tests.support.same_bytes import assert_same_bytes
from zerocast import nn
from zerocast.context import autocast, checkpoint_contexts
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


def nested(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A checkpoint inside a checkpoint."""
    first, rest = model[:2], model[2:]
    return nn.checkpoint(lambda x: rest(nn.checkpoint(first, x)), x)


every_way = pytest.mark.parametrize("run", [ours, ours_reentrant, torchs, layer_by_layer, nested])


def make() -> torch.nn.Module:
    """Every kind of layer with products, and one of torch's."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        nn.LayerNormMLP(32, 64), nn.LayerNormLinear(32, 64), torch.nn.GELU(), nn.Linear(64, 32)
    )


def train(recipe: Recipe, run: Run, *, inside: bool = False) -> dict[str, torch.Tensor]:
    """Three steps, the backward after the region or inside; all gradients, and the final state."""
    model, results = make(), {}
    generator = torch.Generator().manual_seed(1)
    for i in range(3):
        x = (torch.randn(6, 32, generator=generator) * 2**i).requires_grad_()
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
    for name, module in model.named_modules():
        for state in getattr(module, "_states", None) or ():
            for key, tensor in state.state_dict().items():
                results[f"state of {name}, {state.mode} {key}"] = tensor
    return results


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
@pytest.mark.parametrize("run", [torchs_alone, torchs_alone_reentrant])
def test_inside_the_region_torchs_own_function_is_enough(recipe: Recipe, run: Run) -> None:
    """There the scales have not moved yet, and the second run sees the region."""
    assert_same(train(recipe, run, inside=True), train(recipe, plain, inside=True))


def test_after_the_region_torchs_own_function_notices() -> None:
    """The second run sees no region and saves other tensors: an error, not other gradients."""
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        train(RECIPES["current"], torchs_alone)


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
        model, recipe = make(), RECIPES["delayed"]
        generator = torch.Generator().manual_seed(1)
        xs = [torch.randn(6, 32, generator=generator, requires_grad=True) for _ in range(2)]
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
        model, x = make(), torch.ones(4, 32, requires_grad=True)
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

        model, x = make(), torch.randn(64, 32, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with hooks, autocast(recipe=RECIPES["current"]):
            run(model, x)
        sizes.append(sum(saved))
    assert sizes[1] < sizes[0] / 5, sizes


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_evaluation_inside_a_checkpoint_records_nothing(use_reentrant: bool) -> None:
    """Without gradients the histories stay as they are."""
    model, recipe = make(), RECIPES["delayed"]
    with torch.no_grad(), autocast(recipe=recipe):
        nn.checkpoint(model, torch.randn(4, 32, requires_grad=True), use_reentrant=use_reentrant)
    assert all((m._states[0].amax_history == 0).all() for m in (model[0], model[1], model[3]))
