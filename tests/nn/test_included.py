"""convert(include=...): weights of modules that are no linear layers, by name."""

import copy

import pytest
import torch
from torch import nn

import zerocast
from tests.support.claims import message_of
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes
from zerocast.errors import InputError
from zerocast.nn import convert
from zerocast.tensors import QuantizedTensor

NVFP4, CURRENT = RECIPES["nvfp4"], RECIPES["current"]


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is [in, out]."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Experts(nn.Module):
    """Three experts, with a bias [3, 48] that is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 48, 32) * torch.logspace(-2, 2, 3).view(3, 1, 1))
        self.up_bias = nn.Parameter(torch.randn(3, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(x @ self.up[i].t() + self.up_bias[i] for i in range(3))


class Model(nn.Module):
    """Tokens -> a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"experts": Experts(), "conv": Conv1D(32, 48), "norm": nn.LayerNorm(32)})
            for _ in range(2)
        )
        self.head = nn.Linear(32, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block["norm"](x + block["conv"](block["experts"](x)))
        return self.head(x).square().mean()


def model() -> Model:
    """The same at every call."""
    torch.manual_seed(0)
    return Model()


TOKENS = torch.arange(40).view(2, 20)
ALL = ["embed", "blocks.*.experts", "blocks.?.conv"]


@pytest.mark.parametrize("recipe", [NVFP4, CURRENT], ids=str)
def test_included_modules_compute_with_the_values_of_their_codes(recipe):
    """Loss and gradients are those of plain parameters of these values: each matrix quantized by
    itself, under every recipe, and nothing of the modules changed but the parameters.
    """
    converted, plain = model(), model()
    report = convert(converted, recipe, include=ALL, strict=True)
    weights = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("experts.up", "conv.weight")]
    assert report.included == ("embed.weight", *weights)
    assert str(report).startswith("1 of 1 linear layers converted")
    assert "and 5 weights of other modules" in str(report)
    for name, parameter in plain.named_parameters():
        if name in (*report.included, "head.weight"):
            given = parameter.detach().clone()
            with torch.no_grad():
                for matrix in parameter if parameter.dim() > 2 else [parameter]:
                    matrix.copy_(zerocast.quantize(matrix, recipe).dequantize())
            weight = converted.get_parameter(name)
            assert isinstance(weight, QuantizedTensor)
            assert_same_bytes(weight.get_high_precision_init_val(), given, name)
    losses = [each(TOKENS) for each in (converted, plain)]
    assert_same_bytes(losses[0], losses[1], "loss")
    for loss in losses:
        loss.backward()
    for name, parameter in plain.named_parameters():
        assert_same_bytes(converted.get_parameter(name).grad, parameter.grad, f"grad of {name}")


def test_what_is_not_named_stays_as_it_is():
    """Also biases of experts, norms, and modules whose name a name is only a part of."""
    converted, plain = model(), model()
    report = convert(converted, NVFP4, include=["blocks.1.experts"])
    assert report.included == ("blocks.1.experts.up",)
    for name, parameter in plain.named_parameters():
        if name not in (*report.included, "head.weight"):
            assert_same_bytes(converted.get_parameter(name), parameter, name)


def test_one_parameter_can_be_named():
    """By its own name: a matrix that no pattern of modules takes, too."""
    names = ["blocks.0.experts.up_bias", "blocks.0.conv.weight"]
    assert convert(model(), NVFP4, include=names).included == tuple(names)
    report = convert(model(), NVFP4, include=["blocks.0.conv.bias"])
    assert list(report.left) == ["blocks.0.conv.bias"]


class Odd(nn.Module):
    """What no recipe of blocks holds, beside what one holds."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 16, 40))
        self.conv = nn.Conv2d(16, 16, 16)
        self.renormed = nn.Embedding(8, 32, max_norm=1.0)
        self.linear = nn.Linear(40, 8)
        self.integers = nn.Parameter(torch.zeros(2, 16, 32, dtype=torch.int8), requires_grad=False)


def test_the_report_says_why_what_was_asked_for_is_left():
    """By name and reason, also in the coverage; with strict it is an error, and nothing is
    changed.
    """
    odd = Odd()
    before = {name: id(p) for name, p in odd.named_parameters()}
    include = ["", "conv", "renormed"]
    message = message_of(InputError, lambda: convert(odd, NVFP4, include=include, strict=True))
    assert message.startswith(
        "strict=True needs every linear layer that filter_fqns does not leave out, and every "
        "weight that include names, to be converted, and 5 cannot be: linear: NVFP4BlockScaling "
        "needs K, the last dimension, to be a multiple of 16"
    )
    assert {name: id(p) for name, p in odd.named_parameters()} == before
    report = convert(odd, NVFP4, include=include)
    assert report.included == ()
    reasons = {
        "linear": "multiple of 16",
        "experts": "multiple of 16",
        "integers": "its weight is torch.int8, and a quantized one presents FP32, BF16 or FP16",
        "conv.weight": "it belongs to class Conv2d and has no matrices that a forward multiplies",
        "renormed.weight": "its module writes it in every forward; set its max_norm to None",
    }
    assert report.left.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in report.left[name]
    whys = {p.name: p.why for p in report.coverage.parameters}
    assert all(whys[name] == report.left[name] for name in reasons if name != "linear")


def test_strict_passes_over_what_a_filter_leaves():
    """That is what was asked for; a layer that is left for another reason is not."""
    layers = nn.ModuleDict({"odd": nn.Linear(7, 8), "even": nn.Linear(32, 8)})
    convert(copy.deepcopy(layers), NVFP4, filter_fqns=["odd"], strict=True)
    with pytest.raises(InputError, match="1 cannot be: odd: NVFP4BlockScaling needs K"):
        convert(layers, NVFP4, strict=True)


def test_a_weight_tied_to_a_linear_layer_is_converted_with_it():
    """Where the embedding is included, too; otherwise both stay as they are, as does an embedding
    that is tied to a layer which a filter leaves.
    """

    def tied() -> nn.ModuleDict:
        layers = nn.ModuleDict({"embed": nn.Embedding(16, 32), "head": nn.Linear(32, 16)})
        layers["head"].weight = layers["embed"].weight
        return layers

    layers = tied()
    report = convert(layers, NVFP4, include=["embed"], strict=True)
    assert (report.converted, report.included) == (("head",), ("embed.weight",))
    assert layers["embed"].weight is layers["head"].weight
    assert isinstance(layers["head"].weight, QuantizedTensor)
    assert convert(tied(), NVFP4).left == {
        "head": "its weight is tied with embed.weight, which stays as it is; include=['embed'] "
        "converts both, or untie them"
    }
    layers = tied()
    report = convert(layers, NVFP4, include=["embed"], filter_fqns=["head"])
    assert report.left["embed.weight"].startswith(
        "include names it, but it is tied with a linear layer, which stays"
    )
    assert layers["embed"].weight is layers["head"].weight
    assert not isinstance(layers["head"].weight, QuantizedTensor)


def test_masters_with_a_state_are_left():
    """Nobody would save it with them."""
    for name in ("delayed", "nvfp4-drawn"):
        report = convert(model(), RECIPES[name], weights="master", include=["embed"])
        assert "its state would have to be saved with it" in report.left["embed.weight"]


def test_gathers_in_high_precision_include_nothing():
    """low_bit_all_gather=False turns all codes off, those of included weights, too."""
    report = convert(
        model(), NVFP4, weights="master", include=ALL, low_bit_all_gather=False, strict=True
    )
    assert report.included == ()


def test_a_pattern_names_parameters_that_it_ends_with():
    """Of attention, whose matrices are not called weight; what include cannot take says that it is
    named, and a module without weights lists its parameters.
    """
    layers = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 2), "odd": nn.Linear(40, 32)})
    message = message_of(InputError, lambda: convert(layers, NVFP4, include=["att?"]))
    assert message.endswith(
        "got 'att?', whose matrices have other names; name att?.in_proj_weight."
    )
    report = convert(layers, NVFP4, include=["*.in_proj_weight", "attn.out_proj", "odd"])
    assert report.included == ("attn.in_proj_weight",)
    assert report.left["attn.out_proj"] == (
        "include names it, but it is torch.nn.MultiheadAttention's out_proj; put a torch.nn.Linear "
        "in its place"
    )
    assert report.left["odd"].startswith("include names it, but NVFP4BlockScaling needs K")
    assert report.left["odd"].endswith("a recipe of any width, {'odd': 'fp8-block'}")
    assert convert(layers, {"odd": "fp8-block"}).converted == ("odd",)


def test_a_computed_weight_has_one_reason_and_a_convolution_no_remedy():
    """In report.left and in coverage, of what nobody named; include takes what it promises."""
    layers = nn.ModuleDict(
        {
            "norm": nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
            "conv": nn.Conv1d(32, 32, 1),
            "mix": Conv1D(32, 48),
        }
    )
    report = convert(layers, NVFP4)
    whys = {p.name: p.why for p in report.coverage.parameters}
    assert whys["norm.parametrizations.weight.original1"] == report.left["norm"]
    assert whys["conv.weight"] == (
        "it belongs to class Conv1d and has no matrices that a forward multiplies"
    )
    assert whys["mix.weight"] == (
        "it belongs to class Conv1D, not torch.nn.Linear; include=['mix'] takes it"
    )
    assert convert(layers, NVFP4, include=["mix"]).included == ("mix.weight",)
