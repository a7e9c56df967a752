"""Layers have all derivatives where they decode their weight, and refuse those that quantized
products lack: none is taken for zero.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd import functional as autograd

import zerocast
from tests.support.layers import RECIPES
from tests.support.models import InRegion
from zerocast import nn
from zerocast.recipes import Recipe

# Of torch's forward mode, about itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")

Run = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def penalty(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The gradients of a penalty on the input's gradient, of input and parameters, in one."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    wanted = [x, *model.parameters()]
    grads = torch.autograd.grad(grad.square().sum(), wanted, materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])


def tangent(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In forward mode."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent


def rows_of_jacobian(model: torch.nn.Module, x: torch.Tensor, *, vmap: bool) -> torch.Tensor:
    """Many gradients by one backward, in torch.func's way or in torch's older one."""
    x = x.clone().requires_grad_()
    y = model(x)
    grads = torch.eye(y.numel()).view(-1, *y.shape)
    if vmap:
        return torch.vmap(lambda grad: torch.autograd.grad(y, x, grad)[0])(grads)
    return torch.autograd.grad(y, x, grads, is_grads_batched=True)[0]


def per_sample(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A gradient of the parameters for each row."""

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (row[None],)).square().sum()

    grads = torch.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), x)
    return torch.cat([g.flatten() for g in grads.values()])


def squared(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A loss."""
    return lambda x: model(x).square().sum()


DERIVATIVES: dict[str, Run] = {
    "penalty": penalty,
    "tangent": tangent,
    "rows": partial(rows_of_jacobian, vmap=False),
    "vmapped backward": partial(rows_of_jacobian, vmap=True),
    "per sample": per_sample,
    "hvp": lambda model, x: autograd.hvp(squared(model), x, x.cos())[1],
    "jvp": lambda model, x: autograd.jvp(model, x, x.cos())[1],
    "jacobian": lambda model, x: autograd.jacobian(model, x, vectorize=True),
    "func.hessian": lambda model, x: torch.func.hessian(squared(model))(x),
    "func.jvp": lambda model, x: torch.func.jvp(model, (x,), (x.cos(),))[1],
    "func.vjp": lambda model, x: torch.func.vjp(lambda x: model(x).sum(), x)[1](torch.ones(()))[0],
    "vmap": lambda model, x: torch.vmap(model)(x),
}
every_derivative = pytest.mark.parametrize("name", DERIVATIVES)


def make(recipe: Recipe | None) -> torch.nn.Sequential:
    """[2, 32] -> [2, 4]; of FP32 so that the order of sums is all that may differ."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        nn.Linear(32, 64, recipe=recipe), torch.nn.Tanh(), nn.Linear(64, 4, recipe=recipe)
    )


@every_derivative
@pytest.mark.parametrize("recipe", ["nvfp4", "delayed", "block", "mxfp8"])
def test_a_decoded_weight_has_every_derivative(recipe, name):
    """Of layers with quantized weights they are those of torch's layers with the decoded ones."""
    model, x = make(RECIPES[recipe]), torch.randn(2, 32)
    plain = make(None)
    with torch.no_grad():
        for into, weight in zip(plain.parameters(), model.parameters(), strict=True):
            into.copy_(weight)
    actual, wanted = (DERIVATIVES[name](each, x) for each in (model, plain))
    assert wanted.any()
    torch.testing.assert_close(actual, wanted)


@every_derivative
@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        (nn.Linear, "high_precision"),
        (nn.LayerNormLinear, "quantized"),
        (nn.LayerNormMLP, "high_precision"),
    ],
)
def test_quantized_products_refuse_all_but_the_gradient(name, kind, weights):
    """Inside autocast no derivative is zero because torch does not know of it."""
    recipe = RECIPES["delayed"]
    with zerocast.model_init(enabled=weights == "quantized", recipe=recipe):
        layer = kind(32, 4)
    with pytest.raises(zerocast.UnsupportedError, match="enabled=False"):
        DERIVATIVES[name](InRegion(layer, recipe), torch.randn(2, 32))


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed"])
def test_a_cast_inside_of_a_transform_is_refused(recipe):
    """Tensors of torch.func have no memory that could be cast."""
    x = torch.randn(2, 32, 64)
    for function in (
        lambda t: zerocast.quantize(t, RECIPES[recipe]).dequantize(),
        lambda t: nn.functional.gelu(t),
    ):
        with pytest.raises(zerocast.InputError, match=r"torch\.func"):
            torch.vmap(function)(x)
