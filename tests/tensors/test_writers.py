"""Torch's other ways to write, swap, send and copy a weight: each works, or is refused."""

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch import nn

from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.weights import every_recipe
from zerocast.recipes import NVFP4BlockScaling, Recipe
from zerocast.tensors import QuantizedTensor, quantize


def parameter(recipe: Recipe | None = None) -> nn.Parameter:
    """A weight [32, 64] in BF16, always the same."""
    value = torch.linspace(-1, 1, 2048).view(32, 64).bfloat16()
    return nn.Parameter(quantize(value, recipe or NVFP4BlockScaling(), name="w"))


@every_recipe
def test_foreach_copy_quantizes(recipe):
    """It is copy_ of each pair, where some are plain, too."""
    weight, expected, plain = parameter(recipe), parameter(recipe), torch.zeros(4)
    value = torch.randn(32, 64)
    with torch.no_grad():
        torch._foreach_copy_([plain, weight], [torch.ones(4), value])
        expected.copy_(value)
    assert_same_storage(weight, expected, "weight")
    assert plain.sum() == 4


def test_swapped_tensors_swap_everything():
    """swap_tensors exchanges values, codes and classes."""
    weight, plain = parameter(), nn.Parameter(torch.ones(32, 64))
    torch.utils.swap_tensors(weight, plain)
    assert type(weight) is nn.Parameter
    assert isinstance(plain, QuantizedTensor)
    assert_same_storage(plain, parameter(), "swapped")


@every_recipe
def test_copies_in_other_processes_hold_the_bytes(recipe):
    """Sent by torch.multiprocessing, which shares the memory."""
    weight = parameter(recipe)
    sent = pickle.loads(ForkingPickler.dumps(weight))
    assert_same_storage(sent, weight, "sent")
    weight.share_memory_()
    sent = pickle.loads(ForkingPickler.dumps(weight))
    with torch.no_grad():
        sent.copy_(-weight.dequantize())
    assert_same_storage(sent, weight, "shared")


def test_functional_call_uses_a_weight_without_writing_it():
    """torch.func runs a module on quantized weights, and with values in their place."""
    layer, weight = nn.Linear(64, 32, bias=False), parameter()
    x = torch.randn(3, 64).bfloat16()
    out = torch.func.functional_call(layer, {"weight": weight}, x)
    assert_same_bytes(out, nn.functional.linear(x, weight.dequantize()), "output")
    layer.weight = weight
    out = torch.func.functional_call(layer, {"weight": torch.zeros(32, 64).bfloat16()}, x)
    assert not out.any()
    assert layer.weight is weight
