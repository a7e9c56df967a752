"""Linear: ``torch.nn.Linear`` over a quantized weight.

All three products (the output, and the gradients of input and weight) use the dequantized weight:
what a low-precision GEMM computes, without its speed. The dequantized weight lives for one product
only; the backward decodes again rather than keep a high-precision copy of every layer alive between
forward and backward.

The weight's gradient is that of the dequantized value (straight-through), in the weight's shape and
dtype, for the FP32 master from which the next codes are cast.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from zerocast.errors import ChangedWeightError, InputError
from zerocast.recipes import Recipe
from zerocast.tensors import (
    QuantizedStorage,
    QuantizedTensor,
    dequantize,
    quantize,
    rebuild_derived,
)


class Linear(torch.nn.Linear):
    """``y = x @ weight.T + bias`` over a quantized ``weight``; otherwise ``torch.nn.Linear``.

    The parameters start from the same random numbers as ``torch.nn.Linear``'s, and the weight keeps
    the values before quantization for an optimizer's masters
    (:meth:`QuantizedTensor.get_high_precision_init_val`).

    Inside ``torch.compile`` the weight is decoded in the graph, and nobody looks whether its
    derived copies are stale: no product here reads them.

    Args:
        in_features: K.
        out_features: M.
        bias: whether to add a bias [M], which stays in high precision.
        recipe: the scheme of the weight; it must hold [M, K].
        device: where the parameters are; not meta.
        dtype: the nominal dtype of the weight, and the bias's dtype: FP32, BF16 or FP16.
        columnwise: whether the weight holds the columnwise copy.

    Raises:
        InputError: where the recipe cannot hold the weight.
        StaleCopyError: by the forward, between a cast and its post-all-gather processing.
        ChangedWeightError: by the backward, where the weight was written since the forward.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        columnwise: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if self.weight.is_meta:
            raise InputError(
                "zerocast.nn.Linear quantizes its initial weight, so it needs a device with "
                "memory, got 'meta'; build it on 'cpu' and move it."
            )
        self.weight = quantized_parameter(self.weight, recipe, columnwise=columnwise)

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, as ``torch.nn.Linear`` does, and quantize the weight."""
        fresh = torch.empty_like(self.weight)
        torch.nn.init.kaiming_uniform_(fresh, a=math.sqrt(5))
        with torch.no_grad():
            self.weight.copy_(fresh)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., M]."""
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if torch.compiler.is_compiling() or not isinstance(weight, QuantizedTensor):
            return torch.nn.functional.linear(input, weight, bias)
        weight.storage.prepare_for_forward(lambda storage: rebuild_derived([storage]))
        dtype = weight.dtype
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input = input.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return _Products.apply(input, weight, bias, dtype)

    def extra_repr(self) -> str:
        """Features and bias, as torch says them, and the recipe."""
        if not isinstance(self.weight, QuantizedTensor):
            return super().extra_repr()
        return f"{super().extra_repr()}, recipe={self.weight.recipe}"


def quantized_parameter(
    weight: torch.Tensor, recipe: Recipe, *, columnwise: bool = True
) -> torch.nn.Parameter:
    """``weight`` quantized; its present value is kept, on the CPU, for an optimizer's masters."""
    quantized = quantize(weight, recipe, columnwise=columnwise)
    quantized.storage.high_precision_init_val = weight.detach().to("cpu", copy=True).contiguous()
    return torch.nn.Parameter(quantized, weight.requires_grad)


class _Products(torch.autograd.Function):
    """Output, input gradient, weight gradient; between them only a reference to the codes."""

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
        ctx.storage, ctx.version, ctx.dtype = weight.storage, weight.storage.version, dtype
        return torch.nn.functional.linear(input, weight.dequantize(dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        grad_rows = grad.reshape(-1, grad.shape[-1])  # [N, M]
        if needs_input:
            grad_input = grad @ _unchanged_weight(ctx.storage, ctx.version, ctx.dtype)
        if needs_weight:
            input_rows = input.reshape(-1, input.shape[-1])  # [N, K]
            grad_weight = (grad_rows.t() @ input_rows).to(ctx.storage.dtype)
        if needs_bias:
            grad_bias = grad_rows.sum(0)
        return grad_input, grad_weight, grad_bias, None


def _unchanged_weight(storage: QuantizedStorage, version: int, dtype: torch.dtype) -> torch.Tensor:
    """The value that the forward used, decoded again; an error where the codes are others now."""
    if storage.version != version:
        raise ChangedWeightError(
            f"the backward of a Linear needs the weight {tuple(storage.shape)} that its forward "
            f"used, and its codes have been written since (by a cast or a copy_). Run the backward "
            f"before the optimizer's step, or the forward again."
        )
    return dequantize(storage).to(dtype)
