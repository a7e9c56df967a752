"""A layer that opens a region of autocast around itself."""

import functools
import logging

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torchtitan", reason="scripts/torchtitan.sh installs torchtitan")

import zerocast
from tests.support.claims import assert_same_tensors
from tests.support.models import InRegion
from tests.support.same_bytes import assert_same_bytes
from zerocast.adapters.torchtitan import AutocastLinear, product_recipe
from zerocast.recipes import RECIPES

SERVED = [name for name in RECIPES if name != "delayed"]


def layer_and_twin(recipe) -> tuple[AutocastLinear, zerocast.nn.Linear]:
    """Two layers of one weight, of which the first one opens its own regions."""
    torch.manual_seed(0)
    layer = AutocastLinear(64, 96, dtype=torch.bfloat16, name="w1")
    layer.product_recipe = recipe
    twin = zerocast.nn.Linear(64, 96, dtype=torch.bfloat16, name="w1")
    twin.load_state_dict(layer.state_dict())
    return layer, twin


def results(layer, run, x) -> dict[str, torch.Tensor]:
    """What ``run(layer, x)`` gives, and all gradients."""
    x = x.clone().requires_grad_()
    out = run(layer, x)
    out.float().square().sum().backward()
    gradients = {"weight": layer.weight.grad, "bias": layer.bias.grad}
    return {"output": out.detach(), "input": x.grad} | gradients


@pytest.mark.parametrize("name", SERVED)
def test_products_are_those_of_a_region(name):
    """Output and gradients are, to the bit, those of a zerocast layer in a region around it, and
    not those outside of one; also where the forward is computed again in the backward.
    """
    recipe = RECIPES[name]()
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    _, twin = layer_and_twin(recipe)
    expected = results(twin, lambda layer, x: InRegion(layer, recipe)(x), x)
    plain = torch.nn.functional.linear(x, twin.weight, twin.bias)
    assert not torch.equal(expected["output"], plain)
    for run in (AutocastLinear.__call__, functools.partial(checkpoint, use_reentrant=False)):
        layer, _ = layer_and_twin(recipe)
        assert_same_tensors(results(layer, run, x), expected)


def test_a_gradient_that_cannot_be_held(caplog):
    """A layer whose output is no multiple of a block multiplies in high precision, and the log says
    so.
    """
    recipe = zerocast.MXFP8BlockScaling()
    with caplog.at_level(logging.INFO, "zerocast.adapters.torchtitan"):
        assert product_recipe(recipe, "gate", 8) is None
    assert product_recipe(recipe, "w1", 96) is recipe
    (record,) = caplog.records
    assert record.getMessage() == (
        "gate: its products stay in high precision; MXFP8BlockScaling cannot hold the gradient of "
        "its output, [..., 8]"
    )
    layer, twin = layer_and_twin(None)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    assert_same_bytes(layer(x), twin(x), "output")


def test_a_compiled_layer_gives_the_bytes_of_an_uncompiled_one():
    """In one graph, with gradients."""
    (eager, _), (layer, _) = (layer_and_twin(zerocast.Float8CurrentScaling()) for _ in range(2))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.linspace(-1, 1, 2048, dtype=torch.bfloat16).view(32, 64)
    expected = results(eager, AutocastLinear.__call__, x)
    assert_same_tensors(results(layer, lambda layer, x: compiled(x), x), expected)


def test_state_dicts_hold_tensors_alone():
    """A layer that has counted its draws saves what torch's own layer saves."""
    layer, twin = layer_and_twin(zerocast.NVFP4BlockScaling())
    layer(torch.randn(32, 64, dtype=torch.bfloat16)).float().sum().backward()
    assert layer.state_dict().keys() == torch.nn.Linear(64, 96).state_dict().keys()
    twin.load_state_dict(layer.state_dict())
    layer.load_state_dict(twin.state_dict())
