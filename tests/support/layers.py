"""What the tests of layers share: every recipe, and a record of the products that a layer makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from zerocast.nn import products
from zerocast.nn.gemm import Product, gemm
from zerocast.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from zerocast.tensors import QuantizedStorage, dequantize

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8-32x32": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4-4over6": NVFP4BlockScaling(nvfp4_4over6="weights"),
}

every_recipe = pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, id=name) for name, recipe in RECIPES.items()]
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

both_dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
)


@dataclass
class Made:
    """A product that was made: its operands in float64, [rows, cols] as stored, and its result."""

    product: Product
    a: torch.Tensor
    b: torch.Tensor
    result: torch.Tensor


@contextmanager
def recorded_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Made]]:
    """The products of quantized operands, in order, while the context lasts."""
    made: list[Made] = []

    def record(
        product: Product,
        a: QuantizedStorage,
        b: QuantizedStorage,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result = gemm(product, a, b, dtype, bias)
        pairs = list(zip((a, b), product.value, strict=True))
        assert all(storage.has_columnwise or not columnwise for storage, columnwise in pairs), (
            f"an operand of the {product.title} lacks its columnwise copy"
        )
        operands = [dequantize(storage, columnwise=c).double() for storage, c in pairs]
        made.append(Made(product, *operands, result.detach().clone()))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(products, "gemm", record)
        yield made


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Equal within ``tolerance`` of the largest magnitude."""
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    actual, expected = actual.detach().double(), expected.detach()
    largest = expected.abs().max()
    assert largest > 0, f"{what} is all zeros"
    error = float((actual - expected).abs().max() / largest)
    assert error <= tolerance, f"{what}: relative error {error:.2e} over {tolerance:.0e}"
