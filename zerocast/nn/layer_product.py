"""Computes a layer under autocast: the norm or activation, quantized, and the three products.

:func:`run_forward` and :func:`run_backward` are functions of tensors and quantizers. Autograd runs
them by :class:`zerocast.nn.linear_functions.QuantizedProduct`, and compiled graphs by operations of
:mod:`zerocast.nn.traced_products`, so both give the same results.

    x  = source(input)                              x = input, without a source
    y  = Q(x) Q(w)^T + bias
    dx = Q(dy) Q(w)         dw = Q(dy)^T Q(x)       dbias = the sum of the rows of dy

Forward quantizes x and, where it is in high precision, the weight; backward quantizes the gradient
of the output. Between the two only quantized tensors are kept, each with the scales of its codes.
The backward uses the recipe's state to quantize the gradient, and for nothing else, so the products
are those of the same values even if that state has changed in between.

Of x only the copy that the weight gradient reads is kept. Of a source its input is kept and, if it
is a norm, two numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zerocast.arguments import present
from zerocast.nn.engines import Product
from zerocast.nn.quantized_ops import apply_fused, differentiate_fused
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.scaled_mm import gemm
from zerocast.numerics import FusedOp
from zerocast.recipes import Recipe, Role
from zerocast.tensors import QuantizedStorage, QuantizedTensor, TensorParallelShard

Watch = Callable[[Role, torch.Tensor, QuantizedStorage], None]
"""``watch(role, tensor, quantized)`` is called with each tensor that a layer quantizes."""


Output = tuple[torch.Tensor, torch.Tensor | None]
"""A product, and what a norm made of its input, or None."""


@dataclass(frozen=True, slots=True)
class GemmQuantizers:
    """The quantizers of the tensors of one linear layer."""

    input: Quantizer
    weight: Quantizer
    output: Quantizer
    grad_output: Quantizer
    grad_input: Quantizer


class ProductInputs(NamedTuple):
    """The inputs of one product of a layer, ``source(input) @ weight.T + bias``.

    Attributes:
        gemm: the product's number in the layer.
        input: [..., S]; S = K without a source.
        weight: [M, K].
        bias: [M], or None.
        source: the norm or the activation that makes [..., K] of the input; None where the input
            itself is multiplied.
        norm: weight and bias of a norm, [K] each, as far as it has them.
        wants_norm: whether the layer returns what the norm made, too.
        tp_shard: which rows or columns of a larger one the weight is.
    """

    gemm: int
    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    source: FusedOp | None = None
    norm: tuple[torch.Tensor, ...] = ()
    wants_norm: bool = False
    tp_shard: TensorParallelShard | None = None


class LayerProduct(NamedTuple):
    """The computation ``source(input) @ weight.T + bias`` of a layer, without its tensors.

    Attributes:
        source: the norm or the activation that makes what is multiplied; None where the input
            itself is multiplied.
        dtype: the dtype of the result, and of what the source makes.
        wants_norm: whether what a norm makes is returned, too.
        needs: whether input, gamma, beta, weight and bias need gradients.
    """

    source: FusedOp | None
    dtype: torch.dtype
    wants_norm: bool
    needs: tuple[bool, ...]

    @property
    def needs_source(self) -> bool:
        """Whether the gradient of what is multiplied is needed."""
        return any(self.needs[:3])

    @property
    def num_statistics(self) -> int:
        """The count of numbers that the norm saves of each row for its backward: mean and rstd, or
        rstd.
        """
        if self.source is None or not self.needs_source:
            return 0
        return {"layernorm": 2, "rmsnorm": 1}.get(self.source.function, 0)


class Made(NamedTuple):
    """The result of :func:`run_forward`.

    Attributes:
        out: the result, [T, M].
        normed: the result of the norm, [T, K], where it is wanted.
        statistics: the statistics of the norm, FP32 [T] each, as many as
            :attr:`LayerProduct.num_statistics`.
        saved: the copies of x and w that the products of the backward read.
    """

    out: torch.Tensor
    normed: torch.Tensor | None
    statistics: list[torch.Tensor]
    saved: SavedOperands

    def tensors(self) -> list[torch.Tensor]:
        """Return what the backward reads, once: the statistics, then the buffers of x and w."""
        return [*self.statistics, *self.saved.tensors()]


def run_forward(
    product: LayerProduct,
    quantizers: GemmQuantizers,
    watch: Watch | None,
    input: torch.Tensor,
    norm: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Made:
    """Compute ``product``.

    Args:
        product: the product that is computed.
        quantizers: those of the layer.
        watch: is shown what is quantized, or None.
        input: [T, S] of the source; without a source [T, K] in ``product.dtype``, or quantized
            already, [..., K].
        norm: gamma and beta, [K] each, as far as the source has them.
        weight: [M, K], quantized or in high precision.
        bias: [M] in ``product.dtype``, or None.
    """
    quantizers.input.set_usage(rowwise=True, columnwise=product.needs[3])
    normed, statistics = None, []
    if product.source is not None:
        gamma, beta = (*norm, None, None)[:2]
        result = apply_fused(
            product.source,
            input,
            quantizers.input,
            weight=gamma,
            bias=beta,
            dtype=product.dtype,
            output=product.wants_norm or watch is not None,
            statistics=product.needs_source,
        )
        x, normed = present(result.quantized).quantized_storage, result.output
        statistics = [each for each in (result.mean, result.rstd) if each is not None]
        if watch is not None:
            watch("input", present(normed), x)
    elif isinstance(input, QuantizedTensor):
        x = input.quantized_storage
    else:
        x = quantize_shown("input", quantizers.input, input, watch)
    saved = SavedOperands()
    saved.add(x if product.needs[3] else None)
    if isinstance(weight, QuantizedTensor):
        w = weight.quantized_storage
        saved.add(None)
    else:
        quantizers.weight.set_usage(rowwise=True, columnwise=product.needs_source)
        w = quantize_shown("weight", quantizers.weight, weight, watch)
        saved.add(w if product.needs_source else None)
    out = gemm(Product.OUTPUT, x, w, product.dtype, bias)
    return Made(out, normed if product.wants_norm else None, statistics, saved)


def run_backward(
    product: LayerProduct,
    quantizer: Quantizer,
    watch: Watch | None,
    grads: tuple[torch.Tensor, torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    x: QuantizedStorage | None,
    w: QuantizedStorage | None,
    weight_dtype: torch.dtype,
) -> list[torch.Tensor | None]:
    """Compute the gradients of input, gamma, beta, weight and bias; None for those that are not
    needed.

    Args:
        product: the product that the forward computed.
        quantizer: the quantizer of the gradient of the output.
        watch: is shown what is quantized, or None.
        grads: the gradients of the output [..., M], and of what the norm made, where that is used.
        inputs: the source's input and parameters, where their gradients are needed.
        statistics: those of the forward.
        x, w: the operands of the forward, where the products read them.
        weight_dtype: the dtype of the weight and of its gradient.
    """
    needs_weight, needs_bias = product.needs[3:]
    rows = grads[0].reshape(-1, grads[0].shape[-1])
    of_source: list[torch.Tensor | None] = [None, None, None]
    of_weight = None
    if product.needs_source or needs_weight:
        quantizer.set_usage(rowwise=product.needs_source, columnwise=needs_weight)
        dy = quantize_shown("grad_output", quantizer, rows, watch)
        if product.needs_source:
            of_x = gemm(Product.INPUT_GRADIENT, dy, present(w), product.dtype)
            of_source[0] = of_x
        if needs_weight:
            of_weight = gemm(Product.WEIGHT_GRADIENT, dy, present(x), product.dtype)
            of_weight = of_weight.to(weight_dtype)
        if product.needs_source and product.source is not None:
            of_source = differentiate_fused(
                product.source, of_x, grads[1], inputs, statistics, product.needs[:3]
            )
    return [*of_source, of_weight, rows.sum(0) if needs_bias else None]


def quantize_shown(
    role: Role, quantizer: Quantizer, tensor: torch.Tensor, watch: Watch | None
) -> QuantizedStorage:
    """Quantize ``tensor``, and call ``watch`` with it if there is one."""
    quantized = quantizer.quantize(tensor).quantized_storage
    if watch is not None:
        watch(role, tensor, quantized)
    return quantized


class SavedOperands:
    """Quantized tensors as autograd saves them: their buffers, and a description of each."""

    def __init__(self) -> None:
        self._meanings: list[tuple[torch.Size, torch.dtype, Recipe, tuple[str, ...]] | None] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, storage: QuantizedStorage | None) -> None:
        """Save the buffers with which the columnwise codes of ``storage`` are read; nothing for
        None.
        """
        if storage is None:
            self._meanings.append(None)
            return
        buffers = storage.buffers
        names = tuple(
            name
            for name in buffers
            if not name.startswith("rowwise_") or name.replace("row", "column", 1) not in buffers
        )
        self._meanings.append((storage.shape, storage.dtype, storage.recipe, names))
        self._tensors += [buffers[name] for name in names]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors to save, and drop the references to them."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def restore(self, tensors: Sequence[torch.Tensor]) -> list[QuantizedStorage | None]:
        """Make the quantized tensors again from what autograd gives back."""
        left = iter(tensors)
        return [
            None
            if meaning is None
            else QuantizedStorage(*meaning[:3], {name: next(left) for name in meaning[3]})
            for meaning in self._meanings
        ]
