"""Fused operations on a GPU: the bits of the CPU's loops, codes exact for the rounded result."""

import pytest
import torch

import zerocast
from tests.support.fused_ops import (
    FUNCTIONS,
    RECIPES,
    USAGES,
    every_bfloat16,
    parameters,
    quantizer_of,
)
from tests.support.same_bytes import assert_same_bytes
from zerocast.backends.cpu import CpuBackend
from zerocast.nn.fused import FusedResult, apply_fused
from zerocast.numerics import FusedOp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def run(function: str, x: torch.Tensor, recipe: str | None, usage: tuple[bool, bool],
        **kwargs: bool) -> FusedResult:  # fmt: skip
    """The function where ``x`` is."""
    given = parameters(function, x.shape[1] // (2 if function == "swiglu" else 1), 1)
    given = {name: tensor.to(x.device) for name, tensor in given.items()}
    quantizer = None if recipe is None else quantizer_of(RECIPES[recipe], usage, x.device.type)
    return apply_fused(FusedOp(function), x, quantizer, **given, **kwargs)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_bits_of_the_cpu(function):
    """Every BF16 input, and rows of normal values: the same bits as the native loops give."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(77, 4098, generator=generator), torch.randn(5, 10, generator=generator)]
    if function not in ("layernorm", "rmsnorm"):
        inputs.append(every_bfloat16())
    for x in inputs:
        made = run(function, x.cuda(), None, (True, True)).output
        with zerocast.use_backend(CpuBackend()):
            expected = run(function, x, None, (True, True)).output
        assert_same_bytes(made.cpu(), expected, f"{function} of {tuple(x.shape)}")


@pytest.mark.parametrize("shape", [(1, 32), (130, 288), (257, 4096), (1000, 544)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_codes_are_exact(function, recipe, shape):
    """Both copies, and each alone, are what the reference makes of the rounded result."""
    cols = shape[1] * (2 if function == "swiglu" else 1)
    x = torch.randn(shape[0], cols, generator=torch.Generator().manual_seed(2)).bfloat16()
    for usage in USAGES:
        made = run(function, x.cuda(), recipe, usage, output=True)
        with zerocast.use_backend("reference"):
            expected = quantizer_of(RECIPES[recipe], usage).quantize(made.output.cpu())
        for name, buffer in expected.quantized_storage.buffers.items():
            actual = made.quantized.quantized_storage.buffers[name].cpu()
            assert_same_bytes(actual, buffer, f"{function}, {recipe}, {shape}, {usage}: {name}")
