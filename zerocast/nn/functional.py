"""Operations of layers whose result is quantized as it is made.

    relu, gelu, silu, swiglu      a function of each element, and the cast of what it gives
    layernorm, rmsnorm            the same of each row
    cast                          nothing but the cast: rowwise and columnwise codes of a tensor
    linear                        a product, and the cast of its result

Given a quantizer, each returns a :class:`zerocast.QuantizedTensor`: codes of the operation's result
rounded to its dtype, exact with respect to that, with the scales that belong to them. Without one
it returns the rounded result. No gradient flows through any of them: layers write their backward
themselves.

Note: one kernel
~~~~~~~~~~~~~~~~
On CUDA each of these (but ``linear``, whose product is the library's) is one kernel that reads the
source and writes the codes of both copies, and nothing in high precision unless ``output=True``
asks for it. Delayed scaling, MXFP8 and FP8 blocks take one pass: the scale is known, or a block
lies inside of what a thread block holds. Where a scale needs the amax of the whole tensor (current
scaling, NVFP4) or of whole rows and columns (row-wise FP8) no kernel can know it before it has seen
everything, so the same kernel runs twice: once for the amaxes, then it computes everything again
and casts. 4-over-6 and stochastic rounding cast the rounded result as weights are cast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from zerocast.arguments import check_flag, check_number, check_tensor, shown
from zerocast.backends import backend_for
from zerocast.errors import InputError
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.scaled_mm import Product
from zerocast.nn.scaled_mm import gemm as quantized_gemm
from zerocast.numerics import Activation, ActivationTarget, PlaneBuffers, can_activate
from zerocast.recipes import NOMINAL_DTYPES
from zerocast.tensors import QuantizedStorage, QuantizedTensor
from zerocast.tensors.quantize import quantize_into

Result = torch.Tensor | tuple[QuantizedTensor, torch.Tensor]
"""The rounded result; the quantized one, where there is a quantizer; or both."""


def relu(x: torch.Tensor, quantizer: Quantizer | None = None, *, output: bool = False) -> Result:
    """``max(x, 0)``; arguments as for :func:`gelu`."""
    return activate(Activation("relu"), x, quantizer, output=output).result


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
        approximate: ``"none"`` or ``"tanh"``, as torch's.
        output: whether the rounded result is wanted beside the quantized one.

    Returns:
        The quantized result, [..., K] under the nominal dtype of ``x``; with ``output``, that and
        the rounded one; the rounded one, where there is no quantizer.

    Raises:
        InputError: for another dtype, or a shape that the quantizer's recipe does not hold.
    """
    if approximate not in ("none", "tanh"):
        raise InputError(f"approximate must be 'none' or 'tanh', got {approximate!r}.")
    function: Literal["gelu", "gelu_tanh"] = "gelu" if approximate == "none" else "gelu_tanh"
    return activate(Activation(function), x, quantizer, output=output).result


def silu(x: torch.Tensor, quantizer: Quantizer | None = None, *, output: bool = False) -> Result:
    """``x / (1 + exp(-x))``; arguments as for :func:`gelu`."""
    return activate(Activation("silu"), x, quantizer, output=output).result


def swiglu(x: torch.Tensor, quantizer: Quantizer | None = None, *, output: bool = False) -> Result:
    """``silu(x[..., :K]) * x[..., K:]`` of ``x`` [..., 2 K]; otherwise as :func:`gelu`."""
    return activate(Activation("swiglu"), x, quantizer, output=output).result


def cast(x: torch.Tensor, quantizer: Quantizer, *, output: bool = False) -> Result:
    """``x`` itself, quantized: rowwise codes, and columnwise ones in the same pass."""
    return activate(Activation("identity"), x, quantizer, output=output).result


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

    The other arguments, the result and the errors are as for :func:`gelu`; :func:`activate` gives
    means and deviations, too, for a backward.
    """
    activation = Activation("layernorm", eps, zero_centered_gamma)
    return activate(activation, x, quantizer, weight=weight, bias=bias, output=output).result


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
    activation = Activation("rmsnorm", eps, zero_centered_gamma)
    return activate(activation, x, quantizer, weight=weight, output=output).result


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
    _check_quantizer(quantizer, output)
    if isinstance(x, QuantizedTensor) and isinstance(weight, QuantizedTensor):
        product = quantized_gemm(
            Product.OUTPUT, x.quantized_storage, weight.quantized_storage, x.dtype, bias
        )
        product = product.view(*x.shape[:-1], weight.shape[0])
    else:
        plain_weight = _plain(weight).to(x.dtype)
        product = torch.nn.functional.linear(_plain(x), plain_weight, bias).detach()
    if quantizer is None:
        return product
    quantized = quantizer.quantize(product)
    return (quantized, product) if output else quantized


# --- the general form ---


@dataclass(frozen=True, slots=True)
class Activated:
    """What :func:`activate` made.

    Attributes:
        quantized: the codes and their scales, where there was a quantizer.
        output: the rounded result, where it was asked for, or there was no quantizer.
        mean, rstd: FP32 [rows], where they were asked for: of each row the mean (layernorm only)
            and 1 / sqrt(variance or mean of squares + eps).
    """

    quantized: QuantizedTensor | None
    output: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor | None

    @property
    def result(self) -> Result:
        """What the simple functions return."""
        if self.quantized is None:
            assert self.output is not None
            return self.output
        return self.quantized if self.output is None else (self.quantized, self.output)


def activate(
    activation: Activation,
    x: torch.Tensor,
    quantizer: Quantizer | None = None,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    output: bool = False,
    statistics: bool = False,
    out: QuantizedTensor | None = None,
) -> Activated:
    """Any of the functions above.

    Args:
        activation: the function.
        x: [..., S], FP32, BF16 or FP16; S = 2 K of swiglu, else K.
        quantizer: makes the codes; None for the rounded result alone.
        weight, bias: [K], of the norms.
        dtype: of the result; that of ``x`` by default.
        output: whether the rounded result is wanted where there is a quantizer.
        statistics: whether ``mean`` and ``rstd`` are wanted, of a norm.
        out: a tensor that the quantizer made, to be overwritten.

    Raises:
        InputError: where an argument is not that. Nothing has been written.
    """
    check_tensor("x", x)
    _check_quantizer(quantizer, output)
    dtype = x.dtype if dtype is None else dtype
    cols = _check(activation, x, dtype, weight, bias)
    shape = (*x.shape[:-1], cols)
    if quantizer is not None and out is None:
        out = quantizer.make_empty(shape, dtype=dtype, device=x.device)
    elif quantizer is not None:
        assert out is not None
        quantizer.check_out(out, torch.empty((), dtype=dtype, device=x.device).expand(shape))
    recipe = None if quantizer is None else quantizer.recipe
    round_to = dtype if recipe is None else recipe.round_to(dtype)
    numerics = None
    if quantizer is not None and can_activate(quantizer.recipe.numerics):
        # The scales of a part wait for the amaxes of other ranks.
        numerics = quantizer.recipe.numerics if quantizer.tp_shard is None else None
    source = _plain(x).reshape(-1, x.shape[-1]).contiguous()
    rows = source.shape[0]
    wanted = output or numerics is None
    rounded = torch.empty((rows, cols), dtype=round_to, device=x.device) if wanted else None

    def of_each_row(is_wanted: bool) -> torch.Tensor | None:
        return torch.empty(rows, dtype=torch.float32, device=x.device) if is_wanted else None

    target = ActivationTarget(
        activation,
        source,
        round_to,
        None if weight is None else _plain(weight).contiguous(),
        None if bias is None else _plain(bias).contiguous(),
        rounded,
        mean=of_each_row(statistics and activation.function == "layernorm"),
        rstd=of_each_row(statistics and activation.is_norm),
    )
    if numerics is None:
        if rows > 0:
            backend_for(x.device).activate(None, target)()
        if quantizer is not None:
            assert out is not None
            assert rounded is not None
            with quantizer.cast_into(out.quantized_storage) as whole:
                quantizer.record(quantize_into(whole, rounded.view(shape), advances=False))
    else:
        assert out is not None
        assert quantizer is not None
        _cast(target, quantizer, out.quantized_storage)
    plain = None
    if rounded is not None and (output or quantizer is None):
        plain = rounded.view(shape).to(dtype)
    return Activated(out, plain, target.mean, target.rstd)


def _cast(target: ActivationTarget, quantizer: Quantizer, storage: QuantizedStorage) -> None:
    """Run the launch that writes the codes of ``storage``."""
    amax = None
    if quantizer.recipe.casts_before_reduction:
        amax = torch.zeros(1, dtype=torch.int32, device=storage.device)
    with quantizer.cast_into(storage) as whole:
        operands = replace(
            target,
            planes=_planes(storage),
            delayed=quantizer.recipe.delayed_state(whole.buffers),
            amax=storage.buffers.get("amax") if amax is None else None,
            tensor_amax=amax,
        )
        backend_for(storage.device).activate(quantizer.recipe.numerics, operands)()
        if amax is not None:
            quantizer.record(amax)
    storage.mark_written()


def _planes(storage: QuantizedStorage) -> tuple[PlaneBuffers, ...]:
    """The copies of its codes that ``storage`` holds."""
    buffers = storage.buffers
    planes = (
        PlaneBuffers(
            plane, codes=buffers.get(plane.codes_name), scale_inv=buffers.get(plane.scales_name)
        )
        for plane in storage.recipe.planes(storage.shape)
    )
    return tuple(p for p in planes if p.codes is not None or p.scale_inv is not None)


def _check_quantizer(quantizer: Quantizer | None, output: bool) -> None:
    check_flag("output", output)
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise InputError(f"quantizer must be a zerocast.Quantizer or None, got {shown(quantizer)}.")


def _check_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """``x`` [..., K], ``weight`` [M, K] and ``bias`` [M] can be multiplied and added."""
    for name, given in (("x", x), ("weight", weight)):
        if check_tensor(name, given).dtype not in NOMINAL_DTYPES:
            raise InputError(
                f"{name} must be of torch.float32, torch.bfloat16 or torch.float16, got "
                f"{given.dtype}; convert it first."
            )
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


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.dequantize() if isinstance(x, QuantizedTensor) else x.detach()


def _check(
    activation: Activation,
    x: torch.Tensor,
    dtype: torch.dtype,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> int:
    """K, where the arguments fit together."""
    name = activation.function
    check_number("eps", activation.eps)
    check_flag("zero_centered_gamma", activation.zero_centered_gamma)
    for what, given in (("a source", x.dtype), ("a result", dtype)):
        if given not in NOMINAL_DTYPES:
            raise InputError(
                f"{name} needs {what} of torch.float32, torch.bfloat16 or torch.float16, got "
                f"{given}; convert it first."
            )
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
        if not activation.is_norm:
            raise InputError(f"{name} has no {what}, got one; leave it out.")
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
