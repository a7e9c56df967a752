"""Layers that a server fuses are converted with one tensor amax, and keep it."""

import copy

import pytest
import torch

import zerocast
from tests.support.models import Attention
from tests.support.weights import FP8, NVFP4
from zerocast.comm import run_in_process
from zerocast.errors import InputError


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


def test_groups_are_for_weights_that_hold_codes():
    """Weights that are quantized in the forward cannot share an amax; nothing is converted."""
    model = attention()
    with pytest.raises(InputError, match="amax_groups needs weights that hold codes"):
        zerocast.nn.convert(
            model, NVFP4, weights="high_precision", amax_groups=[["*wq", "*wk", "*wv"]]
        )
    with pytest.raises(InputError, match=r"matches none of wq, wk, wv, wo\."):
        zerocast.nn.convert(model, NVFP4, amax_groups=[["*.attention.wq"]])
    assert type(model.wq) is torch.nn.Linear


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
