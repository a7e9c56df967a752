"""The three products of a linear layer with quantized operands, as one differentiable function.

Forward quantizes the input and, where it is in high precision, the weight; backward quantizes the
gradient of the output. What stays between them are quantized tensors, each with the scales under
which its codes mean something: the backward asks the recipe's state for nothing but the gradient's
own quantization, so whatever that state did in between, the products are those of the same values.

    y  = Q(x) Q(w)^T + bias
    dx = Q(dy) Q(w)         dw = Q(dy)^T Q(x)         dbias = the sum of the rows of dy

Of the input only the copy that the weight gradient reads is kept. It is saved as autograd saves
tensors, buffer by buffer, so hooks on saved tensors (offloading, recomputation) see bytes. A weight
that is quantized itself is kept by reference, and a write since then is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from zerocast.errors import ChangedWeightError, UnsupportedError
from zerocast.nn.engines import Product
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.scaled_mm import gemm
from zerocast.recipes import Recipe, Role
from zerocast.tensors import QuantizedStorage, QuantizedTensor, dequantize

Backward = Callable[..., Any]


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_transforms(name: str) -> None:
    """Raise :class:`UnsupportedError` under such a transform, for a layer of this ``name``."""
    if is_transformed():
        raise UnsupportedError(
            f"{name} quantizes its operands under zerocast.autocast, where it has the gradient of "
            f"a backward and nothing else, and torch.func or forward-mode differentiation asks for "
            f"more; leave the region, or use zerocast.autocast(enabled=False), where a weight is "
            f"decoded and has all derivatives."
        )


def first_derivatives_only(backward: Backward) -> Backward:
    """Let a ``backward`` of an autograd.Function refuse to be differentiated itself."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() or any(map(_is_batched, grads)):
            raise UnsupportedError(
                "the backward of a layer under zerocast.autocast quantizes gradients and has no "
                "derivative, so create_graph=True, is_grads_batched=True and what uses them "
                "(Hessians, penalties on gradients) need the layer's forward outside of the "
                "region, or under zerocast.autocast(enabled=False)."
            )
        return backward(ctx, *grads)

    return run


def _is_batched(grad: torch.Tensor | None) -> bool:
    """Whether many gradients go through one backward, by either of torch's ways."""
    functorch = torch._C._functorch
    return grad is not None and (
        functorch.is_functorch_wrapped_tensor(grad) or functorch.is_legacy_batchedtensor(grad)
    )


Watch = Callable[[Role, torch.Tensor, QuantizedStorage], None]
"""``watch(role, tensor, quantized)`` is shown each tensor that a layer quantizes."""


@dataclass(frozen=True, slots=True)
class GemmQuantizers:
    """How the tensors of one linear layer are quantized."""

    input: Quantizer
    weight: Quantizer
    output: Quantizer
    grad_output: Quantizer
    grad_input: Quantizer


class QuantizedLinear(torch.autograd.Function):
    """``QuantizedLinear.apply(input, weight, bias, quantizers, dtype, output_shape, watch)``.

    Args:
        input: [T, K] in ``dtype``; or quantized already, [..., K].
        weight: [M, K], quantized or in high precision.
        bias: [M] in ``dtype``, or None.
        quantizers: of this layer.
        dtype: of the result and of the gradients that flow on.
        output_shape: where given, the result is quantized in this shape.
        watch: is shown what is quantized, or None.

    Returns:
        [T, M].

    Raises:
        ChangedWeightError: by the backward, where a quantized weight was written since.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        quantizers: GemmQuantizers,
        dtype: torch.dtype,
        output_shape: tuple[int, ...] | None,
        watch: Watch | None,
    ) -> torch.Tensor:
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        if isinstance(input, QuantizedTensor):
            x = input.quantized_storage
        else:
            quantizers.input.set_usage(rowwise=True, columnwise=needs_weight)
            x = _quantize("input", quantizers.input, input, watch)
        ctx.primary = isinstance(weight, QuantizedTensor)
        if isinstance(weight, QuantizedTensor):
            w = weight.quantized_storage
            ctx.weight, ctx.version = w, w.version
        else:
            quantizers.weight.set_usage(rowwise=True, columnwise=needs_input)
            w = _quantize("weight", quantizers.weight, weight, watch)
        ctx.saved = Saved()
        ctx.saved.add(x if needs_weight else None)
        ctx.saved.add(w if needs_input and not ctx.primary else None)
        ctx.save_for_backward(*ctx.saved.tensors())
        ctx.grad_output, ctx.watch = quantizers.grad_output, watch
        ctx.dtype, ctx.weight_dtype, ctx.input_shape = dtype, weight.dtype, input.shape
        out = gemm(Product.OUTPUT, x, w, dtype, bias)
        if output_shape is None:
            return out
        quantizers.output.set_usage(rowwise=True, columnwise=any(ctx.needs_input_grad))
        return QuantizedTensor(
            _quantize("output", quantizers.output, out.view(output_shape), watch)
        )

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        x, w = ctx.saved.restore(ctx.saved_tensors)
        grad_input = grad_weight = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        if needs_bias:
            grad_bias = rows.sum(0)
        if needs_input or needs_weight:
            ctx.grad_output.set_usage(rowwise=needs_input, columnwise=needs_weight)
            dy = _quantize("grad_output", ctx.grad_output, rows, ctx.watch)
            if needs_input:
                w = unchanged(ctx.weight, ctx.version) if ctx.primary else w
                grad_input = gemm(Product.INPUT_GRADIENT, dy, w, ctx.dtype).view(ctx.input_shape)
            if needs_weight:
                grad_weight = gemm(Product.WEIGHT_GRADIENT, dy, x, ctx.dtype).to(ctx.weight_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _quantize(
    role: Role, quantizer: Quantizer, tensor: torch.Tensor, watch: Watch | None
) -> QuantizedStorage:
    quantized = quantizer.quantize(tensor).quantized_storage
    if watch is not None:
        watch(role, tensor, quantized)
    return quantized


def unchanged(storage: QuantizedStorage, version: int) -> QuantizedStorage:
    """The weight that the forward used; an error where its codes are others now."""
    if storage.version != version:
        raise ChangedWeightError(
            f"the backward of a Linear needs the weight {tuple(storage.shape)} that its "
            f"forward used, and its codes have been written since (by a cast or a copy_). Run the "
            f"backward before the optimizer's step, or the forward again."
        )
    return storage


class Saved:
    """Quantized tensors as what autograd saves: their buffers, and beside them what they mean."""

    def __init__(self) -> None:
        self._meanings: list[tuple[torch.Size, torch.dtype, Recipe, tuple[str, ...]] | None] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, storage: QuantizedStorage | None) -> None:
        """Save what the columnwise codes of ``storage`` are read with; None saves nothing."""
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
        """What to save; once, for they are not kept here."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def restore(self, tensors: Sequence[torch.Tensor]) -> list[QuantizedStorage | None]:
        """The quantized tensors again, from what autograd gives back."""
        left = iter(tensors)
        return [
            None
            if meaning is None
            else QuantizedStorage(*meaning[:3], {name: next(left) for name in meaning[3]})
            for meaning in self._meanings
        ]


class _Decoded(torch.autograd.Function):
    """``_Decoded.apply(weight, storage, dtype)``: the value of ``storage``, with its gradient
    passed on to ``weight`` (straight-through).
    """

    generate_vmap_rule = True  # for is_grads_batched=True, which runs backwards under torch.vmap

    @staticmethod
    def forward(
        weight: QuantizedTensor, storage: QuantizedStorage, dtype: torch.dtype
    ) -> torch.Tensor:
        return dequantize(storage).to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.to(ctx.dtype), None, None


class WeightOnlyLinear(torch.autograd.Function):
    """``WeightOnlyLinear.apply(input, weight, bias, dtype)``: [..., K] -> [..., M].

    Between forward and backward lives a reference to the codes, and the input where the weight's
    gradient is asked for.

    Raises:
        ChangedWeightError: by the backward, where the weight was written since the forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,  # [..., K]
        weight: QuantizedTensor,  # [M, K]
        bias: torch.Tensor | None,  # [M]
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None)
        # Not save_for_backward: hooks on saved tensors would pack the weight by its value.
        ctx.weight, ctx.storage, ctx.dtype = weight, weight.quantized_storage, dtype
        ctx.version = ctx.storage.version
        return torch.nn.functional.linear(input, weight.dequantize(dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        grad_rows = grad.reshape(-1, grad.shape[-1])  # [N, M]
        if needs_input:
            storage = unchanged(ctx.storage, ctx.version)
            grad_input = grad @ _Decoded.apply(ctx.weight, storage, ctx.dtype)
        if needs_weight:
            input_rows = input.reshape(-1, input.shape[-1])  # [N, K]
            grad_weight = (grad_rows.t() @ input_rows).to(ctx.storage.dtype)
        if needs_bias:
            grad_bias = grad_rows.sum(0)
        return grad_input, grad_weight, grad_bias, None
