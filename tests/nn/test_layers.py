"""Layers under autocast: state, what is kept between forward and backward, and drop-in manners."""

import copy
import itertools
from functools import partial

import pytest
import torch

from tests.support.claims import assert_same_tensors
from tests.support.layers import (
    RECIPES,
    every_recipe,
    gradients,
    kept_for_backward,
    recorded_products,
    step,
    to_nearest,
)
from tests.support.same_bytes import assert_same_bytes
from tests.support.weights import note_cast, through_a_file
from zerocast import nn
from zerocast.errors import ChangedWeightError, InputError
from zerocast.nn.autocast import autocast, model_init
from zerocast.recipes import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from zerocast.tensors import CastVersion, QuantizedTensor, quantize

DELAYED, CURRENT = RECIPES["delayed"], RECIPES["current"]

LAYERS = {
    "Linear": lambda **o: nn.Linear(32, 64, **o),
    "LayerNormLinear": lambda **o: nn.LayerNormLinear(32, 64, **o),
    "LayerNormMLP": lambda **o: nn.LayerNormMLP(32, 64, **o),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)
both_regions = pytest.mark.parametrize("region", [True, False], ids=["inside", "outside"])


def make(kind: str, seed: int = 0, **options: object) -> torch.nn.Module:
    """A layer from 32 features; the same seed gives the same parameters."""
    torch.manual_seed(seed)
    return LAYERS[kind](**options)


# --- scale_inv belongs to the data ---


@every_layer
@every_recipe
def test_the_backward_reads_nothing_that_the_state_became_since(kind, recipe):
    """Between forward and backward the state advances, is overwritten by nonsense, and the layer
    runs under another recipe. The backward of the first forward does not notice.
    """
    recipe = to_nearest(recipe)
    x = torch.randn(6, 32, requires_grad=True)
    undisturbed, layer = make(kind), make(kind)
    expected = step(undisturbed, x, recipe)
    x.grad = None
    with autocast(recipe=recipe):
        y = layer(x)
    forward, _ = layer._states
    with torch.no_grad(), autocast(recipe=recipe, calibrating=True):
        layer(1000 * x)  # leaving it advances histories and scales
    for tensor in forward.tensors.values():
        tensor.fill_(7)
    with torch.no_grad(), autocast(recipe=Float8CurrentScaling(use_power_2_scales=True)):
        layer(x)
    y.square().sum().backward()
    assert_same_tensors(gradients(layer, x, y), expected)


@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_no_scale_is_copied_and_no_high_precision_operand_is_kept(recipe):
    """Autograd saves codes and scales of the input and of a weight quantized on the fly: for each
    its columnwise codes and the very scale that was stored with them.
    """
    layer, x = make("Linear"), torch.randn(6, 32, requires_grad=True)
    with kept_for_backward() as saved, autocast(recipe=recipe):
        layer(x)
    shapes = sorted((str(t.dtype), tuple(t.shape)) for t in saved)
    assert shapes == [
        ("torch.float32", (1,)),
        ("torch.float32", (1,)),
        ("torch.uint8", (32, 6)),
        ("torch.uint8", (32, 64)),
    ]


@every_layer
@both_regions
@pytest.mark.parametrize("by", ["cast", "copy_"])
def test_a_written_weight_between_forward_and_backward_is_an_error(kind, region, by):
    """A quantized weight is kept by reference, so its codes must not change: by a cast, which
    torch's version counter does not see, or by a copy_, which it does.
    """
    layer, x = make(kind, recipe=CURRENT), torch.randn(4, 32, requires_grad=True)
    weight = next(p for p in layer.parameters() if isinstance(p, QuantizedTensor))
    clock = CastVersion(rebuild_on_use=True)
    weight.quantized_storage.writes.watch(clock)
    with autocast(enabled=region, recipe=CURRENT):
        y = layer(x)
    if by == "cast":
        note_cast(clock)
    else:
        weight.data.copy_(torch.ones(weight.shape))
    with pytest.raises(ChangedWeightError, match=r"the weight \(64, 32\) .* been written since"):
        y.sum().backward()
    step(layer, x, CURRENT if region else None)


# --- state ---


@every_layer
def test_a_layer_that_runs_twice_in_a_region_counts_its_largest_amax(kind):
    """And both runs' gradients add up."""
    x, larger = torch.randn(4, 32), 3 * torch.randn(4, 32)
    apart = [make(kind), make(kind)]
    for layer, data in zip(apart, (x, larger), strict=True):
        with autocast(recipe=DELAYED):
            layer(data).sum().backward()
    twin = make(kind)
    with autocast(recipe=DELAYED):
        (twin(x).sum() + twin(larger).sum()).backward()
    amaxes = [layer._states[0].amax_history[:, 0] for layer in apart]
    history = twin._states[0].amax_history
    assert_same_bytes(history[:, 0], torch.maximum(*amaxes), "amaxes")
    assert (history[:, 1:] == 0).all(), "one region is one entry"
    for name, parameter in twin.named_parameters():
        expected = sum(layer.get_parameter(name).grad for layer in apart)
        torch.testing.assert_close(parameter.grad, expected)


def test_gradients_accumulate_over_backwards():
    """Two backwards without zero_grad give the sum; .grad is plain."""
    layer, x = make("Linear"), torch.randn(6, 32, requires_grad=True)
    once = step(layer, x, CURRENT)
    with autocast(recipe=CURRENT):
        y = layer(x)
    y.square().sum().backward()
    assert type(layer.weight.grad) is torch.Tensor
    assert_same_bytes(layer.weight.grad, 2 * once["weight"], "weight")
    assert_same_bytes(x.grad, 2 * once["input"], "input")


@every_layer
@pytest.mark.parametrize("recipe", [CURRENT, RECIPES["mxfp8"]], ids=["current", "mxfp8"])
def test_a_recipe_without_memory_adds_nothing_to_a_state_dict(kind, recipe):
    """So dictionaries are those of layers that never ran under autocast, and load strictly."""
    layer, fresh = make(kind), make(kind, seed=1)
    step(layer, torch.randn(4, 32, requires_grad=True), recipe)
    assert layer.state_dict().keys() == fresh.state_dict().keys()
    assert not any("extra" in key for key in layer.state_dict())
    fresh.load_state_dict(layer.state_dict())
    remembers = make(kind)
    step(remembers, torch.randn(4, 32, requires_grad=True), DELAYED)
    remembers.load_state_dict(layer.state_dict())
    fresh.load_state_dict(remembers.state_dict())


@every_layer
@every_recipe
@pytest.mark.parametrize("copied", [copy.deepcopy, partial(through_a_file, weights_only=False)])
def test_a_copy_has_a_state_of_its_own(kind, recipe, copied):
    """Deep, or saved and loaded as a whole module: it goes on as the original does, and what it
    then learns stays its own.
    """
    layer, x = make(kind), torch.randn(6, 32, requires_grad=True)
    step(layer, x, recipe)
    twin = copied(layer)
    assert_same_tensors(step(twin, x, recipe), step(layer, x, recipe))
    step(twin, (100 * x.detach()).requires_grad_(), recipe)
    if layer._states[0].is_delayed:
        assert layer._states[0].amax_history.max() < twin._states[0].amax_history.max()


def test_calibration_records_what_quantizing_would_and_changes_no_result():
    """Amaxes of input, weight and gradient, with the layer in high precision."""
    layer, twin, x = make("Linear"), make("Linear"), torch.randn(6, 32, requires_grad=True)
    plain = torch.nn.Linear(32, 64)
    plain.load_state_dict(layer.state_dict())
    grad = torch.randn(6, 64)
    for module, region in (
        (layer, autocast(enabled=False, recipe=DELAYED, calibrating=True)),
        (twin, autocast(recipe=DELAYED)),
        (plain, autocast(enabled=False)),
    ):
        with region:
            y = module(x)
            y.backward(grad)
        if module is layer:
            output, weight_grad = y.detach(), layer.weight.grad.clone()
    assert_same_bytes(output, y.detach(), "output")
    assert_same_bytes(weight_grad, plain.weight.grad, "gradient of the weight")
    for own, other in zip(layer._states, twin._states, strict=True):
        history = own.amax_history[:, 0]
        assert_same_bytes(history, other.amax_history[:, 0], f"{own.mode} amaxes")
        assert history[0] > 0


# --- what a layer is to its surroundings ---


@every_layer
@every_recipe
def test_autocast_disabled_is_high_precision(kind, recipe):
    """Inside an enabled region, too; a quantized weight then is decoded."""
    layer, x = make(kind), torch.randn(6, 32)
    expected = layer(x)
    with autocast(recipe=recipe), autocast(enabled=False):
        assert_same_bytes(layer(x), expected, "output")
    assert layer._states is None


@both_regions
@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)))
def test_only_the_gradients_asked_for_are_made(needs, primary, region, monkeypatch):
    """No product is computed for the others, and without any there is no graph."""
    layer = make("Linear", recipe=CURRENT if primary else None)
    x = torch.randn(4, 32, requires_grad=needs[0])
    layer.weight.requires_grad_(needs[1])
    layer.bias.requires_grad_(needs[2])
    with recorded_products(monkeypatch) as made:
        with autocast(enabled=region, recipe=CURRENT):
            y = layer(x)
            with torch.no_grad():
                assert not layer(x).requires_grad
        assert y.requires_grad == any(needs)
        if any(needs):
            y.sum().backward()
    assert len(made) == (2 + needs[0] + needs[1] if region else 0)
    for tensor, needed in zip((x, layer.weight, layer.bias), needs, strict=True):
        assert (tensor.grad is not None) == needed


@every_layer
@both_regions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("primary", [True, False])
def test_torch_autocast_decides_the_dtype(kind, region, dtype, primary):
    """Output in its dtype, gradients in the parameters' own, in a region or outside."""
    layer = make(kind, recipe=CURRENT if primary else None)
    x = torch.randn(6, 32, requires_grad=True)
    with autocast(enabled=region, recipe=CURRENT), torch.autocast("cpu", dtype):
        y = layer(x)
        y.sum().backward()
    assert y.dtype == dtype
    assert {p.grad.dtype for p in layer.parameters()} == {x.grad.dtype} == {torch.float32}
    with autocast(enabled=region, recipe=CURRENT):
        exact = layer(x)
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.1)


@every_layer
@pytest.mark.parametrize(
    "x",
    [*(torch.zeros(*s, 32) for s in ((), (5,), (2, 3), (2, 1, 3), (0,), (2, 0))),
     torch.zeros(32, 6).t()],
    ids=lambda x: f"{[*x.shape]}",
)  # fmt: skip
def test_inputs_of_any_shape_and_strides(kind, x):
    """One vector, a batch, a batch of sequences, nothing at all, transposed in memory; the rows are
    quantized alone. The gradient of a sum is an expanded one.
    """
    layer, x = make(kind), torch.randn_like(x).requires_grad_()
    with autocast(recipe=CURRENT):
        y = layer(x)
        rows = layer(x.detach().reshape(-1, 32))
    y.sum().backward()
    assert y.shape[:-1] == x.shape[:-1]
    assert x.grad.shape == x.shape
    assert_same_bytes(y.reshape(rows.shape), rows, "output")


def test_a_shape_that_only_gradients_have_is_no_obstacle_without_them():
    """Of the gradient of the output, which a recipe cannot hold; with gradients the forward is
    refused (:mod:`tests.nn.test_refusals`).
    """
    narrow, x = nn.Linear(32, 10), torch.randn(2, 32)
    with autocast(recipe=MXFP8BlockScaling()), torch.no_grad():
        assert narrow(x).shape == (2, 10)
    with autocast(recipe=CURRENT):
        assert narrow(x).shape == (2, 10)


@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_a_quantized_output_is_multiplied_by_the_next_layer_as_it_is(recipe):
    """Its codes are the cast of the ordinary output; its gradient flows back."""
    first, second = make("Linear"), nn.Linear(64, 16)
    twin = make("Linear")
    x = torch.randn(2, 3, 32, requires_grad=True)
    with autocast(recipe=recipe):
        y = first(x, fp8_output=True)
        plain = twin(x.detach())
        out = second(y)
    assert isinstance(y, QuantizedTensor)
    assert y.shape == (2, 3, 64)
    assert_same_bytes(y.rowwise_data, quantize(plain, recipe.for_role("output")).rowwise_data, "y")
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad is not None for p in (*first.parameters(), *second.parameters()))
    with pytest.raises(InputError, match="needs zerocast.autocast"):
        first(x, fp8_output=True)


def test_return_layernorm_output_gives_what_the_norm_made():
    """Under autocast and outside, with a gradient of its own."""
    torch.manual_seed(0)
    layer = nn.LayerNormLinear(32, 16, return_layernorm_output=True)
    x = torch.randn(2, 3, 32, requires_grad=True)
    _, expected = layer(x)
    with autocast(recipe=CURRENT):
        _, normed = layer(x)
    torch.testing.assert_close(normed, expected)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (normed, expected)]
    torch.testing.assert_close(*grads)
    mlp = nn.LayerNormMLP(32, 64, return_layernorm_output=True)
    with autocast(recipe=CURRENT):
        assert mlp(x)[1].shape == x.shape


# --- model_init ---


@pytest.mark.parametrize("preserve", [True, False])
@every_layer
@every_recipe
def test_model_init_makes_quantized_weights(kind, recipe, preserve):
    """From the numbers that the layer has without it, kept where asked for; biases and norms stay
    in high precision. Nested and disabled, it does not.
    """
    plain = make(kind)
    with model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        layer = make(kind)
        with model_init(enabled=False):
            assert not any(isinstance(p, QuantizedTensor) for p in make(kind).parameters())
    for (name, parameter), value in zip(layer.named_parameters(), plain.parameters(), strict=True):
        is_weight = name in ("weight", "fc1_weight", "fc2_weight")
        assert isinstance(parameter, QuantizedTensor) == is_weight
        if is_weight:
            expected = quantize(value, recipe)
            assert_same_bytes(parameter.rowwise_data, expected.rowwise_data, name)
            assert hasattr(parameter, "get_high_precision_init_val") == preserve
            if preserve:
                assert_same_bytes(parameter.get_high_precision_init_val(), value, name)
        else:
            assert_same_bytes(parameter, value, name)
    step(layer, torch.randn(4, 32, requires_grad=True), recipe)


@every_layer
def test_reset_parameters_draws_anew(kind):
    """As the constructor does from the same seed, quantized or not."""
    for recipe in (None, CURRENT):
        layer, again = make(kind, seed=3, recipe=recipe), make(kind, seed=4, recipe=recipe)
        torch.manual_seed(3)
        again.reset_parameters()
        for (name, a), b in zip(layer.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(a, b), name


def test_layers_are_named_and_sized_as_in_transformer_engine():
    """Parameters, shapes, repr."""
    mlp = nn.LayerNormMLP(32, 64, activation="swiglu", normalization="RMSNorm")
    assert {n: tuple(p.shape) for n, p in mlp.named_parameters()} == {
        "layer_norm_weight": (32,),
        "fc1_weight": (128, 32),
        "fc1_bias": (128,),
        "fc2_weight": (32, 64),
        "fc2_bias": (32,),
    }
    layer = nn.LayerNormLinear(32, 16, bias=False, zero_centered_gamma=True)
    names = ["layer_norm_weight", "layer_norm_bias", "weight"]
    assert [n for n, _ in layer.named_parameters()] == names
    assert (layer.layer_norm_weight == 0).all()
    assert "normalization='LayerNorm', eps=1e-05, zero_centered_gamma=True" in repr(layer)
    assert "activation='swiglu'" in repr(mlp)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_stand_where_torchs_stand(kind):
    """Same constructor, names, repr and results; state_dicts are exchanged."""
    ours, torchs = getattr(nn, kind)(32), getattr(torch.nn, kind)(32)
    assert isinstance(ours, getattr(torch.nn, kind))
    assert repr(ours) == repr(torchs)
    torch.nn.init.normal_(torchs.weight)
    ours.load_state_dict(torchs.state_dict())
    x = torch.randn(2, 3, 32)
    assert_same_bytes(ours(x), torchs(x), "output")
    assert getattr(nn, kind)([3, 32], elementwise_affine=False)(x).shape == x.shape
    assert (getattr(nn, kind)(32, zero_centered_gamma=True).weight == 0).all()


def test_delayed_scaling_of_another_configuration_starts_anew():
    """What one recipe remembers is not another's."""
    layer, x = make("Linear"), torch.randn(4, 32, requires_grad=True)
    step(layer, x, DELAYED)
    step(layer, x, DelayedScaling(amax_history_len=2))
    assert layer._states[0].amax_history.shape == (3, 2)


def test_convert_names_layers_for_stochastic_rounding():
    """Those that have no name; so two layers draw different words."""
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 32), nn.LayerNormMLP(32, 64), nn.Linear(32, 32, name="head")
    )
    nn.convert(model, CURRENT)
    assert [module.name for module in model] == ["0", "1", "head"]
    with autocast(recipe=NVFP4BlockScaling()):
        model(torch.randn(4, 32))
    hashes = [int(module._states[1].tensors["rounding_counter"][0, 0]) for module in model]
    assert len(set(hashes)) == 3


def test_convert_can_leave_weights_in_high_precision():
    """They are the same parameters, quantized on the fly under autocast; tied ones, too."""
    model = torch.nn.Sequential(torch.nn.Embedding(7, 32), torch.nn.Linear(32, 7, bias=False))
    model[1].weight = model[0].weight
    report = nn.convert(model, CURRENT, weights="high_precision")
    assert report.converted == ("1",)
    assert model[1].weight is model[0].weight
    assert type(model[1]) is nn.Linear
    with autocast(recipe=CURRENT):
        model(torch.arange(7)).sum().backward()
    assert model[0].weight.grad.shape == (7, 32)
    assert nn.convert(model, RECIPES["nvfp4"]).left.keys() == {"1"}  # tied


@every_recipe
@pytest.mark.parametrize("weights", RECIPES)
def test_weights_of_one_recipe_under_autocast_of_another(recipe, weights):
    """The products are those of the operands as they are quantized, whatever each is."""
    layer, x = make("Linear", recipe=RECIPES[weights]), torch.randn(4, 32, requires_grad=True)
    found = step(layer, x, recipe)
    plain = torch.nn.functional.linear(x, layer.weight.dequantize(), layer.bias)
    torch.testing.assert_close(found["output"], plain.detach(), rtol=0.3, atol=0.5)


@every_layer
@every_recipe
def test_a_layer_that_met_its_recipe_in_inference_mode_trains_on(kind, recipe):
    """Its state is not frozen by that, and records nothing of it."""
    layer, x = make(kind), torch.randn(4, 32, requires_grad=True)
    with torch.inference_mode(), autocast(recipe=recipe):
        layer(100 * x)
    twin = make(kind)
    for _ in range(2):
        assert_same_tensors(step(layer, x, recipe), step(twin, x, recipe))
