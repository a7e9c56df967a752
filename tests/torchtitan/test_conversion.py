"""What converters make of a model, or of the configuration of one."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import zerocast
from tests.torchtitan.decoder import ALL_LAYERS, DIM, OptimizersContainer, loss
from tests.torchtitan.interface import recorded
from tests.torchtitan.plain_decoder import Decoder as PlainDecoder
from zerocast.fsdp import MasterWeight
from zerocast.torchtitan.layers import AutocastLinear
from zerocast.torchtitan.model_converter import ModelConverter

IN_BLOCKS = sorted(ALL_LAYERS - {"lm_head"})


# --- 0.3: the tree of configurations ---


@pytest.fixture
def built():
    """The modules that need torchtitan 0.3, or what stands in for it."""
    pytest.importorskip("torchtitan.models.common.linear")
    from tests.torchtitan import built_decoder
    from zerocast.torchtitan import config_converter

    return SimpleNamespace(
        Tree=built_decoder.Decoder.Config,
        Converter=config_converter.LinearConverter,
        Linear=config_converter.QuantizedLinear,
    )


def converted(built, tree, **options):
    """The converted ``tree``, and the converter."""
    converter = built.Converter.Config(**options).build()
    return converter.convert(tree), converter


def test_a_tree_builds_quantized_layers(built):
    """The layers of the converted tree, and no others, are zerocast's, with the weights' names and
    what torchtitan initialises them by; built on the meta device as torchtitan builds models.
    """
    tree, converter = converted(
        built,
        built.Tree(),
        recipe_name="nvfp4",
        enable_fsdp_float8_all_gather=True,
        filter_fqns=["lm_head"],
    )
    assert sorted(converter.report.converted) == IN_BLOCKS
    assert converter.report.left == {"lm_head": "its name contains 'lm_head' of filter_fqns"}
    with torch.device("meta"):
        model = tree.build()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, built.Linear)}
    assert sorted(layers) == IN_BLOCKS
    for name, layer in layers.items():
        assert isinstance(layer.weight, MasterWeight)
        assert layer.weight.low_bit_gather.name == f"{name}.weight"
        assert (layer.name, layer.bias) == (name, None)
        assert layer.product_recipe == zerocast.NVFP4BlockScaling()
    model.to_empty(device="cpu")
    model.init_states(buffer_device=None)
    assert all(0.04 < layer.weight.std() < 0.06 for layer in layers.values())


def test_without_codes_in_the_gathers_weights_stay_plain(built):
    """By default the scheme is "tensorwise", and weights are quantized by each forward."""
    tree, _ = converted(built, built.Tree())
    model = tree.build()
    model.init_states()
    for name in ALL_LAYERS:
        layer = model.get_submodule(name)
        assert type(layer.weight) is torch.nn.Parameter
        assert layer.product_recipe == zerocast.Float8CurrentScaling()
    loss(model).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_weights_only(built):
    """With weights_only no product is quantized, and a compiled model is served."""
    tree, _ = converted(
        built,
        built.Tree(),
        enable_fsdp_float8_all_gather=True,
        weights_only=True,
        model_compile_enabled=True,
    )
    layer = tree.build().lm_head
    assert layer.product_recipe is None
    assert layer.low_bit_all_gather


def test_layers_that_are_left(built):
    """Configurations that are more than a Linear's, tied heads, shapes that a scheme cannot hold
    and layers too small to gain are left, each with its reason.
    """
    Plain = type(built.Tree().lm_head)

    class Other(Plain):
        """More than a Linear."""

    tree = built.Tree(enable_weight_tying=True)
    attention, feed_forward = tree.layers[0].attention, tree.layers[0].feed_forward
    attention.wo = Other(in_features=DIM, out_features=DIM)
    feed_forward.w2 = Plain(in_features=100, out_features=DIM)
    tree, converter = converted(built, tree, recipe_name="mxfp8")
    left = converter.report.left
    assert sorted(left) == ["layers.0.attention.wo", "layers.0.feed_forward.w2", "lm_head"]
    assert left["lm_head"] == "its weight is tied with the embedding's"
    assert left["layers.0.attention.wo"].endswith("Other, which may use its weight in another way")
    assert "a multiple of 32" in left["layers.0.feed_forward.w2"]
    assert tree.layers[0].attention.wo is attention.wo

    _, converter = converted(built, built.Tree(), filter_fqns=["auto_filter_small_kn"])
    assert converter.report.converted == ()
    assert converter.report.left["lm_head"].startswith("too small to gain by quantized products")


def test_a_root_that_is_a_layer(built):
    """A tree of one node is replaced as a whole."""
    tree, _ = converted(built, built.Tree().lm_head, filter_fqns=["layers"])
    assert isinstance(tree, built.Linear.Config)


def test_converted_configurations_are_plain_values(built):
    """torchtitan writes configurations down as JSON; those of converted layers can be."""
    tree, _ = converted(built, built.Tree(), recipe_name="nvfp4")
    tree.lm_head.param_init = None
    assert json.loads(json.dumps(asdict(tree.lm_head)))["recipe_name"] == "nvfp4"


def test_other_optimizers_are_passed_over(built):
    """The hook that makes scales after a step leaves optimizers of other models alone."""
    low_bit = {
        "enable_fsdp_float8_all_gather": True,
        "precompute_float8_dynamic_scale_for_fsdp": True,
    }
    converted(built, built.Tree(), **low_bit)
    model = PlainDecoder()
    loss(model).backward()
    OptimizersContainer([model]).step()
    torch.optim.SGD(model.parameters()).step()


# --- 0.2: the built model ---


def job_config(*, compiles: bool = False, components: tuple[str, ...] = ("model",), **options):
    """torchtitan 0.2's JobConfig, as far as it is read; defaults are the recorded ones."""
    record = recorded("0.2.2")["torchtitan.config.job_config:Float8Linear"]
    defaults = {"recipe_name": None, "filter_fqns": []} | {
        name: False for name, default in record.items() if default == "False"
    }
    assert defaults.keys() == record.keys()
    return SimpleNamespace(
        quantize=SimpleNamespace(
            linear=SimpleNamespace(float8=SimpleNamespace(**defaults | options))
        ),
        compile=SimpleNamespace(enable=compiles, components=list(components)),
    )


SHARDED, WHOLE = SimpleNamespace(fsdp_enabled=True), SimpleNamespace(fsdp_enabled=False)


def test_a_model_is_converted_in_place():
    """The layers of a built model open their own regions, and their weights are masters."""
    options = {"enable_fsdp_float8_all_gather": True, "filter_fqns": ["lm_head"]}
    converter = ModelConverter(job_config(**options), SHARDED)
    with torch.device("meta"):
        model = PlainDecoder()
    converter.convert(model)
    assert sorted(converter.report.converted) == IN_BLOCKS
    for name in IN_BLOCKS:
        layer = model.get_submodule(name)
        assert type(layer) is AutocastLinear
        assert isinstance(layer.weight, MasterWeight)
        assert layer.product_recipe == zerocast.Float8CurrentScaling()
    assert type(model.lm_head) is torch.nn.Linear


def test_without_shards_there_is_nothing_to_gather():
    """Where torchtitan shards nothing, weights stay in high precision, products are quantized, and
    the hook after a step has nothing to do.
    """
    options = {
        "enable_fsdp_float8_all_gather": True,
        "precompute_float8_dynamic_scale_for_fsdp": True,
    }
    converter = ModelConverter(job_config(recipe_name="nvfp4", **options), WHOLE)
    model = PlainDecoder()
    converter.convert(model)
    assert type(model.lm_head.weight) is torch.nn.Parameter
    assert model.lm_head.product_recipe == zerocast.NVFP4BlockScaling()
    loss(model).backward()
    converter.post_optimizer_hook([model])


def test_job_configs_that_are_refused():
    """Emulation is no choice, and a compiled model with stochastic rounding needs weights_only; a
    compiled loss is fine.
    """
    with pytest.raises(zerocast.UnsupportedError) as raised:
        ModelConverter(job_config(emulate=True), SHARDED)
    assert str(raised.value) == (
        "emulate=True is not served: products are those of decoded operands wherever torch has no "
        "GEMM on codes, and of codes where it has one; leave it False."
    )
    with pytest.raises(zerocast.UnsupportedError, match="quantized products of NVFP4"):
        ModelConverter(job_config(compiles=True, recipe_name="nvfp4"), SHARDED)
    ModelConverter(job_config(compiles=True), SHARDED)
    ModelConverter(job_config(compiles=True, components=("loss",)), SHARDED)
    weights_only = {"weights_only": True, "enable_fsdp_float8_all_gather": True}
    ModelConverter(job_config(compiles=True, **weights_only), SHARDED)
