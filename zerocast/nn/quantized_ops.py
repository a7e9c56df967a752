"""Norms and activations whose result is quantized, and their gradients.

:func:`apply_fused` is the general form of the operations of :mod:`zerocast.nn.functional`: one
operation of the backend computes the result and writes it, rounded once to the nominal dtype, and
the result is cast like any other tensor. Where nothing is quantized, layers compute the same by
torch's functions (:func:`in_high_precision`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.arguments import check_flag, check_number, check_tensor, present, shown
from zerocast.backends import backend_for
from zerocast.errors import InputError
from zerocast.nn.quantizer import Quantizer
from zerocast.numerics import FusedOp, FusedOperand
from zerocast.recipes import NOMINAL_DTYPES, check_nominal
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.quantize import quantize_into

Result = torch.Tensor | tuple[QuantizedTensor, torch.Tensor]
"""The quantized result where there is a quantizer, with ``output`` beside the rounded one; the
rounded result alone where there is no quantizer.
"""


@dataclass(frozen=True, slots=True)
class FusedResult:
    """The result of :func:`apply_fused`.

    Attributes:
        quantized: the codes and their scales; None without a quantizer.
        output: the rounded result; None where a quantizer makes the result and ``output`` is False.
        mean, rstd: FP32 [rows], with ``statistics``: the mean of each row (layernorm only) and
            1 / sqrt(variance or mean of squares + eps); else None.
    """

    quantized: QuantizedTensor | None
    output: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor | None

    @property
    def result(self) -> Result:
        """The value that the functions of :mod:`zerocast.nn.functional` return."""
        if self.quantized is None:
            return present(self.output)
        return self.quantized if self.output is None else (self.quantized, self.output)


def apply_fused(
    op: FusedOp,
    x: torch.Tensor,
    quantizer: Quantizer | None = None,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    output: bool = False,
    statistics: bool = False,
    out: QuantizedTensor | None = None,
) -> FusedResult:
    """Compute ``op`` of ``x``, round the result, and quantize it where there is a quantizer.

    Args:
        op: the operation.
        x: [..., S], FP32, BF16 or FP16; S = 2 K for swiglu, else K.
        quantizer: makes the codes; None for the rounded result alone.
        weight, bias: [K], of the norms.
        dtype: the dtype of the result; that of ``x`` by default.
        output: whether the rounded result is returned beside the quantized one.
        statistics: whether a norm returns ``mean`` and ``rstd``.
        out: a tensor that the quantizer made, to be overwritten.

    Raises:
        InputError: for arguments that do not fit together. Nothing has been written.
    """
    check_tensor("x", x)
    check_quantizer(quantizer, output)
    dtype = x.dtype if dtype is None else dtype
    shape = (*x.shape[:-1], _columns(op, x, dtype, weight, bias))
    if quantizer is None:
        out = None
    elif out is None:
        out = quantizer.make_empty(shape, dtype=dtype, device=x.device)
    else:
        quantizer.check_out(out, torch.empty((), dtype=dtype, device=x.device).expand(shape))
    source = plain(x).reshape(-1, x.shape[-1]).contiguous()
    round_to = dtype if quantizer is None else quantizer.recipe.round_to(dtype)

    def statistic(is_wanted: bool) -> torch.Tensor | None:
        return source.new_empty(len(source), dtype=torch.float32) if is_wanted else None

    operand = FusedOperand(
        op,
        source,
        source.new_empty(len(source), shape[-1], dtype=round_to),
        None if weight is None else plain(weight).contiguous(),
        None if bias is None else plain(bias).contiguous(),
        mean=statistic(statistics and op.function == "layernorm"),
        rstd=statistic(statistics and op.is_norm),
    )
    backend_for(x.device).fused_op(operand)()
    rounded = operand.output.view(shape)
    if quantizer is not None:
        with quantizer.cast_into(present(out).quantized_storage) as whole:
            quantizer.record(quantize_into(whole, rounded, advances=False))
    wanted = output or quantizer is None
    return FusedResult(out, rounded.to(dtype) if wanted else None, operand.mean, operand.rstd)


def differentiate_fused(
    op: FusedOp,
    grad: torch.Tensor,
    grad_output: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    needs: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Return the gradients of an operation's input, weight and bias, as far as they are needed.

    Args:
        op: the operation.
        grad: the gradient of the quantized result [T, K]; it passes to the rounded one
            (straight-through).
        grad_output: the gradient of the rounded result of a norm, where that is used, too.
        inputs: input [T, S] and, of a norm, weight and bias [K], as far as it has them.
        statistics: the statistics of a norm, the mean of each row (layernorm only) and its
            ``rstd``.
        needs: whether input, weight and bias need gradients.
    """
    if not op.is_norm:
        return [_differentiate_activation(op.function, grad, inputs[0]), None, None]
    (input, weight, *_), (*mean, rstd) = inputs, statistics
    dy = grad.float() if grad_output is None else grad.float() + grad_output.float()
    centred = input.float() - mean[0][:, None] if mean else input.float()
    normed = centred * rstd[:, None]
    gamma = weight.float() + 1 if op.zero_centered_gamma else weight.float()
    of_input = of_weight = of_bias = None
    if needs[0]:
        # mean and rstd depend on x, too: subtract their part of the gradient, along 1 and along x.
        direct = dy * gamma
        along = normed * (direct * normed).mean(1, keepdim=True)
        level = direct.mean(1, keepdim=True) if mean else 0
        of_input = ((direct - along - level) * rstd[:, None]).to(input.dtype)
    if needs[1]:
        of_weight = (dy * normed).sum(0).to(weight.dtype)
    if needs[2]:
        of_bias = dy.sum(0).to(inputs[2].dtype)
    return [of_input, of_weight, of_bias]


def _differentiate_activation(
    function: str, grad: torch.Tensor, input: torch.Tensor
) -> torch.Tensor:
    aten = torch.ops.aten
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


def in_high_precision(
    op: FusedOp, input: torch.Tensor, norm: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Compute the operation by torch's functions, which have gradients.

    Args:
        op: the operation.
        input: [..., S].
        norm: weight and bias of a norm, [K] each, as far as it has them.

    Returns:
        [..., K] in the input's dtype.
    """
    functions = torch.nn.functional
    function = op.function
    if norm:
        weight = 1 + norm[0] if op.zero_centered_gamma else norm[0]
        bias = norm[1] if len(norm) > 1 else None
        if function == "layernorm":
            return functions.layer_norm(input, weight.shape, weight, bias, op.eps)
        return functions.rms_norm(input, weight.shape, weight, op.eps)
    if function == "swiglu":
        gated, gate = input.chunk(2, dim=-1)
        return functions.silu(gated) * gate
    if function == "relu":
        return functions.relu(input)
    if function == "silu":
        return functions.silu(input)
    return functions.gelu(input, approximate="tanh" if function == "gelu_tanh" else "none")


def check_quantizer(quantizer: Quantizer | None, output: bool) -> None:
    """Raise :class:`InputError` unless ``quantizer`` is a quantizer or None, and ``output`` a
    bool.
    """
    check_flag("output", output)
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise InputError(f"quantizer must be a zerocast.Quantizer or None, got {shown(quantizer)}.")


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in high precision, without its gradient."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else x.detach()


def _columns(
    op: FusedOp,
    x: torch.Tensor,
    dtype: torch.dtype,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> int:
    """Return K, the columns of the result; raise :class:`InputError` if arguments do not fit
    together.
    """
    name = op.function
    check_number("eps", op.eps)
    check_flag("zero_centered_gamma", op.zero_centered_gamma)
    check_nominal(f"the source of {name}", x.dtype)
    check_nominal(f"the result of {name}", dtype)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise InputError(
            f"{name} needs a last dimension of at least one element, got shape {tuple(x.shape)}."
        )
    cols = x.shape[-1]
    if name == "swiglu":
        if cols % 2:
            raise InputError(
                f"swiglu needs a last dimension of two halves, 2 K, got shape {tuple(x.shape)}."
            )
        cols //= 2
    for what, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        check_tensor(f"the {what} of {name}", parameter)
        if not op.is_norm:
            raise InputError(f"{name} takes no {what}, got one; leave it out.")
        if (
            tuple(parameter.shape) != (cols,)
            or parameter.dtype not in NOMINAL_DTYPES
            or parameter.device != x.device
        ):
            raise InputError(
                f"the {what} of {name} must be FP32, BF16 or FP16 of shape ({cols},) on "
                f"{x.device}, got {parameter.dtype} of shape {tuple(parameter.shape)} on "
                f"{parameter.device}."
            )
    return cols
