"""zerocast.nn.Linear computes with the dequantized weight, forward and backward."""

import pytest
import torch

from tests.support.layers import TOLERANCE, assert_close, gradients, kept_for_backward
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.weights import FP8, NVFP4, both_recipes
from zerocast.nn import Linear
from zerocast.tensors import quantize


@both_recipes
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (2, 1, 3)])
def test_all_three_products_are_those_of_the_dequantized_weight(recipe, bias, dtype, leading):
    """Output and gradients equal float64 arithmetic, relative to the largest magnitude."""
    torch.manual_seed(0)
    layer = Linear(80, 33, bias, recipe=recipe, dtype=dtype)
    exact = torch.nn.Linear(80, 33, bias, dtype=torch.float64)
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(*leading, 80, dtype=dtype, requires_grad=True)
    grad = torch.randn(*leading, 33, dtype=dtype)
    found = []
    for module, given in ((layer, x), (exact, x.detach().double().requires_grad_())):
        y = module(given)
        y.backward(grad.to(y.dtype))
        found.append(gradients(module, given, y))
    assert found[0]["output"].shape == (*leading, 33)
    for name, expected in found[1].items():
        assert found[0][name].dtype == dtype
        assert_close(found[0][name], expected, TOLERANCE[dtype], name)


def test_it_starts_like_torch_and_remembers_the_values_before_quantization():
    """The same random numbers as torch.nn.Linear, and the next numbers are the same, too."""
    torch.manual_seed(3)
    plain = torch.nn.Linear(48, 24, dtype=torch.bfloat16)
    following = torch.rand(3)
    torch.manual_seed(3)
    layer = Linear(48, 24, recipe=NVFP4, dtype=torch.bfloat16)
    assert_same_bytes(torch.rand(3), following, "random state")
    assert_same_bytes(layer.bias, plain.bias, "bias")
    assert_same_storage(layer.weight, quantize(plain.weight, NVFP4), "weight")
    assert_same_bytes(layer.weight.get_high_precision_init_val(), plain.weight, "initial value")
    assert layer.weight.requires_grad
    assert isinstance(layer.weight, torch.nn.Parameter)


def test_it_stands_where_torch_nn_linear_stands():
    """isinstance, attributes, repr, columnwise=False, parameters, state_dict keys."""
    layer = Linear(32, 16, bias=False, recipe=FP8, columnwise=False)
    assert isinstance(layer, torch.nn.Linear)
    assert (layer.in_features, layer.out_features, layer.bias) == (32, 16, None)
    assert not layer.weight.quantized_storage.has_columnwise
    assert repr(layer) == f"Linear(in_features=32, out_features=16, bias=False, recipe={FP8})"
    assert list(Linear(32, 16, recipe=FP8).state_dict()) == ["weight", "bias"]


def test_a_changed_weight_does_not_matter_to_the_weight_gradient():
    """It is grad.T @ input: where no input gradient is needed, the backward runs, as in torch."""
    layer = Linear(32, 16, recipe=NVFP4)
    y = layer(torch.ones(4, 32))
    with torch.no_grad():
        layer.weight.zero_()
    y.sum().backward()
    assert (layer.weight.grad == 4).all()


def test_no_dequantized_weight_is_kept_for_the_backward():
    """What autograd saves is the input alone, and that only where the weight needs a gradient."""
    layer, x = Linear(64, 256, recipe=FP8), torch.randn(2, 64, requires_grad=True)
    with kept_for_backward() as kept:
        layer(x)
        layer.weight.requires_grad_(False)
        layer(x)
    assert [tuple(t.shape) for t in kept] == [(2, 64)]


def test_a_weight_that_is_replaced_by_a_plain_one_is_used_as_it_is():
    """As torch's layer does."""
    layer = Linear(32, 16, recipe=NVFP4)
    layer.weight = torch.nn.Parameter(torch.ones(16, 32))
    assert (layer(torch.zeros(1, 32)) == layer.bias).all()
