"""What converters make of a model, or of the configuration of one."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchtitan", reason="scripts/torchtitan.sh installs torchtitan")

from torchtitan.models.common.linear import Linear

import zerocast
from tests.adapters.torchtitan.decoder import DIM, IN_BLOCKS, Decoder, OptimizersContainer, loss
from tests.support.claims import message_of
from zerocast.adapters.torchtitan import LinearConverter, QuantizedLinear
from zerocast.recipes import NAMED
from zerocast.sharded import MasterWeight


def converted(tree, **options):
    """The converted ``tree``, and the converter's report."""
    converter = LinearConverter.Config(**options).build()
    return converter.convert(tree), converter.report


def test_a_tree_builds_quantized_layers():
    """The layers of the converted tree, and no others, are zerocast's, with the weights' names and
    what torchtitan initialises them by; built on the meta device as torchtitan builds models.
    """
    tree, report = converted(
        Decoder.Config(),
        recipe_name="nvfp4",
        enable_fsdp_float8_all_gather=True,
        filter_fqns=["lm_head"],
    )
    assert sorted(report.converted) == IN_BLOCKS
    assert report.left == {"lm_head": "its name contains 'lm_head' of filter_fqns"}
    with torch.device("meta"):
        model = tree.build()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert sorted(layers) == IN_BLOCKS
    for name, layer in layers.items():
        assert isinstance(layer.weight, MasterWeight)
        assert layer.weight.low_bit_all_gather.name == f"{name}.weight"
        assert (layer.name, layer.bias) == (name, None)
        assert layer.product_recipe == zerocast.NVFP4BlockScaling()
    model.to_empty(device="cpu")
    model.init_states(buffer_device=None)
    assert all(0.04 < layer.weight.std() < 0.06 for layer in layers.values())


def test_patterns_of_names_give_layers_recipes():
    """In order, the first that fits; each layer is built with its own. A pattern that decides for
    nothing is refused before the tree is changed.
    """
    given = {"*.wq": "nvfp4", "lm_head": None, "*.attention.*": "fp8-channel", "*": "tensorwise"}
    tree, report = converted(
        Decoder.Config(), recipe_name=given, enable_fsdp_float8_all_gather=True
    )
    recipes = {name.rpartition(".")[2]: recipe for name, recipe in report.recipes.items()}
    current = zerocast.Float8CurrentScaling()
    assert recipes == {
        "wq": zerocast.NVFP4BlockScaling(),
        **dict.fromkeys(("wkv", "wo"), NAMED["fp8-channel"]),
        **dict.fromkeys(("w1", "w2", "w3"), current),
    }
    assert report.left == {"lm_head": "'lm_head' in recipe leaves it as it is"}
    assert tree.layers[0].attention.wo.recipe_name == "fp8-channel"
    model = tree.build()
    for name, recipe in report.recipes.items():
        layer = model.get_submodule(name)
        assert layer.product_recipe == layer.weight.low_bit_all_gather.recipe == recipe
    tree = Decoder.Config()
    converter = LinearConverter.Config(recipe_name={"head": "nvfp4", "*": None}).build()
    message = message_of(zerocast.InputError, converter.convert, tree)
    assert "got 'head', which fits none;" in message
    assert "Did you mean 'lm_head'" in message
    assert type(tree.lm_head) is Linear.Config


def test_without_codes_in_the_gathers_weights_stay_plain():
    """By default the scheme is "tensorwise", and weights are quantized by each forward."""
    tree, _ = converted(Decoder.Config())
    model = tree.build()
    model.init_states()
    for name in [*IN_BLOCKS, "lm_head"]:
        layer = model.get_submodule(name)
        assert type(layer.weight) is torch.nn.Parameter
        assert layer.product_recipe == zerocast.Float8CurrentScaling()
    loss(model).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_weights_only():
    """With weights_only no product is quantized, and a compiled model is served."""
    tree, _ = converted(
        Decoder.Config(),
        enable_fsdp_float8_all_gather=True,
        weights_only=True,
        model_compile_enabled=True,
    )
    layer = tree.build().lm_head
    assert layer.product_recipe is None
    assert layer.low_bit_all_gather


def test_layers_that_are_left():
    """Configurations that are more than a Linear's, tied heads, shapes that a scheme cannot hold
    and layers too small to gain are left, each with its reason.
    """

    class Other(Linear.Config):
        """More than a Linear."""

    tree = Decoder.Config(enable_weight_tying=True)
    attention, feed_forward = tree.layers[0].attention, tree.layers[0].feed_forward
    attention.wo = Other(in_features=DIM, out_features=DIM)
    feed_forward.w2 = Linear.Config(in_features=100, out_features=DIM)
    tree, report = converted(tree, recipe_name="mxfp8")
    left = report.left
    assert sorted(left) == ["layers.0.attention.wo", "layers.0.feed_forward.w2", "lm_head"]
    assert left["lm_head"] == "its weight is tied with the embedding's"
    assert left["layers.0.attention.wo"].endswith("Other, which may use its weight in another way")
    assert "a multiple of 32" in left["layers.0.feed_forward.w2"]
    assert tree.layers[0].attention.wo is attention.wo

    _, report = converted(Decoder.Config(), filter_fqns=["auto_filter_small_kn"])
    assert report.converted == ()
    assert report.left["lm_head"].startswith("too small to gain by quantized products")


def test_a_root_that_is_a_layer():
    """A tree of one node is replaced as a whole."""
    tree, _ = converted(Decoder.Config().lm_head, filter_fqns=["layers"])
    assert isinstance(tree, QuantizedLinear.Config)


def test_converted_configurations_are_plain_values():
    """torchtitan writes configurations down as JSON; those of converted layers can be."""
    tree, _ = converted(Decoder.Config(), recipe_name="nvfp4")
    tree.lm_head.param_init = None
    assert json.loads(json.dumps(asdict(tree.lm_head)))["recipe_name"] == "nvfp4"


def test_other_optimizers_are_passed_over():
    """The hook that makes scales after a step leaves optimizers of other models alone."""
    converted(
        Decoder.Config(),
        enable_fsdp_float8_all_gather=True,
        precompute_float8_dynamic_scale_for_fsdp=True,
    )
    model = torch.nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    OptimizersContainer([model]).step()
    torch.optim.SGD(model.parameters()).step()


def test_a_backend_that_splits_over_several_dimensions_is_refused():
    """Tensor parallelism by "full_dtensor" is refused where torchtitan parallelizes the model."""
    tree, _ = converted(Linear.Config(in_features=DIM, out_features=DIM))
    dims = SimpleNamespace(tp_enabled=True, spmd_backend="full_dtensor")
    assert message_of(zerocast.UnsupportedError, tree.build().parallelize, dims) == (
        ": spmd_backend='full_dtensor' is not supported with tensor parallelism: weights must be "
        "split over a mesh of one dimension. Choose 'spmd_types' or 'partial_dtensor'."
    )
