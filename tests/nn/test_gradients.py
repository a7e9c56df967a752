"""Outputs and gradients of every layer are float64 arithmetic on the dequantized operands.

A layer's products are recorded with the values that their operands decode to. Between products the
same functions run in float64. So nothing but the rounding of results remains to differ.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support.layers import (
    RECIPES,
    TOLERANCE,
    Made,
    assert_close,
    both_dtypes,
    every_recipe,
    gradients,
    recorded_products,
    to_nearest,
)
from zerocast import nn
from zerocast.nn.autocast import autocast
from zerocast.nn.engines import Product
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedTensor, dequantize, quantize

both_weights = pytest.mark.parametrize("primary", [True, False], ids=["primary", "on-the-fly"])
both_norms = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])

K, M, T = 64, 96, 21


def inputs(dtype: torch.dtype) -> torch.Tensor:
    """[3, 7, K]: 21 rows, a multiple of nothing that schemes care about."""
    return torch.randn(3, T // 3, K, dtype=dtype, requires_grad=True)


def run(layer, x, recipe, monkeypatch) -> tuple[torch.Tensor, torch.Tensor, list[Made]]:
    """Output, its gradient, and the products of a forward and backward. (The second step, so that
    delayed scaling has a history.)
    """
    torch.manual_seed(1)
    for _ in range(2):
        layer.zero_grad()
        x.grad = None
        with recorded_products(monkeypatch) as made:
            with autocast(recipe=recipe):
                y = layer(x)
            grad = torch.randn_like(y)
            y.backward(grad)
    return y, grad, made


def make(kind: type[torch.nn.Module], *arguments: object, **options: object) -> torch.nn.Module:
    """A layer with parameters that are not their neutral initial ones."""
    torch.manual_seed(0)
    layer = kind(*arguments, **options)
    for name, parameter in layer.named_parameters():
        if "layer_norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return layer


def assert_linear(layer, x, y, grad, products, tolerance) -> None:
    """Output, and the gradients of input, weight and bias, from the products' operands."""
    rows, (m, k) = x.numel() // x.shape[-1], layer.weight.shape
    out, dx, dw = products
    exact = {"output": out.a @ out.b.t(), "input": dx.a @ dx.b, "weight": dw.a.t() @ dw.b}
    if layer.bias is not None:
        exact["output"] += layer.bias.detach().double()
        exact["bias"] = grad.view(rows, m).double().sum(0)
    found = gradients(layer, x, y)
    found |= {"output": y.view(rows, m), "input": x.grad.view(rows, k)}
    for name, expected in exact.items():
        assert_close(found[name], expected, tolerance, name)


@every_recipe
@both_dtypes
@both_weights
@pytest.mark.parametrize("bias", [True, False])
def test_linear(recipe, dtype, primary, bias, monkeypatch):
    """Output, and the gradients of input, weight and bias."""
    layer = make(nn.Linear, K, M, bias, dtype=dtype, recipe=recipe if primary else None)
    x = inputs(dtype)
    y, grad, made = run(layer, x, recipe, monkeypatch)
    assert [each.product for each in made] == list(Product)
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype
    assert_linear(layer, x, y, grad, made, TOLERANCE[dtype])


FREE = [(1, 1, 1), (1, 7, 3), (5, 33, 17), (3, 130, 257), (129, 5, 4)]
OF_32 = [(1, 32, 32), (33, 96, 160), (130, 32, 64)]
OF_16 = [(1, 16, 16), (3, 48, 80), (17, 112, 96), (129, 16, 144)]


@pytest.mark.parametrize(
    ("name", "rows", "in_features", "out_features"),
    [
        (name, *shape)
        for name in RECIPES
        for shape in (OF_32 if "mxfp" in name else OF_16 if "nvfp4" in name else FREE)
    ],
)
def test_linear_of_awkward_sizes(name, rows, in_features, out_features, monkeypatch):
    """One row, one feature, primes, one past a block."""
    layer = make(nn.Linear, in_features, out_features)
    x = torch.randn(rows, in_features, requires_grad=True)
    assert_linear(layer, x, *run(layer, x, RECIPES[name], monkeypatch), 1e-5)


@every_recipe
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_loud(recipe, bad):
    """One such input makes its output and its weight's gradient NaN; a zero gradient is zero."""
    layer = make(nn.Linear, 64, 64, False)
    x = torch.randn(8, 64)
    x[3, 5] = bad
    with autocast(recipe=recipe):
        y = layer(x)
    assert y[3].isnan().any()
    y.backward(torch.ones_like(y))
    assert layer.weight.grad.isnan().any()
    layer.zero_grad()
    with autocast(recipe=recipe):
        y = layer(torch.zeros(8, 64))
    y.backward(torch.zeros_like(y))
    assert (y == 0).all()
    assert (layer.weight.grad == 0).all()


def columnwise_values(tensor: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """What the columnwise copy of a tensor means, from the rowwise cast of its transpose: blocks of
    one dimension downwards are blocks to the right there. Square blocks need no transpose.
    """
    rowwise = quantize(tensor, recipe, columnwise=False)
    if not recipe.planes(tensor.shape)[1].is_cast:
        return dequantize(rowwise.quantized_storage)
    padded = F.pad(tensor.t(), (0, -len(tensor) % 32))  # zeros change no amax
    return dequantize(quantize(padded, recipe, columnwise=False).quantized_storage)[
        :, : len(tensor)
    ].t()


@every_recipe
def test_the_operands_are_the_recipes_casts_of_the_right_tensors(recipe, monkeypatch):
    """Rowwise Q(x) and Q(w); rowwise Q(dy) and columnwise Q(w); columnwise Q(dy) and Q(x). Each by
    the recipe of its role.
    """
    recipe = to_nearest(recipe)
    layer = make(nn.Linear, K, M, False, dtype=torch.float32)
    x, w, grad = torch.randn(T, K, requires_grad=True), layer.weight.detach(), torch.randn(T, M)
    with recorded_products(monkeypatch) as (made):
        with autocast(recipe=recipe):
            y = layer(x)
        y.backward(grad)
    out, dx, dw = made
    x = x.detach()
    roles = {role: recipe.for_role(role) for role in ("input", "weight", "grad_output")}
    expected = {
        "Q(x)": (out.a, quantize(x, roles["input"]).dequantize()),
        "Q(w)": (out.b, quantize(w, roles["weight"]).dequantize()),
        "Q(dy)": (dx.a, quantize(grad, roles["grad_output"]).dequantize()),
        "columnwise Q(w)": (dx.b, columnwise_values(w, roles["weight"])),
        "columnwise Q(dy)": (dw.a, columnwise_values(grad, roles["grad_output"])),
        "columnwise Q(x)": (dw.b, columnwise_values(x, roles["input"])),
    }
    for name, (actual, wanted) in expected.items():
        assert torch.equal(actual.float(), wanted), name


def norm64(layer: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The norm in float64, and the gradients of input and parameters."""
    leaves = [x.detach().double().requires_grad_(), layer.layer_norm_weight.detach().double()]
    leaves[1].requires_grad_()
    gamma = leaves[1] + 1 if layer.zero_centered_gamma else leaves[1]
    width = x.shape[-1:]
    if layer.normalization == "LayerNorm":
        leaves.append(layer.layer_norm_bias.detach().double().requires_grad_())
        y = F.layer_norm(leaves[0], width, gamma, leaves[2], layer.eps)
    else:
        y = F.rms_norm(leaves[0], width, gamma, layer.eps)
    return (y.detach(), *torch.autograd.grad(y, leaves, grad))


def assert_norm(
    layer: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor, tolerance: float
) -> None:
    """The gradients of the norm's input and parameters, from that of its output."""
    _, dx, dgamma, *dbias = norm64(layer, x.view(T, -1), grad)
    assert_close(x.grad.view(T, -1), dx, tolerance, "gradient of the input")
    assert_close(layer.layer_norm_weight.grad, dgamma, tolerance, "gradient of gamma")
    for expected in dbias:
        assert_close(layer.layer_norm_bias.grad, expected, tolerance, "gradient of the norm's bias")


@every_recipe
@both_dtypes
@both_norms
@pytest.mark.parametrize("zero_centered_gamma", [True, False])
def test_layer_norm_linear(recipe, dtype, normalization, zero_centered_gamma, monkeypatch):
    """Output and the gradients of input, gamma, the norm's bias, weight and bias; and what is
    multiplied is the norm, to within its quantization.
    """
    options = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
    layer = make(nn.LayerNormLinear, K, M, params_dtype=dtype, **options)
    x = inputs(dtype)
    y, grad, (out, dx, dw) = run(layer, x, recipe, monkeypatch)
    tolerance = TOLERANCE[dtype]
    normed, *_ = norm64(layer, x.view(T, K), torch.ones(T, K).double())
    coarse = 0.35 if recipe.numerics.fmt.bits == 4 else 0.07
    assert_close(out.a, normed, coarse, "what the norm made")
    assert_close(y.view(T, M), out.a @ out.b.t() + layer.bias.double(), tolerance, "output")
    assert_close(layer.weight.grad, dw.a.t() @ dw.b, tolerance, "gradient of the weight")
    assert_close(layer.bias.grad, grad.view(T, M).double().sum(0), tolerance, "of the bias")
    assert_norm(layer, x, dx.a @ dx.b, tolerance)


ACTIVATIONS = {
    "gelu": lambda h: h * 0.5 * (1 + torch.erf(h / 2**0.5)),
    "gelu_tanh": lambda h: (
        h * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
    ),
    "relu": lambda h: h.clamp(min=0),
    "silu": lambda h: h / (1 + torch.exp(-h)),
    "swiglu": lambda h: h[:, :M] / (1 + torch.exp(-h[:, :M])) * h[:, M:],
}
"""Written out."""


def check_mlp(layer, x, recipe, tolerance, monkeypatch) -> None:
    """All of an MLP: both products, the activation between them, the norm before."""
    y, grad, made = run(layer, x, recipe, monkeypatch)
    out1, out2, dx2, dw2, dx1, dw1 = made
    expected = out1.a @ out1.b.t() + layer.fc1_bias.double()
    assert_close(out1.result, expected, tolerance, "first product")
    expected = out2.a @ out2.b.t() + layer.fc2_bias.double()
    assert_close(y.view(T, -1), expected, tolerance, "output")
    assert_close(layer.fc2_weight.grad, dw2.a.t() @ dw2.b, tolerance, "gradient of fc2_weight")
    assert_close(
        layer.fc2_bias.grad, grad.view(T, -1).double().sum(0), tolerance, "gradient of fc2_bias"
    )
    hidden = out1.result.double().requires_grad_()
    activated = ACTIVATIONS[layer.activation](hidden)
    (of_hidden,) = torch.autograd.grad(activated, hidden, dx2.a @ dx2.b)
    assert_close(layer.fc1_bias.grad, of_hidden.sum(0), tolerance, "gradient of fc1_bias")
    assert_close(layer.fc1_weight.grad, dw1.a.t() @ dw1.b, tolerance, "gradient of fc1_weight")
    assert_norm(layer, x, dx1.a @ dx1.b, tolerance)


@every_recipe
@both_dtypes
@both_weights
def test_layer_norm_mlp(recipe, dtype, primary, monkeypatch):
    """Every recipe, with GELU and LayerNorm."""
    layer = make(nn.LayerNormMLP, K, M, params_dtype=dtype, recipe=recipe if primary else None)
    assert isinstance(layer.fc1_weight, QuantizedTensor) == primary
    check_mlp(layer, inputs(dtype), recipe, TOLERANCE[dtype], monkeypatch)


@both_dtypes
@both_norms
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layer_norm_mlp_with_every_activation(name, dtype, normalization, activation, monkeypatch):
    """And both norms."""
    options = {"normalization": normalization, "activation": activation}
    layer = make(nn.LayerNormMLP, K, M, params_dtype=dtype, **options)
    check_mlp(layer, inputs(dtype), RECIPES[name], TOLERANCE[dtype], monkeypatch)


@both_dtypes
@pytest.mark.parametrize("zero_centered_gamma", [True, False])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_norms(kind, zero_centered_gamma, dtype):
    """They quantize nothing by themselves: output and gradients are those of float64."""
    torch.manual_seed(0)
    layer = kind(K, 1e-5, dtype=dtype, zero_centered_gamma=zero_centered_gamma)
    torch.nn.init.normal_(layer.weight, 0.5, 0.3)
    x = inputs(dtype)
    with autocast(recipe=RECIPES["current"]):
        y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    x64 = x.detach().double().requires_grad_()
    gamma = layer.weight.detach().double().requires_grad_()
    scale = gamma + 1 if zero_centered_gamma else gamma
    centred = x64 - x64.mean(-1, keepdim=True) if kind is nn.LayerNorm else x64
    y64 = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale
    y64.backward(grad.double())
    tolerance = TOLERANCE[dtype]
    assert_close(y, y64.detach(), tolerance, "output")
    assert_close(x.grad, x64.grad, tolerance, "gradient of the input")
    assert_close(layer.weight.grad, gamma.grad, tolerance, "gradient of gamma")
