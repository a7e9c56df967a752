"""The general form of the operations of :mod:`zerocast.nn.functional`: a function or a norm whose
result is rounded and quantized in one operation of the backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from zerocast.arguments import check_flag, check_number, check_tensor, shown
from zerocast.backends import backend_for
from zerocast.errors import InputError
from zerocast.nn.quantizer import Quantizer
from zerocast.numerics import FusedOp, FusedOperand, PlaneBuffers, can_fuse
from zerocast.recipes import NOMINAL_DTYPES
from zerocast.tensors import QuantizedStorage, QuantizedTensor
from zerocast.tensors.quantize import quantize_into

Result = torch.Tensor | tuple[QuantizedTensor, torch.Tensor]
"""The quantized result where there is a quantizer, with ``output`` beside the rounded one; the
rounded result alone where there is no quantizer.
"""


@dataclass(frozen=True, slots=True)
class FusedResult:
    """What :func:`apply_fused` returns.

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
        """What the functions of :mod:`zerocast.nn.functional` return."""
        if self.quantized is None:
            assert self.output is not None
            return self.output
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
        dtype: of the result; that of ``x`` by default.
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
    # The scales of a tensor-parallel shard wait for the amaxes of other ranks.
    in_one_pass = (
        quantizer is not None and quantizer.tp_shard is None and can_fuse(quantizer.recipe.numerics)
    )
    source = plain(x).reshape(-1, x.shape[-1]).contiguous()
    round_to = dtype if quantizer is None else quantizer.recipe.round_to(dtype)

    def empty(is_wanted: bool, dtype: torch.dtype, *cols: int) -> torch.Tensor | None:
        return source.new_empty(len(source), *cols, dtype=dtype) if is_wanted else None

    operand = FusedOperand(
        op,
        source,
        round_to,
        None if weight is None else plain(weight).contiguous(),
        None if bias is None else plain(bias).contiguous(),
        empty(output or not in_one_pass, round_to, shape[-1]),
        mean=empty(statistics and op.function == "layernorm", torch.float32),
        rstd=empty(statistics and op.is_norm, torch.float32),
    )
    rounded = None if operand.output is None else operand.output.view(shape)
    if in_one_pass:
        assert quantizer is not None
        assert out is not None
        _cast(operand, quantizer, out.quantized_storage)
    else:
        if operand.rows > 0:
            backend_for(x.device).fused_op(None, operand)()
        if quantizer is not None:
            assert out is not None
            assert rounded is not None
            with quantizer.cast_into(out.quantized_storage) as whole:
                quantizer.record(quantize_into(whole, rounded, advances=False))
    if rounded is not None:
        rounded = rounded.to(dtype) if output or quantizer is None else None
    return FusedResult(out, rounded, operand.mean, operand.rstd)


def _cast(operand: FusedOperand, quantizer: Quantizer, storage: QuantizedStorage) -> None:
    """Run the operation that writes the codes and the scales of ``storage``."""
    amax = None
    if quantizer.recipe.casts_before_reduction:
        amax = torch.zeros(1, dtype=torch.int32, device=storage.device)
    with quantizer.cast_into(storage) as whole:
        operand = replace(
            operand,
            planes=_planes(storage),
            delayed=quantizer.recipe.delayed_state(whole.buffers),
            amax=storage.buffers.get("amax") if amax is None else None,
            tensor_amax=amax,
        )
        backend_for(storage.device).fused_op(quantizer.recipe.numerics, operand)()
        if amax is not None:
            quantizer.record(amax)
    storage.mark_written()


def _planes(storage: QuantizedStorage) -> tuple[PlaneBuffers, ...]:
    """The planes whose buffers ``storage`` holds."""
    buffers = storage.buffers
    planes = (
        PlaneBuffers(
            plane, codes=buffers.get(plane.codes_name), scale_inv=buffers.get(plane.scales_name)
        )
        for plane in storage.recipe.planes(storage.shape)
    )
    return tuple(p for p in planes if p.codes is not None or p.scale_inv is not None)


def check_quantizer(quantizer: Quantizer | None, output: bool) -> None:
    """Raise InputError where ``quantizer`` is no quantizer or ``output`` no bool."""
    check_flag("output", output)
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise InputError(f"quantizer must be a zerocast.Quantizer or None, got {shown(quantizer)}.")


def plain(x: torch.Tensor) -> torch.Tensor:
    """``x`` in high precision, without its gradient."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else x.detach()


def _columns(
    op: FusedOp,
    x: torch.Tensor,
    dtype: torch.dtype,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> int:
    """K, the columns of the result. Raises InputError where the arguments do not fit together."""
    name = op.function
    check_number("eps", op.eps)
    check_flag("zero_centered_gamma", op.zero_centered_gamma)
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
        if not op.is_norm:
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
