"""Module.to and its like on layers with quantized weights."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast.errors import UnsupportedError
from zerocast.nn import convert
from zerocast.recipes import NVFP4BlockScaling
from zerocast.tensors import empty

CONVERSIONS = {
    "nothing changes": lambda m: m.to("cpu"),
    "cpu": lambda m: m.cpu(),
    "same dtype": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "to": lambda m: m.to(torch.float16),
    "share_memory": lambda m: m.share_memory(),
}


def model() -> nn.Sequential:
    """Layers [32, 32] and a norm, in BF16, the first layer's weight referred to weakly."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)).bfloat16()
    convert(made, NVFP4BlockScaling())
    return made


def hooked(weight: nn.Parameter) -> list[str]:
    """Which of the weight's hooks have run."""
    seen: list[str] = []
    weight.register_hook(lambda grad: seen.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    return seen


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_converted_weight_stays_the_same_parameter(name):
    """Its attributes, hooks, weak references, gradient and codes are kept, whatever changes."""
    made = model()
    weight = made[0].weight
    codes, seen = weight.detach().clone(), hooked(weight)
    weight.tensor_model_parallel, weight.allreduce = True, False
    weight.main_grad = torch.zeros(32, 32)
    reference = weakref.ref(weight)
    made(torch.randn(4, 32).bfloat16()).sum().backward()
    assert seen == ["hook", "accumulated"]

    convert_module: Callable[[nn.Module], nn.Module] = CONVERSIONS[name]
    assert convert_module(made) is made
    dtype = made[1].weight.dtype
    assert made[0].weight is weight is reference()
    assert list(made[0]._parameters) == ["weight", "bias"]
    assert weight.dtype == weight.quantized_storage.dtype == dtype
    assert weight.tensor_model_parallel
    assert weight.allreduce is False
    assert weight.main_grad.shape == (32, 32)
    assert weight.requires_grad
    assert weight.grad.dtype == dtype
    assert_same_bytes(weight.rowwise_data, codes.rowwise_data, "codes")
    assert_same_bytes(weight.columnwise_data, codes.columnwise_data, "columnwise codes")
    weight.grad = None
    made(torch.randn(4, 32).to(dtype)).sum().backward()
    assert seen == ["hook", "accumulated"] * 2
    assert weight.grad.dtype == dtype
    assert isinstance(weight, nn.Parameter)


def test_a_dtype_that_no_weight_has_is_refused():
    """Module.double says how to make a model in high precision, and the weight is what it was."""
    made = model()
    codes = made[0].weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"Parameter\(weight\.dequantize\(dtype\)\)"):
        made.double()
    assert_same_storage(made[0].weight, codes, "weight")


def test_a_layer_moves_to_meta_and_back():
    """to_empty materialises quantized weights, unfilled, as the same parameter."""
    made = model()
    weight = made[0].weight
    reference, seen = weakref.ref(weight), hooked(weight)
    made.to("meta")
    assert weight.is_meta
    made.to_empty(device="cpu")
    assert made[0].weight is weight is reference()
    assert_same_storage(weight, empty((32, 32), NVFP4BlockScaling()), "unfilled")
    made[0](torch.randn(4, 32).bfloat16()).sum().backward()
    assert seen == ["hook", "accumulated"]
