"""Operations of layers whose result is quantized.

    relu, gelu, silu, swiglu      a function of each element
    layernorm, rmsnorm            a norm of each row
    cast                          the identity: rowwise and columnwise codes of a tensor
    linear                        a product

Each rounds its result to the dtype of the input. Given a quantizer it returns a
:class:`zerocast.QuantizedTensor` with the codes of the rounded result and their scales; without one
it returns the rounded result. No gradient flows through these functions: the layers write their
backward themselves (:mod:`zerocast.nn.quantized_ops`). :func:`apply_fused` is the general form of
all but ``linear``.

Note: the result is written once
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each function but ``linear``, whose product is the library's, is one kernel, or one native loop,
that reads the source and writes the result in its rounded dtype; the operations that cast any other
tensor read it there. With ``output=True`` it is returned, too; else its memory is freed when the
call returns. The memory traffic is in docs/numerics.md, "Activations and norms".
"""

from typing import Literal

import torch

from zerocast.arguments import check_choice, check_tensor, shown
from zerocast.errors import InputError
from zerocast.nn.engines import Product
from zerocast.nn.quantized_ops import Result, apply_fused, check_quantizer, plain
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.scaled_mm import gemm as quantized_gemm
from zerocast.numerics import FusedOp
from zerocast.recipes import check_nominal
from zerocast.tensors import QuantizedTensor


def relu(x: torch.Tensor, quantizer: Quantizer | None = None, *, output: bool = False) -> Result:
    """``max(x, 0)``; arguments as for :func:`gelu`."""
    return apply_fused(FusedOp("relu"), x, quantizer, output=output).result


def gelu(
    x: torch.Tensor,
    quantizer: Quantizer | None = None,
    *,
    approximate: Literal["none", "tanh"] = "none",
    output: bool = False,
) -> Result:
    """``x * Phi(x)``, or the approximation of it by a hyperbolic tangent (TransformerEngine's).

    Args:
        x: [..., K], FP32, BF16 or FP16.
        quantizer: makes the codes; None for the rounded result alone.
        approximate: ``"none"`` or ``"tanh"``, as for ``torch.nn.functional.gelu``.
        output: whether the rounded result is wanted beside the quantized one.

    Returns:
        The quantized result, [..., K] under the nominal dtype of ``x``; with ``output``, that and
        the rounded one; the rounded one, where there is no quantizer.

    Raises:
        InputError: for another dtype, or a shape that the quantizer's recipe does not hold.
    """
    check_choice("approximate", approximate, ("none", "tanh"))
    function: Literal["gelu", "gelu_tanh"] = "gelu" if approximate == "none" else "gelu_tanh"
    return apply_fused(FusedOp(function), x, quantizer, output=output).result


def silu(x: torch.Tensor, quantizer: Quantizer | None = None, *, output: bool = False) -> Result:
    """``x / (1 + exp(-x))``; arguments as for :func:`gelu`."""
    return apply_fused(FusedOp("silu"), x, quantizer, output=output).result


def swiglu(x: torch.Tensor, quantizer: Quantizer | None = None, *, output: bool = False) -> Result:
    """``silu(x[..., :K]) * x[..., K:]`` of ``x`` [..., 2 K]; otherwise as :func:`gelu`."""
    return apply_fused(FusedOp("swiglu"), x, quantizer, output=output).result


def cast(x: torch.Tensor, quantizer: Quantizer, *, output: bool = False) -> Result:
    """Return ``x``, quantized as by ``quantizer.quantize``; ``output`` is a copy of it."""
    return apply_fused(FusedOp("identity"), x, quantizer, output=output).result


def layernorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    quantizer: Quantizer | None = None,
    *,
    zero_centered_gamma: bool = False,
    output: bool = False,
) -> Result:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension.

    Args:
        weight, bias: [K]; None leaves them out.
        zero_centered_gamma: multiply by ``1 + weight``.

    The other arguments, the result and the errors are those of :func:`gelu`. :func:`apply_fused`
    also returns the mean and the deviation of each row, which a backward needs.
    """
    op = FusedOp("layernorm", eps, zero_centered_gamma)
    return apply_fused(op, x, quantizer, weight=weight, bias=bias, output=output).result


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-5,
    quantizer: Quantizer | None = None,
    *,
    zero_centered_gamma: bool = False,
    output: bool = False,
) -> Result:
    """``x / sqrt(mean of squares + eps) * weight``; arguments as for :func:`layernorm`."""
    op = FusedOp("rmsnorm", eps, zero_centered_gamma)
    return apply_fused(op, x, quantizer, weight=weight, output=output).result


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    quantizer: Quantizer | None = None,
    *,
    output: bool = False,
) -> Result:
    """``x @ weight.T + bias``, rounded to the dtype of ``x``, then quantized.

    Args:
        x: [..., K], in high precision or quantized.
        weight: [M, K], the same.
        bias: [M] in the dtype of ``x``, or None.

    The other arguments, the result and the errors are as for :func:`gelu`.
    """
    _check_product(x, weight, bias)
    check_quantizer(quantizer, output)
    if isinstance(x, QuantizedTensor) and isinstance(weight, QuantizedTensor):
        product = quantized_gemm(
            Product.OUTPUT, x.quantized_storage, weight.quantized_storage, x.dtype, bias
        )
        product = product.view(*x.shape[:-1], weight.shape[0])
    else:
        plain_weight = plain(weight).to(x.dtype)
        product = torch.nn.functional.linear(plain(x), plain_weight, bias).detach()
    if quantizer is None:
        return product
    quantized = quantizer.quantize(product)
    return (quantized, product) if output else quantized


def _check_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise :class:`InputError` unless x [..., K], weight [M, K] and bias [M] fit together."""
    for name, given in (("x", x), ("weight", weight)):
        check_nominal(name, check_tensor(name, given).dtype)
    cols = x.shape[-1:]
    if weight.dim() != 2 or weight.shape[1:] != cols or weight.device != x.device:
        raise InputError(
            f"linear needs x [..., K] and weight [M, K] on one device, got {shown(x)} on "
            f"{x.device} and {shown(weight)} on {weight.device}."
        )
    if bias is None:
        return
    has = (check_tensor("bias", bias).shape, bias.dtype, bias.device)
    if has != (weight.shape[:1], x.dtype, x.device):
        raise InputError(
            f"bias must be {x.dtype} [{weight.shape[0]}] on {x.device}, got {shown(bias)} on "
            f"{bias.device}."
        )
