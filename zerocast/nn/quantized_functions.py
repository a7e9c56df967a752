"""Norms and activations whose result is quantized as it is made, with gradients.

The result is a :class:`QuantizedTensor` that a product reads as it is; the gradient that comes back
is in high precision and belongs to the rounded result (straight-through). Kept for the backward are
the input and, of a norm, two numbers a row: never the result.
"""

from __future__ import annotations

from typing import Any

import torch

from zerocast.nn.fused import apply_fused
from zerocast.nn.linear_functions import Watch, first_derivatives_only
from zerocast.nn.quantizer import Quantizer
from zerocast.numerics import FusedOp

aten = torch.ops.aten


class QuantizedNorm(torch.autograd.Function):
    """``QuantizedNorm.apply(input, weight, bias, op, quantizer, dtype, wants_output,
    watch)``.

    Args:
        input: [T, K].
        weight: [K].
        bias: [K], or None.
        op: ``"layernorm"`` or ``"rmsnorm"``, with eps and where gamma is centred.
        quantizer: of the result.
        dtype: that the result is rounded to.
        wants_output: whether the rounded result is returned, too.
        watch: is shown what is quantized, or None.

    Returns:
        The quantized result, and the rounded one or None; both [T, K].
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        op: FusedOp,
        quantizer: Quantizer,
        dtype: torch.dtype,
        wants_output: bool,
        watch: Watch | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        made = apply_fused(
            op,
            input,
            quantizer,
            weight=weight,
            bias=bias,
            dtype=dtype,
            output=wants_output or watch is not None,
            statistics=any(ctx.needs_input_grad),
        )
        assert made.quantized is not None
        if watch is not None:
            assert made.output is not None
            watch("input", made.output, made.quantized.quantized_storage)
        ctx.op = op
        ctx.save_for_backward(input, weight, bias, made.mean, made.rstd)
        return made.quantized, made.output if wants_output else None

    @staticmethod
    @first_derivatives_only
    def backward(
        ctx: Any, grad: torch.Tensor, grad_output: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        input, weight, bias, mean, rstd = ctx.saved_tensors
        dy = grad.float() if grad_output is None else grad.float() + grad_output.float()
        centred = input.float() if mean is None else input.float() - mean[:, None]
        normed = centred * rstd[:, None]
        gamma = weight.float() + 1 if ctx.op.zero_centered_gamma else weight.float()
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        if needs_input:
            # Moving x moves mean and deviation, too: what points along 1 and along x is taken out.
            direct = dy * gamma
            along = normed * (direct * normed).mean(1, keepdim=True)
            level = 0 if mean is None else direct.mean(1, keepdim=True)
            grad_input = ((direct - along - level) * rstd[:, None]).to(input.dtype)
        if needs_weight:
            grad_weight = (dy * normed).sum(0).to(weight.dtype)
        if needs_bias:
            grad_bias = dy.sum(0).to(bias.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


class QuantizedActivation(torch.autograd.Function):
    """``QuantizedActivation.apply(input, op, quantizer, watch)``: [T, S] -> [T, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        op: FusedOp,
        quantizer: Quantizer,
        watch: Watch | None,
    ) -> torch.Tensor:
        made = apply_fused(op, input, quantizer, output=watch is not None)
        assert made.quantized is not None
        if watch is not None:
            assert made.output is not None
            watch("input", made.output, made.quantized.quantized_storage)
        ctx.function = op.function
        ctx.save_for_backward(input)
        return made.quantized

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        return _derivative(ctx.function, grad, input), None, None, None


def _derivative(function: str, grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """The gradient of the input of an activation."""
    if function == "relu":
        return aten.threshold_backward(grad, input, 0)
    if function == "silu":
        return aten.silu_backward(grad, input)
    if function == "swiglu":
        gated, gate = input.chunk(2, dim=-1)
        of_gated = aten.silu_backward(grad * gate, gated)
        return torch.cat((of_gated, grad * torch.nn.functional.silu(gated)), dim=-1)
    approximate = "tanh" if function == "gelu_tanh" else "none"
    return aten.gelu_backward(grad, input, approximate=approximate)
