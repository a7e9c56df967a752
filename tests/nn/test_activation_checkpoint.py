"""Recomputed activations give the gradients of kept ones, bit for bit, or an error that names the
function which does.
"""

from collections import Counter
from functools import cache, partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.support.claims import assert_same_tensors
from tests.support.layers import RECIPES, breaks, every_recipe, kept_for_backward, step
from tests.support.llama import CONTEXTS, HIDDEN_96, checkpoint_activations, llama, tokens
from tests.support.models import every_layer, recipe_state
from tests.support.same_bytes import assert_same_bytes
from zerocast import nn
from zerocast.errors import UnsupportedError
from zerocast.nn import recompute, regions
from zerocast.nn.autocast import autocast
from zerocast.nn.recipe_state import RecipeState
from zerocast.nn.recompute import checkpoint_contexts
from zerocast.nn.regions import GRAPHS_HOLD_PRODUCTS
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


def selective(function, x):
    """torch's selective checkpoint, which as torchtitan's keeps every other product."""
    counts = Counter()  # of products, in the first run and in the second

    def keeps_every_other_product(ctx, op, *args, **kwargs):
        if op is torch.ops.aten.mm.default:
            counts[ctx.is_recompute] += 1
            if counts[ctx.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, keeps_every_other_product)
    return torch_checkpoint(function, x, use_reentrant=False, context_fn=contexts)


ALONE = {
    "torch's alone": partial(torch_checkpoint, use_reentrant=False),
    "torch's alone, reentrant": partial(torch_checkpoint, use_reentrant=True),
    "selective": selective,
    "accelerate's": partial(layer_by_layer, checkpoint=lambda m, x: checkpoint_wrapper(m)(x)),
    "foreign": Foreign.apply,
}
"""Functions of others, which know nothing of regions and states."""
OURS = {"ours": nn.checkpoint, "ours, reentrant": partial(nn.checkpoint, use_reentrant=True)}
KEEPING = OURS | {
    "torch's": partial(torch_checkpoint, use_reentrant=False, context_fn=checkpoint_contexts),
    "layer by layer": layer_by_layer,
    "nested": nested,
}
"""Those that keep region and state."""
WAYS = ALONE | KEEPING
keeping = pytest.mark.parametrize("run", KEEPING.values(), ids=KEEPING)
alone = pytest.mark.parametrize("run", ALONE.values(), ids=ALONE)
both_modes = pytest.mark.parametrize("use_reentrant", [True, False])


def spread(end=1.0):
    """[4, 64] values up to ``end``, whose gradient is asked for."""
    return torch.linspace(-1, end, 256).view(4, 64).requires_grad_()


def assert_as_plain(found, run):
    """``found(way)`` with ``run`` is what it is without recomputation."""
    assert_same_tensors(found(run), found(plain))


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


DRAWN_INPUTS = NVFP4BlockScaling(fp4_quant_fwd_inp=QParams(stochastic_rounding=True))
"""The second run draws the words of the first."""

# Every recipe in every way that it can have. Recipes with state meet the backward in both places,
# the others in one.
IN_BOTH_PLACES = [
    pytest.param(recipe, run, inside, id=f"{name}-{way}-{'inside' if inside else 'after'}")
    for i, (name, recipe) in enumerate([*RECIPES.items(), ("drawn inputs", DRAWN_INPUTS)])
    for j, (way, run) in enumerate((KEEPING if recipe.has_forward_state else WAYS).items())
    for inside in ((True, False) if recipe.has_forward_state else ((i + j) % 2 == 0,))
]


@pytest.mark.parametrize(("recipe", "run", "inside"), IN_BOTH_PLACES)
def test_gradients_and_state_are_those_without_recomputation(recipe, run, inside):
    """Delayed scales that moved on, stochastic rounding of gradients, and all the others; the
    backward inside the region or after it.
    """
    assert_same_tensors(train(recipe, run, inside=inside), trained_plainly(recipe, inside=inside))


@alone
@pytest.mark.parametrize("inside", [False, True])
def test_state_of_the_forward_needs_the_function_that_keeps_it(run, inside):
    """Delayed scaling and stochastic rounding of inputs, after the region and inside of it."""
    for recipe in (RECIPES["delayed"], DRAWN_INPUTS):
        with pytest.raises(UnsupportedError, match=r"zerocast\.nn\.checkpoint keeps .* context_fn"):
            train(recipe, run, inside=inside)


@every_recipe
def test_checkpoints_inside_of_checkpoints(recipe):
    """Of several kinds, each layer three times."""
    ways = list((KEEPING if recipe.has_forward_state else WAYS).values())
    one, other, third = ways[0], ways[1], ways[-1]

    def checkpointed(model, x):
        first, rest = model[:2], model[2:]
        y = one(lambda x: rest(other(first, x)), x) if third is not nested else third(model, x)
        return other(lambda y: one(model, one(model, y)), y)

    expected = train(recipe, lambda model, x: model(model(model(x))))
    assert_same_tensors(train(recipe, checkpointed), expected)


# Of the functions above those that take any function.
of_any_function = pytest.mark.parametrize(
    "run", [ALONE[name] for name in ALONE if name != "accelerate's"], ids=lambda _: ""
)


@of_any_function
def test_regions_of_the_function_itself_are_entered_again(run):
    """Each layer under several, of which one is not enabled."""

    def regions(model, x):
        with autocast(enabled=False, recipe=RECIPES["current"]):
            y = model(x)
        with autocast(recipe=RECIPES["mxfp8"]):
            return model(y)

    def checkpointed(model, x):
        return run(lambda x: regions(model, x), x)

    for recipe in (None, RECIPES["current"]):
        assert_same_tensors(train(recipe, checkpointed), train(recipe, regions))


@of_any_function
@pytest.mark.parametrize("other", [None, "mxfp8"])
def test_layers_that_ran_under_two_recipes_are_refused(run, other):
    """Between two backwards, where the region has been left: either could be meant."""
    model, x = every_layer(), torch.ones(4, 64, requires_grad=True)
    with autocast(recipe=RECIPES["current"]):
        loss = run(model, x).sum()
    with autocast(enabled=other is not None, recipe=RECIPES[other or "current"]):
        loss = loss + run(model, x).sum()
    with pytest.raises(UnsupportedError, match="Float8CurrentScaling and .*nn.checkpoint"):
        loss.backward()


@of_any_function
def test_phases_of_training_under_other_recipes(run):
    """One recipe a step, high precision among them, and an evaluation before each backward. First
    runs without gradients leave no trace in the graph, so with these the second recipe is refused.
    """
    results = []
    for way in (plain, run):
        model, found = every_layer(), {}
        for i, name in enumerate(["current", None, "mxfp8", "nvfp4", None, "current"]):
            x = spread()
            with autocast(enabled=name is not None, recipe=RECIPES[name or "current"]):
                loss = way(model, x).square().sum()
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            if i and way in (ALONE["torch's alone, reentrant"], ALONE["foreign"]):
                with pytest.raises(UnsupportedError, match="and high precision.*nn.checkpoint"):
                    loss.backward()
                return
            loss.backward()
            found[f"step {i}"] = x.grad
        results.append(found | {name: p.grad for name, p in model.named_parameters()})
    assert_same_tensors(*results)


@of_any_function
@pytest.mark.parametrize("between", ["evaluation", "step", "step of another recipe"])
def test_a_graph_that_is_open_while_another_is_gone_through(run, between):
    """Its recipe is known, or the backward raises: never is it computed again under another."""
    results = []
    for way in (plain, run):
        model = every_layer()
        xs = [spread(i) for i in (1, 2, 3)]
        with autocast(recipe=RECIPES["current"]):
            first, second = (way(model, x).square().sum() for x in xs[:2])
        first.backward()
        with autocast(enabled="another" in between, recipe=RECIPES["mxfp8"]):
            model.train(between != "evaluation")
            with torch.set_grad_enabled(between != "evaluation"):
                other = model(xs[2]).sum()
        model.train()
        if way is run and between != "evaluation":
            with pytest.raises(UnsupportedError, match="Float8CurrentScaling and"):
                second.backward()
            del other
        second.backward() if way is plain or between == "evaluation" else None
        results.append([x.grad for x in xs[:2]])
    if between == "evaluation":
        assert_same_tensors(*(dict(enumerate(each)) for each in results))


def test_a_region_that_only_the_backward_is_in(monkeypatch):
    """What ran outside of regions is not quantized when it is computed again in one, the first of
    its process.
    """
    monkeypatch.setattr(regions, "were_entered", False)
    y = torch_checkpoint(nn.Linear(64, 64), spread(), use_reentrant=True)
    with (
        autocast(recipe=RECIPES["current"]),
        pytest.raises(UnsupportedError, match=r"zerocast\.nn\.checkpoint"),
    ):
        y.square().sum().backward()


@of_any_function
def test_models_in_evaluation_mode_are_recomputed_quantized(run):
    """A reentrant first run then looks like an evaluation."""

    def second_step(way):
        model, x = every_layer().eval(), spread()
        step(model, x, RECIPES["current"], partial(way, model))
        return step(model, x, RECIPES["current"], partial(way, model))

    assert_as_plain(second_step, run)


@breaks
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_function_is_not_recomputed_unquantized(use_reentrant, inside):
    """Left by its region it would be another graph, of plain products: an error, or right."""
    torch._dynamo.reset()
    model = every_layer()[1:3]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=GRAPHS_HOLD_PRODUCTS)
    run = partial(torch_checkpoint, use_reentrant=use_reentrant)
    x = spread()
    options = {"recipe": RECIPES["current"], "inside": inside}
    expected = step(model, x, **options)
    if inside:
        assert_same_tensors(step(model, x, run=partial(run, compiled), **options), expected)
    else:
        with pytest.raises(UnsupportedError, match=r"zerocast\.nn\.checkpoint"):
            step(model, x, run=partial(run, compiled), **options)
    found = step(model, x, run=partial(nn.checkpoint, compiled), **options)
    assert_same_tensors(found, expected)
    with pytest.raises(UnsupportedError, match=r"zerocast\.nn\.checkpoint"):
        step(model, x, run=partial(run, compiled))  # nobody knows whether it was quantized
    found = step(model, x, run=partial(nn.checkpoint, compiled))
    assert_same_tensors(found, step(model, x))


@breaks
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_nor_is_one_whose_graph_leaves_quantized_layers_out(use_reentrant, monkeypatch):
    """As under a recipe with state; also if no graph has held a quantized product before."""
    torch._dynamo.reset()
    monkeypatch.setattr(recompute, "_compiled", set())
    model, x = every_layer()[1:], spread()
    compiled = torch.compile(model, backend="aot_eager")
    run = partial(torch_checkpoint, compiled, use_reentrant=use_reentrant)
    with pytest.raises(UnsupportedError, match=r"a compiled function .* zerocast\.nn\.checkpoint"):
        step(model, x, RECIPES["delayed"], run)


def test_two_uses_of_a_layer_draw_different_numbers():
    """Whatever recipes they run under, and however a step is recomputed."""
    one = RECIPES["nvfp4"]
    other = NVFP4BlockScaling(disable_2d_quantization=True)
    for run in (plain, ALONE["torch's alone"], ALONE["selective"], *OURS.values()):
        model = torch.nn.Sequential(nn.Linear(64, 64, name="layer"))
        for uses in (3, 6):
            x = torch.ones(16, 64, requires_grad=True)
            for recipe in (one, other, one):
                with autocast(recipe=recipe):
                    y = run(model, x)
                y.square().sum().backward()
            counter = model[0]._states[1].tensors["rounding_counter"]
            assert counter[:, 1].tolist() == [uses, 0]


@keeping
@pytest.mark.parametrize("order", [1, -1], ids=["in turn", "in reverse"])
@pytest.mark.parametrize("between", ["delayed", "current"])
def test_microbatches_before_their_backwards(run, order, between):
    """Several forwards, each in a region, one of which may be of another recipe, then the
    backwards: the scales have moved on for the first.
    """

    def found(way):
        model, xs, losses = every_layer(), [spread(4.0**i) for i in range(3)], []
        for x, name in zip(xs, ["delayed", between, "delayed"], strict=True):
            with autocast(recipe=RECIPES[name]):
                losses.append(way(model, x).square().sum())
        for loss in losses[::order]:
            loss.backward()
        grads = {f"microbatch {i}": x.grad for i, x in enumerate(xs)}
        return grads | {name: p.grad for name, p in model.named_parameters()}

    assert_as_plain(found, run)


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

    def found(run):
        model = torch.nn.Sequential(*(WithOwnQuantizer(RECIPES[recipe]) for _ in range(4)))
        x = spread()
        for _ in range(2):
            with autocast(recipe=RECIPES[recipe]):
                y = run(model, x).sum()
            for _ in range(2):
                y.backward(retain_graph=True)
        assert x.grad.isfinite().all()
        return {"input": x.grad} | recipe_state(model)

    assert_as_plain(found, WAYS[way])


def test_a_graph_that_is_kept_can_be_gone_through_twice():
    """retain_graph: the second backward recomputes once more, the same."""

    def found(run):
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
        return {"input": x.grad}

    assert_as_plain(found, nn.checkpoint)


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
    """Llama with gradient_checkpointing_enable, as its trainer calls it: loss and gradients are
    those without checkpoints; under a recipe with state of the forward with our contexts.
    """
    pytest.importorskip("transformers")
    results = []
    alone = () if RECIPES[recipe].has_forward_state else (None, {"use_reentrant": True})
    for options in ("none", *alone, CONTEXTS):
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
