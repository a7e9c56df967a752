"""convert swaps what it can, leaves what it must, and says which."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.support.layers import every_recipe
from tests.support.models import Pair
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.weights import FP8, NVFP4, both_recipes
from zerocast.errors import InputError
from zerocast.nn import Linear, convert
from zerocast.tensors import QuantizedTensor, quantize


def pair() -> Pair:
    """Two layers and a norm: [..., 32] -> the same shape."""
    return Pair(32, 64, norm=True)


@every_recipe
def test_every_linear_is_quantized_in_place_and_the_rest_is_untouched(recipe):
    """The modules keep their identity; the output is that of the dequantized weights, and the
    backward runs.
    """
    model = nn.Sequential(nn.Embedding(7, 32), pair(), pair().eval())
    model[1].down.weight.requires_grad_(False)
    original = copy.deepcopy(model)
    modules = list(model.modules())
    report = convert(model, recipe)
    assert report.converted == ("1.up", "1.down", "2.up", "2.down")
    assert report.left == {}
    assert list(model.modules()) == modules
    for name, module in original.named_modules():
        now = model.get_submodule(name)
        assert now.training == module.training
        if isinstance(module, nn.Linear):
            assert type(now) is Linear
            assert_same_storage(now.weight, quantize(module.weight, recipe), name)
            initial = now.weight.get_high_precision_init_val()
            assert_same_bytes(initial, module.weight, name)
            assert initial.device.type == "cpu"
            assert now.weight.requires_grad == module.weight.requires_grad
            assert isinstance(now.weight, nn.Parameter)
            module.weight.data.copy_(now.weight)
        else:
            assert type(now) is type(module)
    assert not isinstance(model[0].weight, QuantizedTensor)
    tokens = torch.arange(7)
    output = model(tokens)
    assert_same_bytes(output, original(tokens), "output")
    output.sum().backward()
    assert model[1].up.weight.grad.shape == (64, 32)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in original.named_parameters()]


def test_a_model_that_is_a_linear_is_converted_itself():
    """Its name is empty, in the report, too."""
    model = nn.Linear(32, 8)
    assert convert(model, FP8).converted == ("",)
    assert type(model) is Linear
    left = convert(nn.Linear(10, 8), NVFP4)
    assert "left: weight [8x10], 90.9 %: NVFP4BlockScaling needs K" in str(left)


def test_filter_fqns_match_by_substring():
    """A layer stays where its fully qualified name contains any of them."""
    model = nn.ModuleDict({"block": pair(), "head": nn.Linear(32, 16)})
    report = convert(model, NVFP4, filter_fqns=["head", "k.up"])
    assert report.converted == ("block.down",)
    assert report.left == {
        "block.up": "its name contains 'k.up' of filter_fqns",
        "head": "its name contains 'head' of filter_fqns",
    }
    assert type(model["head"]) is nn.Linear


def test_a_filter_that_matches_nothing_is_refused_with_near_names():
    """For the layer that was meant would be converted; names of other modules and parameters are
    names, too.
    """
    model = nn.ModuleDict({"block": pair(), "lm_head": nn.Linear(32, 16)})
    with pytest.raises(InputError) as raised:
        convert(model, NVFP4, filter_fqns=["block.norm", "lm_haed"])
    assert str(raised.value) == (
        "each part of a name in filter_fqns must be in one of the model's names, got 'lm_haed', "
        "which is in none of them; correct it, or remove it. 'auto_filter_small_kn' filters by "
        "size. Did you mean 'lm_head' or 'lm_head.weight' or 'lm_head.bias'?"
    )
    assert type(model["lm_head"]) is nn.Linear


def test_a_function_says_which_layers_are_converted():
    """As torchao's module_filter_fn: of a layer and its name, True to convert it."""
    model, seen = nn.ModuleDict({"block": pair(), "head": nn.Linear(32, 16)}), []

    def wanted(module, fqn):
        seen.append((fqn, type(module)))
        return fqn != "head" and module.out_features > 32

    report = convert(model, NVFP4, filter_fqns=wanted)
    assert seen == [(name, nn.Linear) for name in ("block.up", "block.down", "head")]
    assert report.converted == ("block.up",)
    assert report.left["head"] == "filter_fqns, a function, excludes it"


class Adapted(nn.Module):
    """As a layer of peft names its own parts."""

    adapter_layer_names = ("lora_A", "lora_B", "lora_other")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(32, 48)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(16, 48, bias=False)})


def test_adapters_are_not_quantized_and_what_they_adapt_is():
    """Nobody asked for it by converting the model; who converts an adapter itself asks."""
    model = nn.Sequential(Adapted())
    report = convert(model, NVFP4)
    assert report.converted == ("0.base_layer",)
    why = (
        "it is part of an adapter, which is trained in high precision; convert that alone to "
        "quantize it"
    )
    assert report.left == dict.fromkeys(("0.lora_A.default", "0.lora_B.default"), why)
    assert convert(model[0].lora_A, NVFP4).converted == ("default",)


def test_a_layer_that_the_recipe_cannot_hold_stays():
    """K = 10 for NVFP4; FP8 holds it. The report is readable."""
    model = nn.Sequential(nn.Linear(32, 10), nn.Linear(10, 32))
    report = convert(model, NVFP4)
    assert report.converted == ("0",)
    assert "got K = 10 in shape (32, 10)" in report.left["1"]
    assert type(model[1]) is nn.Linear
    lines = str(report).splitlines()
    assert lines[:3] == [
        "1 of 2 linear layers converted, with NVFP4BlockScaling()",
        "682 parameters, 46.9 % held in codes; in memory they take 2.80 kB, 1.35 kB of them codes "
        "and scales",
        "  0.weight [10x32]: held in codes by NVFP4BlockScaling()",
    ]
    assert lines[3].startswith("  left: 1.weight [32x10], 46.9 %: NVFP4BlockScaling needs K, the")
    assert lines[4] == "  left: 2 smaller ones (embeddings, norms, biases), 6.2 %"
    assert convert(nn.Sequential(nn.Linear(10, 32)), FP8).converted == ("0",)


class Special(nn.Linear):
    """Does something else with its weight."""


def _parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))


def _pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(16, 16), "weight", 0.5)


def _hooked() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: Special(16, 16),
            "it is class Special, which may use its weight in another way; put a torch",
        ),
        (_parametrized, "its weight is computed from other parameters"),
        (_pruned, "its weight is computed from other parameters"),
        (_hooked, "its weight has gradient hooks"),
        (lambda: nn.Linear(16, 16, dtype=torch.float64), "its weight is torch.float64"),
        (lambda: Linear(16, 16, recipe=FP8), "it is quantized already"),
    ],
)
def test_what_would_change_its_meaning_stays_with_a_reason(make, reason):
    """The module is not touched and the others are converted."""
    module = make()
    kind, parameters = type(module), list(module.parameters())
    model = nn.Sequential(nn.Linear(16, 16), module)
    report = convert(model, NVFP4)
    assert report.converted == ("0",)
    assert report.left["1"].startswith(reason)
    assert type(module) is kind
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))


def test_multihead_attention_keeps_working():
    """Its output projection is a subclass that torch reads by hand, so it stays."""
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    report = convert(attention, NVFP4)
    assert report.converted == ()
    assert report.left["out_proj"].startswith("it is torch.nn.MultiheadAttention's out_proj; put a")
    x = torch.randn(2, 3, 32)
    assert attention(x, x, x)[0].shape == (2, 3, 32)


def test_hooks_of_the_module_stay_and_run():
    """The module is the same object, so forward hooks and references to it hold."""
    layer, calls = nn.Linear(16, 16), []
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    convert(nn.Sequential(layer), NVFP4)
    layer(torch.ones(1, 16, requires_grad=True)).sum().backward()
    assert calls == ["forward", "backward"]


@both_recipes
def test_tied_linears_stay_tied(recipe):
    """Two layers of one Parameter share the new one, and both contribute to its gradient."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    assert convert(model, recipe).converted == ("0", "1")
    assert model[0].weight is model[1].weight
    assert isinstance(model[0].weight, QuantizedTensor)
    model(torch.randn(3, 32)).sum().backward()
    value = model[0].weight.dequantize().requires_grad_()
    assert len(list(model.parameters())) == 3
    assert model[0].weight.grad.shape == value.shape


def test_a_linear_tied_with_something_else_stays():
    """With an embedding, or with a layer that is filtered: all holders keep the one Parameter."""
    model = nn.ModuleDict({"tokens": nn.Embedding(48, 32), "head": nn.Linear(32, 48, bias=False)})
    model["head"].weight = model["tokens"].weight
    report = convert(model, NVFP4)
    assert report.left == {
        "head": "its weight is tied with tokens.weight, which stays as it is; include=['tokens'] "
        "converts both, or untie them"
    }
    assert model["head"].weight is model["tokens"].weight

    pair = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    pair["b"].weight = pair["a"].weight
    report = convert(pair, NVFP4, filter_fqns=["b"])
    assert report.left["a"] == (
        "its weight is tied with b.weight, which stays as it is; untie them"
    )
    assert pair["a"].weight is pair["b"].weight


def test_a_module_with_two_names_is_converted_once():
    """It is reported under its first name, and a filter on either name holds it."""
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"first": shared, "second": shared})
    assert convert(model, NVFP4, filter_fqns=["second"]).converted == ()
    assert convert(model, NVFP4).converted == ("first",)
    assert model["first"] is model["second"]


def test_gradients_and_attributes_of_the_parameter_are_carried_over():
    """What an optimizer or a framework has put on it."""
    layer = nn.Linear(16, 16)
    layer.weight.grad = torch.ones(16, 16)
    layer.weight.tensor_parallel = True
    convert(layer, NVFP4)
    assert (layer.weight.grad == 1).all()
    assert layer.weight.tensor_parallel


def test_converting_twice_changes_nothing():
    """The second report says so."""
    model = nn.Sequential(nn.Linear(16, 16))
    convert(model, NVFP4)
    weight = model[0].weight
    report = convert(model, FP8)
    assert report.left == {"0": "it is quantized already"}
    assert model[0].weight is weight


def test_adapters_of_peft_are_not_quantized_whichever_comes_first():
    """With the real package: LoRA's own layers stay in high precision, and what they adapt is
    converted, or was before.
    """
    peft = pytest.importorskip("peft", reason="needs the extra [integration]")
    config = peft.LoraConfig(r=16, target_modules=["up"])
    first = peft.get_peft_model(pair(), config)
    report = convert(first, NVFP4)
    layer = first.base_model.model.up
    assert type(layer.base_layer) is Linear
    assert type(layer.lora_A["default"]) is type(layer.lora_B["default"]) is nn.Linear
    assert sorted(name.rpartition("up.")[2] for name in report.left) == [
        "lora_A.default", "lora_B.default",
    ]  # fmt: skip
    second = pair()
    convert(second, NVFP4)
    second = peft.get_peft_model(second, config)
    assert isinstance(second.base_model.model.up.base_layer.weight, QuantizedTensor)
    first(torch.randn(4, 32)).sum().backward()
    assert layer.lora_B["default"].weight.grad is not None
    assert layer.base_layer.weight.grad is None


@pytest.mark.parametrize("weights", ["quantized", "master"])
def test_modules_that_share_a_weight_are_not_converted_one_after_the_other(weights):
    """The first conversion has put another parameter in its place in one of them, whether the
    second converts the other or leaves it; afterwards nothing has been changed.
    """
    head, embedding = nn.Linear(32, 48, bias=False), nn.Embedding(48, 32)
    last = nn.Linear(32, 48, bias=False)
    tied = head.weight = last.weight = embedding.weight
    convert(head, NVFP4, weights=weights)
    for rest in (last, nn.Sequential(embedding, nn.Linear(32, 32))):
        with pytest.raises(InputError, match=r"weight, which was tied with a weight that an earl"):
            convert(rest, NVFP4, weights=weights)
    assert last.weight is embedding.weight is tied
    del head  # and what took the weight's place
    assert convert(last, NVFP4, weights=weights).converted == ("",)
