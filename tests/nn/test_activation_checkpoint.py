"""Recomputed activations give the gradients of kept ones, bit for bit, and record amaxes once."""

from functools import cache, partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.support.claims import assert_same_tensors
from tests.support.layers import RECIPES, every_recipe, kept_for_backward, step
from tests.support.llama import HIDDEN_96, checkpoint_activations, llama, tokens
from tests.support.models import every_layer, recipe_state
from tests.support.same_bytes import assert_same_bytes
from zerocast import nn
from zerocast.errors import UnsupportedError
from zerocast.nn import regions
from zerocast.nn.autocast import autocast
from zerocast.nn.recipe_state import RecipeState
from zerocast.nn.recompute import checkpoint_contexts
from zerocast.recipes import NVFP4BlockScaling, QParams


def plain(model, x):
    """Everything is kept."""
    return model(x)


def layer_by_layer(model, x, checkpoint=nn.checkpoint):
    """Each layer by itself."""
    for module in model:
        x = checkpoint(module, x)
    return x


def nested(model, x):
    """A checkpoint inside a checkpoint."""
    first, rest = model[:2], model[2:]
    return nn.checkpoint(lambda x: rest(nn.checkpoint(first, x)), x)


ALONE = {
    "torch's alone": partial(torch_checkpoint, use_reentrant=False),
    "torch's alone, reentrant": partial(torch_checkpoint, use_reentrant=True),
}
"""torch's own function and nothing else, in both of its modes."""
OURS = {"ours": nn.checkpoint, "ours, reentrant": partial(nn.checkpoint, use_reentrant=True)}
WAYS = ALONE | OURS | {
    "torch's": partial(torch_checkpoint, use_reentrant=False, context_fn=checkpoint_contexts),
    "layer by layer": layer_by_layer,
    "nested": nested,
    "accelerate's": partial(layer_by_layer, checkpoint=lambda m, x: checkpoint_wrapper(m)(x)),
}  # fmt: skip
every_way = pytest.mark.parametrize("run", WAYS.values(), ids=WAYS)
torchs_ways = pytest.mark.parametrize("run", ALONE.values(), ids=ALONE)
both_modes = pytest.mark.parametrize("use_reentrant", [True, False])


def train(recipe, run, *, inside=False):
    """Three steps, the backward after the region or inside; all gradients, and the final state."""
    model, found = every_layer(), {}
    generator = torch.Generator().manual_seed(1)
    for i in range(3):
        x = (torch.randn(6, 64, generator=generator) * 2**i).requires_grad_()
        found |= step(model, x, recipe, partial(run, model), inside=inside, when=f"step {i}, ")
        assert not regions.current().enabled
    return found | recipe_state(model)


@cache
def trained_plainly(recipe, *, inside):
    """The same without recomputation."""
    return train(recipe, plain, inside=inside)


# Every recipe in every way. Each meets the backward in both places; one pair does only where the
# recipe remembers, since the others read nothing that a region has when it ends.
IN_BOTH_PLACES = [
    pytest.param(recipe, run, inside, id=f"{name}-{way}-{'inside' if inside else 'after'}")
    for i, (name, recipe) in enumerate(RECIPES.items())
    for j, (way, run) in enumerate(WAYS.items())
    for inside in ((True, False) if recipe.has_state else ((i + j) % 2 == 0,))
]


@pytest.mark.parametrize(("recipe", "run", "inside"), IN_BOTH_PLACES)
def test_gradients_and_state_are_those_without_recomputation(recipe, run, inside):
    """Delayed scales that moved on, stochastic rounding of gradients, and all the others; the
    backward inside the region or after it.
    """
    assert_same_tensors(train(recipe, run, inside=inside), trained_plainly(recipe, inside=inside))


@every_recipe
def test_checkpoints_inside_of_checkpoints(recipe):
    """Of both kinds, each layer three times."""
    one, other = ALONE.values()

    def checkpointed(model, x):
        first, rest = model[:2], model[2:]
        y = one(lambda x: rest(other(first, x)), x)
        return other(lambda y: one(model, one(model, y)), y)

    expected = train(recipe, lambda model, x: model(model(model(x))))
    assert_same_tensors(train(recipe, checkpointed), expected)


@torchs_ways
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_each_run_of_a_layer_is_under_its_own_region(recipe, run):
    """Regions inside of the function, a layer that runs under several of them, and outside."""

    def regions(model, x):
        with autocast(enabled=False, recipe=RECIPES[recipe]):
            y = model(x)
        with autocast(recipe=RECIPES["mxfp8"]):
            y = model(y)
        return model(y)

    def checkpointed(model, x):
        return run(lambda x: regions(model, x), x)

    assert_same_tensors(train(RECIPES[recipe], checkpointed), train(RECIPES[recipe], regions))


@torchs_ways
def test_a_region_of_the_function_itself_reduces_once(run):
    """Delayed scaling: amaxes are reduced on leaving the first run's region and not again."""

    def region(model, x):
        with autocast(recipe=RECIPES["delayed"]):
            return model(x)

    results = []
    for way in (region, lambda model, x: run(partial(region, model), x)):
        model, found = every_layer(), {}
        for i in range(3):
            x = (torch.linspace(-1, 1, 256).view(4, 64) * 2**i).requires_grad_()
            found |= step(model, x, run=partial(way, model), when=f"step {i}, ")
        results.append(found | recipe_state(model))
    assert_same_tensors(*results)


@pytest.mark.parametrize("run", [*ALONE.values(), *OURS.values()], ids=[*ALONE, *OURS])
@pytest.mark.parametrize("order", [1, -1], ids=["in turn", "in reverse"])
@pytest.mark.parametrize("between", ["delayed", "current"])
def test_microbatches_before_their_backwards(run, order, between):
    """Several forwards, each in a region, one of which may be of another recipe, then the
    backwards: the scales have moved on for the first.
    """
    results = []
    for way in (plain, run):
        model, found, losses = every_layer(), {}, []
        for i, name in enumerate(["delayed", between, "delayed"]):
            x = (torch.linspace(-1, 1, 256).view(4, 64) * 4**i).requires_grad_()
            with autocast(recipe=RECIPES[name]):
                losses.append((i, x, way(model, x).square().sum()))
        for i, x, loss in losses[::order]:
            loss.backward()
            found[f"microbatch {i}"] = x.grad
        results.append(found | {name: p.grad for name, p in model.named_parameters()})
    assert_same_tensors(*results)


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


def test_another_checkpoint_is_refused_where_it_gives_other_codes():
    """Outside of the region, or under scales that may have moved on; inside it, without such scales
    it is right.
    """
    with pytest.raises(UnsupportedError, match=r"outside of that region.*checkpoint_contexts"):
        train(RECIPES["current"], Foreign.apply)
    with pytest.raises(UnsupportedError, match=r"DelayedScaling.*zerocast\.checkpoint"):
        train(RECIPES["delayed"], Foreign.apply, inside=True)
    found, expected = (train(RECIPES["current"], r, inside=True) for r in (Foreign.apply, plain))
    assert_same_tensors(found, expected)


@every_way
def test_a_drawn_input_is_drawn_the_same_again(run):
    """Stochastic rounding of inputs: the second run draws the words of the first."""
    recipe = NVFP4BlockScaling(fp4_quant_fwd_inp=QParams(stochastic_rounding=True))
    assert_same_tensors(train(recipe, run), train(recipe, plain))


class Quantized(torch.autograd.Function):
    """x as it was quantized, whose gradient depends on the codes that were kept."""

    @staticmethod
    def forward(ctx, x, quantizer):
        made = quantizer.quantize(x).dequantize()
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class WithOwnQuantizer(torch.nn.Module):
    """What a user wrote: a quantizer that runs twice, and the state behind it."""

    def __init__(self, recipe):
        super().__init__()
        self._states = [RecipeState.create(recipe, "backward")]
        (self.quantizer,) = self._states[0].make_quantizers()

    def forward(self, x):
        regions.current().register(*self._states)
        return Quantized.apply(2 * Quantized.apply(x, self.quantizer), self.quantizer)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
@pytest.mark.parametrize("way", ["torch's", "layer by layer", "nested"])
def test_quantizers_of_a_users_own_repeat_their_codes(way, recipe):
    """Under the contexts, in checkpoints inside of checkpoints and for two backwards of a graph,
    too: scales that moved on and draws are those of the first run, and nothing is counted twice.
    """
    results = []
    for run in (plain, WAYS[way]):
        model = torch.nn.Sequential(*(WithOwnQuantizer(RECIPES[recipe]) for _ in range(4)))
        x = torch.linspace(-1, 1, 256).view(4, 64).requires_grad_()
        for _ in range(2):
            with autocast(recipe=RECIPES[recipe]):
                y = run(model, x).sum()
            for _ in range(2):
                y.backward(retain_graph=True)
        results.append({"input": x.grad} | recipe_state(model))
    assert results[0]["input"].isfinite().all()
    assert_same_tensors(*results)


def test_a_graph_that_is_kept_can_be_gone_through_twice():
    """retain_graph: the second backward recomputes once more, the same."""
    grads = []
    for run in (plain, nn.checkpoint):
        model, x = every_layer(), torch.ones(4, 64, requires_grad=True)
        for _ in range(2):
            step(model, x, RECIPES["delayed"], partial(run, model))
        with autocast(recipe=RECIPES["delayed"]):
            y = run(model, x).sum()
        with autocast(recipe=RECIPES["delayed"]), torch.no_grad():
            model(100 * x)
        y.backward(retain_graph=True)
        x.grad = None
        y.backward()
        grads.append(x.grad)
    assert_same_bytes(grads[1], grads[0], "input")


@both_modes
def test_outside_of_autocast_it_is_torchs(use_reentrant):
    """Values, gradients and keyword arguments, with quantized weights."""
    model, x = every_layer(RECIPES["nvfp4"]), torch.randn(4, 64, requires_grad=True)
    expected = step(model, x)
    for checkpoint in (nn.checkpoint, torch_checkpoint):
        run = partial(checkpoint, model, use_reentrant=use_reentrant)
        assert_same_tensors(step(model, x, run=run), expected)
    scaled = nn.checkpoint(lambda x, *, by: by * x, x, by=3)
    assert_same_bytes(scaled, 3 * x, "keyword argument")


def test_activations_are_not_kept():
    """What lives between forward and backward is the input, not the codes."""
    sizes = []
    for run in (plain, nn.checkpoint):
        model, x = every_layer(), torch.randn(64, 64, requires_grad=True)
        with kept_for_backward() as kept, autocast(recipe=RECIPES["current"]):
            run(model, x)
        sizes.append(sum(tensor.nbytes for tensor in kept))
    assert sizes[1] < sizes[0] / 5, sizes


@both_modes
def test_an_evaluation_inside_a_checkpoint_records_nothing(use_reentrant):
    """Without gradients the histories stay as they are."""
    model, recipe = every_layer(), RECIPES["delayed"]
    with torch.no_grad(), autocast(recipe=recipe):
        nn.checkpoint(model, torch.randn(4, 64, requires_grad=True), use_reentrant=use_reentrant)
    assert all((m._states[0].amax_history == 0).all() for m in (model[0], model[1], model[3]))


@pytest.mark.slow
@pytest.mark.own_defaults
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_transformers_own_switch_is_enough(recipe):
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
        for batch in map(tokens, range(2)):
            with autocast(recipe=RECIPES[recipe]):
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters()} | {"loss": loss.detach()})
    for result in results[1:]:
        assert_same_tensors(result, results[0])
