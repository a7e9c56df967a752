"""convert by patterns of names: which recipe each weight gets, and what is refused."""

import pytest
import torch
from torch import nn

import zerocast
from tests.support.claims import message_of
from tests.support.experts import MIXED, mixed_moe, moe, own_casts
from tests.support.models import Attention
from tests.support.same_bytes import assert_same_bytes
from zerocast.errors import InputError
from zerocast.nn import convert
from zerocast.recipes import NAMED
from zerocast.tensors import QuantizedTensor


class Experts(nn.Module):
    """Two experts, a stack of one matrix, and a bias of each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 16, 32))
        self.shared = nn.Parameter(torch.randn(1, 16, 32))
        self.bias = nn.Parameter(torch.randn(2, 16))


class Model(nn.Module):
    """Weights of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.conv = nn.Conv1d(32, 32, 3)
        self.attention = Attention(32, 32, output=True)
        self.experts = Experts()
        self.head = nn.Linear(32, 48, bias=False)


def model(*, ties: bool = False) -> Model:
    """The same at every call; with ``ties`` the head has the weight of the embedding."""
    torch.manual_seed(0)
    made = Model()
    if ties:
        made.head.weight = made.embed.weight
    return made


QKV = ("attention.wq", "attention.wk", "attention.wv")
LINEARS = (*QKV, "attention.wo", "head")


def recipes_of(given, model_=None, **options) -> dict[str, zerocast.Recipe]:
    """By name the recipe of each converted weight, as its codes have it."""
    converted = model_ or model()
    report = convert(converted, given, **options)
    found = {name: p.recipe for name, p in converted.named_parameters()
             if isinstance(p, QuantizedTensor)}  # fmt: skip
    named = {name.removesuffix(".weight"): recipe for name, recipe in report.recipes.items()}
    assert {name.removesuffix(".weight"): recipe for name, recipe in found.items()} == named
    assert {*report.converted, *report.included} == set(report.recipes)
    return report.recipes


def named(recipe: str, names) -> dict[str, zerocast.Recipe]:
    """This recipe for each."""
    return dict.fromkeys(names, NAMED[recipe])


def test_one_recipe_is_the_pattern_of_everything():
    """``*`` converts what a recipe alone does: linear layers, no stacks, and what is included."""
    for include in ((), ("experts",), ("embed", "experts.up")):
        options = {"include": include}
        assert recipes_of({"*": "mxfp8"}, **options) == recipes_of("mxfp8", **options)
        assert str(convert(model(), {"*": "mxfp8"}, **options)) == str(
            convert(model(), "mxfp8", **options)
        )


@pytest.mark.parametrize("pattern", ["experts.*", "experts", "*.up", "expert?"])
def test_a_pattern_reaches_stacks_of_matrices(pattern):
    """By the name of the parameter or of its module. A stack of one matrix, biases, convolutions
    and embeddings are named in include.
    """
    found = recipes_of({pattern: "nvfp4", "*": "mxfp8"})
    assert found == named("nvfp4", ["experts.up"]) | named("mxfp8", LINEARS)
    everything = recipes_of({pattern: "nvfp4", "*": "mxfp8"}, include=["experts", "embed"])
    one = "experts.shared" if pattern != "*.up" else "experts.up"
    assert everything[one] == NAMED["nvfp4"]
    assert everything["embed.weight"] == NAMED["mxfp8"]


def test_the_first_pattern_that_fits_decides():
    """In the order of the mapping; upper and lower case differ."""
    given = {"*.wo": "fp8-channel", "attention.*": NAMED["fp8-block"], "head": "block"}
    expected = named("fp8-channel", ["attention.wo"]) | named("fp8-block", QKV)
    assert recipes_of(given) == expected | named("block", ["head"])
    message = message_of(InputError, convert, model(), {"*.WO": "nvfp4", **given})
    assert "got '*.WO', which fits none" in message


def test_a_layer_of_several_names_has_the_recipe_of_the_first_pattern_that_fits_one():
    """A module that a model has twice."""
    layer = nn.Linear(32, 32)
    found = convert(nn.ModuleDict({"a": layer, "b": layer}), {"b": "mxfp8", "*": "nvfp4"})
    assert found.recipes == {"a": NAMED["mxfp8"]}


def test_what_is_left_has_its_reason():
    """None, no pattern, and a filter beside patterns; coverage has the reasons of stacks, too."""
    converted = model()
    given = {"experts.*": None, "*.wo": None, "attention.*": "mxfp8"}
    report = convert(converted, given, filter_fqns=["wq"], amax_groups=(), strict=True)
    assert report.left == {
        "attention.wq": "its name contains 'wq' of filter_fqns",
        "attention.wo": "'*.wo' in recipe leaves it as it is",
        "head": "no pattern of names in recipe fits it; add one that does",
        "experts.up": "'experts.*' in recipe leaves it as it is",
    }
    assert str(report).startswith("2 of 5 linear layers converted, with MXFP8BlockScaling()\n")
    assert "left: experts.up [2x16x32], 8.6 %: 'experts.*' in recipe leaves it" in str(report)
    with pytest.raises(
        InputError, match=r"strict=True .* embed.weight: include names it, but no pattern"
    ):
        convert(model(), {"head": "mxfp8"}, include=["embed"], strict=True)


def test_the_report_groups_by_recipe():
    """The short names of variants, how many weights, and which."""
    report = convert(mixed_moe(), MIXED["experts"])
    assert str(report).splitlines()[:6] == [
        "11 of 12 linear layers converted, and 2 weights of other modules",
        "  8 with fp8-channel: model.layers.{0..1}.self_attn.{q_proj,k_proj,v_proj,o_proj}",
        "  3 with MXFP8BlockScaling(): model.layers.0.mlp.{gate_proj,up_proj,down_proj}",
        "  2 with nvfp4-4over6: model.layers.1.mlp.experts.{gate_up_proj,down_proj}",
        "82,688 parameters, 89.2 % held in codes; in memory they take 149.03 kB, 113.19 kB of them "
        "codes and scales",
        "  model.layers.{0..1}.self_attn.{q_proj,o_proj}.weight [64x64]: held in codes by "
        "fp8-channel",
    ]


@pytest.mark.parametrize("recipes", MIXED)
def test_converted_weights_have_the_bytes_of_their_own_recipe(recipes):
    """Of a model of transformers; the forward works, under autocast, too."""
    converted, plain = mixed_moe(), dict(mixed_moe().named_parameters())
    report = convert(converted, MIXED[recipes], strict=True)
    for name, whole in own_casts(plain, report, torch.float32).items():
        own = converted.get_parameter(name).quantized_storage.buffers
        for key, buffer in whole.quantized_storage.buffers.items():
            assert_same_bytes(own[key], buffer, f"{name}, {key}")
    x = torch.arange(12).view(1, 12)
    converted(input_ids=x, labels=x).loss.backward()
    assert all(p.grad is not None for n, p in converted.named_parameters() if "experts" not in n)
    with zerocast.autocast(recipe="mxfp8"):
        assert converted(input_ids=x).logits.isfinite().all()


# --- what is refused ---

KNOWN = ", ".join(map(repr, NAMED))
MISTAKES = {
    "empty": (
        {},
        "a mapping of recipes must have patterns of names as its keys, such as {'*.experts.*': "
        "'nvfp4', 'lm_head': None, '*': 'mxfp8'}, got {}.",
    ),
    "keys": (
        {3: "nvfp4"},
        "a mapping of recipes must have patterns of names as its keys, such as {'*.experts.*': "
        "'nvfp4', 'lm_head': None, '*': 'mxfp8'}, got {3: 'nvfp4'}.",
    ),
    "recipe": (
        {"head": "nvfp5", "*": "mxfp8"},
        "recipe['head'] must be a zerocast recipe such as NVFP4BlockScaling(), or the name of one "
        f"({KNOWN}), got 'nvfp5'. Did you mean 'nvfp4'?",
    ),
    "nothing": (
        {"*.expert.*": "nvfp4", "*": "mxfp8"},
        "each pattern in recipe must fit the whole name of a linear layer, or of a weight "
        "that can be included, got '*.expert.*', which fits none; correct it, or "
        "remove it. Did you mean 'experts.up' or 'experts.shared'?",
    ),
    "nothing near": (
        {"zzz": None, "*": "mxfp8"},
        "each pattern in recipe must fit the whole name of a linear layer, or of a weight "
        "that can be included, got 'zzz', which fits none; correct it, or remove it.",
    ),
    "convolution": (
        {"conv": "nvfp4"},
        "each pattern in recipe must fit the whole name of a linear layer, or of a weight "
        "that can be included, got 'conv', which fits none; correct it, or remove it.",
    ),
    "order": (
        {"*": "mxfp8", "head": None},
        "the first pattern in recipe that fits a name decides, got 'head' after '*', which fits "
        "head, too; put the special pattern first.",
    ),
    "order of stacks": (
        {"*": "mxfp8", "experts.*": "nvfp4"},
        "the first pattern in recipe that fits a name decides, got 'experts.*' after '*', which "
        "fits experts.up, too; put the special pattern first.",
    ),
    "embedding": (
        {"embed": "nvfp4", "*": "mxfp8"},
        "a pattern in recipe converts linear layers and stacks of two or more matrices, got "
        "'embed', which fits embed.weight, another weight; name that in include, too.",
    ),
    "fused": (
        {"*.wv": "fp8-tensor", "*": "mxfp8"},
        "weights that a server fuses, or that share an amax, need one recipe, got "
        "MXFP8BlockScaling() for attention.wk and fp8-tensor for attention.wv; let one pattern in "
        "recipe fit them, or take them out of amax_groups, which is () for no groups.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused_and_nothing_is_changed(mistake):
    """The text of each."""
    given, text = MISTAKES[mistake]
    groups = {"amax_groups": [["*.wq", "*.wk", "*.wv"]]} if mistake == "fused" else {}
    whole = model()
    before = dict(whole.named_parameters())
    assert message_of(InputError, lambda: convert(whole, given, **groups)) == text
    assert all(p is before[name] for name, p in whole.named_parameters())


def test_an_embedding_that_a_pattern_leaves_is_left():
    """It would be left anyway."""
    assert recipes_of({"embed": None, "*": "mxfp8"}) == named("mxfp8", LINEARS)


def test_weights_that_servers_are_known_to_fuse_need_one_recipe():
    """Also under recipes without a scale of the tensor, and where no group is made of them; without
    groups they are converted.
    """
    given = {"*.q_proj": "fp8-channel", "*": "mxfp8"}
    message = message_of(InputError, lambda: convert(moe("qwen-moe"), given))
    assert "got fp8-channel for model.layers.0.self_attn.q_proj.weight and MXFP8Block" in message
    report = convert(moe("qwen-moe"), given, amax_groups=())
    assert report.recipes["model.layers.0.self_attn.q_proj"] == NAMED["fp8-channel"]


def test_autocast_has_one_recipe():
    """So patterns are refused where it is what quantizes."""
    for options in ({"weights": "high_precision"},
                    {"weights": "master", "low_bit_all_gather": False}):  # fmt: skip
        assert message_of(InputError, lambda o=options: convert(model(), {"*": "mxfp8"}, **o)) == (
            "patterns of names in recipe need weights that hold codes (weights='quantized') or are "
            "gathered in codes ('master'), got weights='high_precision', under which autocast has "
            "one recipe for all layers; give one recipe, and leave layers out by filter_fqns."
        )


@pytest.mark.parametrize("weights", ["quantized", "master"])
def test_what_shards_cannot_make_is_left_out(weights):
    """Blocks of one dimension have a columnwise copy of the transposed tensor, of which ranks have
    no shards: linear layers go without it, as stacks do under every recipe.
    """
    converted = model()
    convert(
        converted, {"experts": "nvfp4-1x16", "head": "nvfp4-1x16", "*": "nvfp4"}, weights=weights
    )
    parts = {"head": converted.head, "wo": converted.attention.wo}
    if weights == "master":
        found = {name: each.weight.low_bit_all_gather.columnwise for name, each in parts.items()}
    else:
        found = {name: each.weight.quantized_storage.has_columnwise for name, each in parts.items()}
    assert found == {"head": False, "wo": True}


def test_a_tied_weight_has_one_recipe():
    """Two are refused; where a part stays as it is, both do."""
    given = {"head": "nvfp4", "*": "mxfp8"}
    message = message_of(InputError, lambda: convert(model(ties=True), given, include=["embed"]))
    assert message == (
        "a weight that modules share has one recipe, got NVFP4BlockScaling() for head and "
        "MXFP8BlockScaling() for embed.weight; let one pattern in recipe fit both."
    )
    report = convert(model(ties=True), given)
    assert report.left["head"] == (
        "its weight is tied with embed.weight, which stays as it is; untie them"
    )
    report = convert(model(ties=True), {"head": None, "*": "mxfp8"}, include=["embed"])
    assert report.left["embed.weight"] == (
        "include names it, but it is tied with a linear layer, which stays as it is: 'head' in "
        "recipe leaves it as it is"
    )
    both = convert(model(ties=True), {"attention.*": "nvfp4", "*": "mxfp8"}, include=["embed"])
    assert both.recipes["head"] == both.recipes["embed.weight"] == NAMED["mxfp8"]
