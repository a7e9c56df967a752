"""Layers that a server fuses are converted with one tensor amax, and keep it."""

import copy

import pytest
import torch

import zerocast
from tests.support.models import Attention, GroupedExperts
from tests.support.weights import FP8, NVFP4
from zerocast.comm import SingleRank, run_in_process


def attention() -> Attention:
    """Three projections that a server fuses, of different amaxes, and one that it does not."""
    model = Attention(32, 32, output=True)
    with torch.no_grad():
        model.wk.weight *= 7
    return model


@pytest.mark.parametrize("recipe", [NVFP4, FP8, zerocast.DelayedScaling(amax_history_len=2)])
def test_grouped_layers_share_their_tensor_amax(recipe):
    """From the conversion on and after each step of a ZeroOptimizer, the weights of a group have
    one tensor scale, which is that of the fused weight; masters start from the initial values.
    """
    template = torch.nn.ModuleList([attention(), attention()])

    def on_rank(comm):
        model = copy.deepcopy(template)
        initial = [p.detach().clone() for p in model.parameters()]
        zerocast.nn.convert(model, recipe, amax_groups=[["*.wq", "*.wk", "*.wv"]])
        for parameter, value in zip(model.parameters(), initial, strict=True):
            assert torch.equal(parameter.get_high_precision_init_val(), value)
        optimizer = zerocast.optim.ZeroOptimizer(model.parameters(), group=comm, lr=0.01)
        _check_scales(model, recipe, initial)
        for _ in range(2):
            (model[1](model[0](torch.ones(4, 32))) ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        masters = [optimizer.gather_master(p) for p in model.parameters()]
        if not recipe.casts_before_reduction:  # whose scales are those of the step before
            _check_scales(model, recipe, masters)

    run_in_process(2, on_rank)


def _check_scales(
    model: torch.nn.ModuleList, recipe: zerocast.Recipe, masters: list[torch.Tensor]
) -> None:
    for i, layer in enumerate(model):
        fused = zerocast.quantize(torch.cat(masters[4 * i : 4 * i + 3]), recipe)
        name = "amax" if recipe == NVFP4 else "rowwise_scale_inv"
        for weight in (layer.wq.weight, layer.wk.weight, layer.wv.weight):
            assert torch.equal(getattr(weight, name), getattr(fused, name))
        alone = zerocast.quantize(masters[4 * i + 3], recipe)
        assert torch.equal(getattr(layer.wo.weight, name), getattr(alone, name))


def test_converted_weights_are_named():
    """Weights draw by their names in the model, so equal weights draw different codes."""
    recipe = zerocast.NVFP4BlockScaling(
        fp4_quant_fwd_weight=zerocast.QParams(fp4_2d_quantization=True, stochastic_rounding=True)
    )
    model = attention()
    with torch.no_grad():
        model.wv.weight.copy_(model.wq.weight)
    zerocast.nn.convert(model, recipe)
    assert not torch.equal(model.wq.weight.rowwise_data, model.wv.weight.rowwise_data)
    named = zerocast.quantize(
        model.wq.weight.get_high_precision_init_val(), recipe, name="wq.weight"
    )
    assert torch.equal(model.wq.weight.rowwise_data, named.rowwise_data)


# --- those that servers are known to fuse ---


class Projections(torch.nn.Module):
    """Layers [rows, 32] by their names, of different amaxes, side by side."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for i, name in enumerate(names):
            layer = torch.nn.Linear(32, 32, bias=False)
            torch.nn.init.constant_(layer.weight, 2.0**i)
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of their outputs."""
        return sum(layer(x) for layer in self.children())


class LlamaLikeAttention(Projections):
    """As a class of transformers is known."""

    __module__ = "transformers.models.toy.modeling_toy"


class OwnAttention(LlamaLikeAttention):
    """A user's, derived from it."""


QKV = ("q_proj", "k_proj", "v_proj", "o_proj")


def amaxes(model: torch.nn.Module) -> list[float]:
    """Of each weight, in the model's order."""
    return [weight.amax.item() for weight in model.parameters()]


def test_layers_that_servers_fuse_share_an_amax_by_default():
    """Those of transformers' classes, and of classes derived from these, are in the report; those
    of any other class are not, whatever their names, and none are with ``()``.
    """
    for known in (LlamaLikeAttention, OwnAttention):
        model = torch.nn.Sequential(known(*QKV), known("gate_proj", "up_proj", "down_proj"))
        report = zerocast.nn.convert(model, NVFP4)
        assert report.amax_groups == (
            ("0.q_proj", "0.k_proj", "0.v_proj"),
            ("1.gate_proj", "1.up_proj"),
        )
        assert "2 groups of weights share a tensor amax" in str(report)
        assert amaxes(model) == [4, 4, 4, 8, 2, 2, 4]
    model = LlamaLikeAttention(*QKV)
    assert zerocast.nn.convert(model, NVFP4, amax_groups=()).amax_groups == ()
    assert amaxes(model) == [1, 2, 4, 8]
    model = Projections(*QKV)
    assert zerocast.nn.convert(model, NVFP4).amax_groups == ()
    assert amaxes(model) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("names", "amax"),
    [
        (("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"), [2, 2, 4, 8]),
        (("w1", "w2", "w3"), [4, 2, 4]),
        (("query", "key", "value"), [4, 4, 4]),
        (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), [2, 2, 8, 8]),
        (("k_proj", "v_proj"), [2, 2]),
        (("q_proj", "gate_proj", "w1"), [1, 2, 4]),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else "",
)
def test_which_layers_servers_fuse(names, amax):
    """As vLLM's packed_modules_mapping has them; one that is alone is in no group."""
    model = LlamaLikeAttention(*names)
    zerocast.nn.convert(model, NVFP4)
    assert amaxes(model) == amax


def test_layers_that_cannot_share_an_amax_do_not():
    """One that stays in high precision, or is of another dtype or another width, does not keep a
    model from being converted; the others are grouped where two are left. Schemes without a scale
    of the tensor group nothing.
    """
    model = LlamaLikeAttention(*QKV)
    report = zerocast.nn.convert(model, NVFP4, filter_fqns=["q_proj"])
    assert report.amax_groups == (("k_proj", "v_proj"),)
    model = LlamaLikeAttention(*QKV)
    model.k_proj.half()
    assert zerocast.nn.convert(model, NVFP4).amax_groups == ()
    model = LlamaLikeAttention(*QKV)
    model.q_proj = torch.nn.Linear(64, 32, bias=False)
    assert zerocast.nn.convert(model, NVFP4).amax_groups == (("k_proj", "v_proj"),)
    report = zerocast.nn.convert(LlamaLikeAttention(*QKV), "nvfp4-1x16")
    assert report.amax_groups == (QKV[:3],)
    for recipe in ("mxfp8", "rowwise"):
        assert zerocast.nn.convert(LlamaLikeAttention(*QKV), recipe).amax_groups == ()
    report = zerocast.nn.convert(LlamaLikeAttention(*QKV), NVFP4, weights="high_precision")
    assert report.amax_groups == ()


def test_the_layer_below_an_adapter_is_in_its_group():
    """peft puts a module with a ``base_layer`` in the place of a layer."""

    class Adapted(torch.nn.Module):
        def __init__(self, layer: torch.nn.Linear) -> None:
            super().__init__()
            self.base_layer = layer

    model = LlamaLikeAttention(*QKV)
    model.v_proj = Adapted(model.v_proj)
    report = zerocast.nn.convert(model, NVFP4)
    assert report.amax_groups == (("q_proj", "k_proj", "v_proj.base_layer"),)


@pytest.mark.parametrize(
    "groups", ["auto", [["q_proj", "k_proj", "v_proj"]]], ids=["auto", "named"]
)
def test_blocks_that_are_converted_one_by_one_have_groups_of_their_own(groups):
    """Their layers have the same names, and in one optimizer each block its amax all the same."""
    blocks = torch.nn.ModuleList(LlamaLikeAttention(*QKV) for _ in range(2))
    with torch.no_grad():
        blocks[1].v_proj.weight.mul_(4)
    for block in blocks:
        zerocast.nn.convert(block, NVFP4, amax_groups=groups)
    zerocast.optim.ZeroOptimizer(blocks.named_parameters(), group=SingleRank(), lr=0).step()
    assert amaxes(blocks) == [4, 4, 4, 8, 16, 16, 16, 8]


def test_ranks_need_not_convert_the_same_number_of_models():
    """What tells the groups of one process apart is not compared between ranks."""

    def on_rank(comm):
        for _ in range(comm.rank + 1):
            model = LlamaLikeAttention(*QKV)
            zerocast.nn.convert(model, NVFP4)
        optimizer = zerocast.optim.ZeroOptimizer(model.named_parameters(), group=comm, lr=0)
        for weight in model.parameters():
            weight.grad = torch.zeros(weight.shape)
        optimizer.step()
        return amaxes(model)

    assert run_in_process(2, on_rank) == [[4, 4, 4, 8]] * 2


def test_stacks_of_experts_share_their_amaxes_matrix_by_matrix():
    """torchtitan's gate and up projections, where the parameters hold codes."""
    experts = GroupedExperts([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
    model = torch.nn.ModuleDict({"experts": experts})
    report = zerocast.nn.convert(model, NVFP4, include=["experts"], strict=True)
    assert report.amax_groups == (("experts.w1_EFD", "experts.w3_EFD"),)
    for weight in model.parameters():
        assert weight.amax.flatten().tolist() == [3, 2, 3]
