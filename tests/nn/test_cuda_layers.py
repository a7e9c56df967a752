"""Layers on a GPU: the library's GEMMs against decoded operands, and against the CPU.

torch's tensorwise GEMMs exist from Ada on, the blockwise ones on Hopper, MXFP8 and NVFP4 on
Blackwell; where the device lacks a kind, the test is skipped with the reason that users get.
"""

import pytest
import torch

from tests.nn.test_scaled_mm import KINDS, every_kind, every_product, operands, sides
from tests.support.layers import RECIPES, assert_close, every_recipe
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
    """Two steps: output and gradients, whoever computes the products."""
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        options = {"recipe": recipe} if primary else {}
        layer = getattr(nn, kind)(256, 512, **options).to(torch.bfloat16).to(device)
        x = torch.randn(128, 256).bfloat16().to(device).requires_grad_()
        for _ in range(2):
            layer.zero_grad()
            x.grad = None
            with autocast(recipe=recipe):
                y = layer(x)
            (y.float().square().sum() / y.numel()).backward()
        found = {"output": y, "input": x.grad}
        found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
        results.append({name: tensor.detach().cpu() for name, tensor in found.items()})
    # Rounding apart, a GPU's norm may fall on the other side of a tie and change a code.
    coarse = 0.3 if "NVFP4" in type(recipe).__name__ else 0.05
    for name, expected in results[0].items():
        assert_close(results[1][name], expected.double(), coarse, name)


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
