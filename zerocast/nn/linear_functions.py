"""The differentiable functions of linear layers: with quantized operands, and with a decoded
weight.

Tensors are saved as autograd saves them, buffer by buffer, so hooks on saved tensors (offloading,
recomputation) see bytes. A weight that is quantized itself is kept by reference, and a write since
then is an error.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from zerocast.errors import ChangedWeightError, UnsupportedError
from zerocast.nn.layer_product import (
    GemmQuantizers,
    LayerProduct,
    Watch,
    quantize_shown,
    run_backward,
    run_forward,
)
from zerocast.numerics import FusedOp
from zerocast.tensors import QuantizedStorage, QuantizedTensor, dequantize

Backward = Callable[..., Any]


def is_transformed() -> bool:
    """Say whether a transform of torch.func, or forward-mode differentiation, is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_transforms(name: str) -> None:
    """Raise :class:`UnsupportedError` under such a transform, for a layer of this ``name``."""
    if is_transformed():
        raise UnsupportedError(
            f"{name} quantizes its operands under zerocast.autocast, and supports only backward() "
            "there, not torch.func or forward-mode differentiation. Leave the region, or use "
            "zerocast.autocast(enabled=False), which decodes the weight and has all derivatives."
        )


def first_derivatives_only(backward: Backward) -> Backward:
    """Make the ``backward`` of an autograd.Function raise where it would be differentiated
    itself.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() or any(map(_is_batched, grads)):
            raise UnsupportedError(
                "the backward of a layer under zerocast.autocast quantizes gradients and has no "
                "derivative. For create_graph=True and is_grads_batched=True (Hessians, gradient "
                "penalties) run the layer's forward outside of the region, or under "
                "zerocast.autocast(enabled=False)."
            )
        return backward(ctx, *grads)

    return run


def _is_batched(grad: torch.Tensor | None) -> bool:
    """Say whether ``grad`` is a batch of gradients, in either of torch's two forms."""
    functorch = torch._C._functorch
    return grad is not None and (
        functorch.is_functorch_wrapped_tensor(grad) or functorch.is_legacy_batchedtensor(grad)
    )


class QuantizedProduct(torch.autograd.Function):
    """``QuantizedProduct.apply(input, gamma, beta, weight, bias, source, dtype, wants_norm,
    quantizers, output_shape, watch)``.

    The arguments are those of :class:`LayerProduct` and :func:`run_forward`. With ``output_shape``
    the result is quantized in this shape.

    Returns:
        [T, M], and what the norm made, [T, K], or None.

    Raises:
        ChangedWeightError: by the backward, where a quantized weight was written since.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        source: FusedOp | None,
        dtype: torch.dtype,
        wants_norm: bool,
        quantizers: GemmQuantizers,
        output_shape: tuple[int, ...] | None,
        watch: Watch | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.product = LayerProduct(source, dtype, wants_norm, ctx.needs_input_grad[:5])
        norm = [each for each in (gamma, beta) if each is not None]
        made = run_forward(ctx.product, quantizers, watch, input, norm, weight, bias)
        inputs = [input, *norm] if source is not None and ctx.product.needs_source else []
        ctx.save_for_backward(*inputs, *made.tensors())
        ctx.num_inputs, ctx.saved = len(inputs), made.saved
        ctx.weight = None
        if isinstance(weight, QuantizedTensor):
            ctx.weight = weight.quantized_storage, weight.quantized_storage.version
        ctx.grad_output, ctx.watch = quantizers.grad_output, watch
        ctx.weight_dtype, ctx.input_shape = weight.dtype, input.shape
        out = made.out
        if output_shape is not None:
            quantizers.output.set_usage(rowwise=True, columnwise=any(ctx.needs_input_grad))
            out = out.view(output_shape)
            out = QuantizedTensor(quantize_shown("output", quantizers.output, out, watch))
        return out, made.normed

    @staticmethod
    @first_derivatives_only
    def backward(
        ctx: Any, grad: torch.Tensor, grad_normed: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        product, tensors = ctx.product, ctx.saved_tensors
        num_read = ctx.num_inputs + product.num_statistics
        x, w = ctx.saved.restore(tensors[num_read:])
        if ctx.weight is not None and product.needs_source:
            w = unchanged(*ctx.weight)
        of_input, *others = run_backward(
            product,
            ctx.grad_output,
            ctx.watch,
            (grad, grad_normed),
            tensors[: ctx.num_inputs],
            tensors[ctx.num_inputs : num_read],
            x,
            w,
            ctx.weight_dtype,
        )
        of_input = None if of_input is None else of_input.view(ctx.input_shape)
        return of_input, *others, *(None,) * 6


def unchanged(storage: QuantizedStorage, version: int) -> QuantizedStorage:
    """Return the weight that the forward used; raise an error if its codes have changed since."""
    if storage.version != version:
        raise ChangedWeightError(
            f"the backward of a Linear needs the weight {tuple(storage.shape)} that its "
            f"forward used, and its codes have been written since (by a cast or a copy_). Run the "
            f"backward before the optimizer's step, or the forward again."
        )
    return storage


class _Decoded(torch.autograd.Function):
    """``_Decoded.apply(weight, storage, dtype)``: decodes ``storage``, with its gradient passed on
    to ``weight`` (straight-through).
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

    Between forward and backward it keeps a reference to the codes, and the input if the weight
    needs a gradient.

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
