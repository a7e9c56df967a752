"""The products of quantized matrices that layers are made of, and who computes them.

    output            y  = Q(x) Q(w)^T        rowwise, rowwise
    input gradient    dx = Q(dy) Q(w)         rowwise, columnwise
    weight gradient   dw = Q(dy)^T Q(x)       columnwise, columnwise

Low-precision GEMMs sum along rows of codes, so the operands of the two gradients are the columnwise
copies: of schemes that quantize those by themselves they are other values than the rowwise ones.

The library multiplies codes where it and the hardware can (:mod:`zerocast.nn.library_gemm`).
Elsewhere both operands are decoded and multiplied in the result's dtype: the same mathematics, at
the speed of that dtype. :func:`engine` says which it is, and why; nothing is tried and caught.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from zerocast.nn import library_gemm
from zerocast.nn.library_gemm import Kind, Side
from zerocast.tensors import QuantizedStorage, dequantize


class Product(Enum):
    """One of a linear layer's three products; its value says which operands are columnwise."""

    OUTPUT = (False, False)
    INPUT_GRADIENT = (False, True)
    WEIGHT_GRADIENT = (True, True)

    @property
    def title(self) -> str:
        """Its name in sentences."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Engine:
    """Who computes a product.

    Attributes:
        kind: the library's GEMM, or None for decoding.
        reason: why not the library; empty where it does.
    """

    kind: Kind | None
    reason: str

    def __str__(self) -> str:
        if self.kind is None:
            return f"decoded operands: {self.reason}"
        call = "torch.nn.functional.scaled_mm" if self.kind.needs_functional else "torch._scaled_mm"
        return f"{call}, {self.kind.name}"


def engine(a: Side, b: Side, dtype: torch.dtype, device: torch.device) -> Engine:
    """Who computes ``a @ b.T`` in ``dtype`` on ``device``."""
    kind, reason = library_gemm.why_not(a, b, dtype, device)
    return Engine(kind if reason is None else None, reason or "")


def gemm(
    product: Product,
    a: QuantizedStorage,
    b: QuantizedStorage,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One product of two quantized matrices.

    Args:
        product: which one.
        a: x [T, K] for the output, dy [T, M] for the gradients.
        b: w [M, K] for the output and the input gradient, x [T, K] for the weight gradient.
        dtype: of the result.
        bias: [columns of the result], in ``dtype``; added before rounding where the library can.

    Returns:
        [T, M], [T, K] or [M, K].

    A tensor without the columnwise copy that a product reads is decoded, rowwise.

    Raises:
        StaleCopyError: where a columnwise copy is needed and stale.
    """
    operands = [(a, product.value[0]), (b, product.value[1])]
    if all(storage.has_columnwise or not columnwise for storage, columnwise in operands):
        sides = [_side(*operand) for operand in operands]
        kind = engine(sides[0], sides[1], dtype, a.device).kind
        if kind is not None:
            return _by_library(kind, product, sides, (a, b), dtype, bias)
    left, right = (_values(*operand).to(dtype) for operand in operands)
    with torch._C._DisableAutocast():
        if product is Product.OUTPUT:
            return torch.nn.functional.linear(left, right, bias)
        assert bias is None
        return left @ right if product is Product.INPUT_GRADIENT else left.t() @ right


def _side(storage: QuantizedStorage, columnwise: bool) -> Side:
    grid = storage.grid
    return Side(storage.recipe, (grid.rows, grid.cols), columnwise)


def _by_library(
    kind: Kind,
    product: Product,
    sides: list[Side],
    storages: tuple[QuantizedStorage, QuantizedStorage],
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    a, b = (
        library_gemm.arguments(kind, side, storage)
        for side, storage in zip(sides, storages, strict=True)
    )
    in_epilogue = bias is not None and dtype in (torch.bfloat16, torch.float16)
    # Gradients sum over more terms and of both signs: there Hopper's shorter accumulator shows.
    out = library_gemm.multiply(
        kind,
        a,
        b,
        dtype,
        bias if in_epilogue else None,
        fast_accumulation=product is Product.OUTPUT,
    )
    return out if bias is None or in_epilogue else out.add_(bias)


def _values(storage: QuantizedStorage, columnwise: bool) -> torch.Tensor:
    """[M, K] FP32, decoded. A tensor made without its columnwise copy lends the rowwise one."""
    values = dequantize(storage, columnwise=columnwise and storage.has_columnwise)
    return values.view(-1, values.shape[-1])
