"""Layers on a GPU: the library's GEMMs against decoded operands, and against the CPU.

torch's tensorwise GEMMs exist from Ada on, the blockwise ones on Hopper, MXFP8 and NVFP4 on
Blackwell; where the device lacks a kind, the test is skipped with the reason that users get.
"""

import pytest
import torch

from tests.nn.test_scaled_mm import KINDS, every_kind, every_product, operands, sides
from tests.support.layers import (
    RECIPES,
    assert_close,
    assert_rounded_otherwise,
    every_recipe,
    two_backwards,
)
from zerocast import nn
from zerocast.nn.autocast import autocast
from zerocast.nn.engines import Product, engine
from zerocast.nn.scaled_mm import gemm
from zerocast.tensors import dequantize

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

CUDA = torch.device("cuda")


@every_kind
@every_product
def test_the_librarys_product_is_that_of_the_dequantized_operands(name, product):
    """All three products of each kind that the device has, with a bias where there is one."""
    tensors = [tensor.to(CUDA) for tensor in operands(name, product)]
    chosen = engine(*sides(product, tensors), torch.bfloat16, CUDA)
    if chosen.kind is None:
        pytest.skip(chosen.reason)
    assert chosen.kind is KINDS[name]
    rows = product is Product.OUTPUT
    bias = torch.randn(tensors[1].shape[0], dtype=torch.bfloat16, device=CUDA) if rows else None
    out = gemm(product, *(tensor.quantized_storage for tensor in tensors), torch.bfloat16, bias)
    a, b = (
        dequantize(tensor.quantized_storage, columnwise=columnwise).double()
        for tensor, columnwise in zip(tensors, product.value, strict=True)
    )
    expected = a @ b.t() if rows else (a @ b if product is Product.INPUT_GRADIENT else a.t() @ b)
    expected = expected if bias is None else expected + bias.double()
    assert_close(out, expected, 1e-2, f"{name}, {product.title}")


@every_recipe
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("primary", [True, False])
def test_a_layer_does_on_a_gpu_what_it_does_on_a_cpu(recipe, kind, primary):
    """Output and gradients of two forwards, whoever computes the products."""
    results = [
        two_backwards(getattr(nn, kind), recipe, device, primary=primary)
        for device in ("cpu", "cuda")
    ]
    assert_rounded_otherwise(recipe, results[1], results[0])


def test_explain_agrees_with_what_runs(monkeypatch):
    """Where it says library, torch's function is called, and only there."""
    calls: list[str] = []
    real = torch._scaled_mm

    def spy(*args, **options):
        calls.append("library")
        return real(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    layer = nn.Linear(256, 512, dtype=torch.bfloat16, device=CUDA)
    x = torch.randn(128, 256, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    recipe = RECIPES["current"]
    with autocast(recipe=recipe):
        layer(x).sum().backward()
    explained = [p.engine for p in nn.explain(layer, recipe, tokens=128).products]
    assert calls == [each for each in explained if each == "library"]
