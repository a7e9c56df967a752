"""A linear layer's products over a quantized weight and an input in high precision.

All three products (the output, and the gradients of input and weight) use the decoded weight: what
a low-precision GEMM computes, without its speed. The decoded weight lives for one product only; the
backward decodes again rather than keep a high-precision copy of every layer alive between forward
and backward.

The weight's gradient is that of the decoded value (straight-through), in the weight's shape and
dtype, for the FP32 master from which the next codes are cast. The backward is made of operations
that have gradients, so it can be differentiated as torch's own can.
"""

from __future__ import annotations

from typing import Any

import torch

from zerocast.nn.products import unchanged
from zerocast.tensors import QuantizedStorage, QuantizedTensor, dequantize


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
