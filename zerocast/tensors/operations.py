"""What torch's operations do with a :class:`QuantizedTensor`.

Known here: aliases and copies, which keep the codes; ``copy_`` and ``zero_``, which quantize; factories, which make
plain tensors of the nominal shape and dtype. Everything else runs on the dequantized value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from zerocast.errors import InputError, UnsupportedError
from zerocast.recipes import NOMINAL_DTYPES
from zerocast.tensors.quantize import quantize_into, rebuild_derived
from zerocast.tensors.quantized_tensor import Operation, QuantizedTensor
from zerocast.tensors.storage import DERIVED

aten = torch.ops.aten


def _implements(*functions: Any) -> Callable[[Operation], Operation]:
    def register(operation: Operation) -> Operation:
        QuantizedTensor.operations.update(dict.fromkeys(functions, operation))
        return operation

    return register


def _on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on dequantized values; refuse it where it would write one of them."""
    for argument, given in zip(func._schema.arguments, args, strict=False):
        _refuse_write(func, argument, given)
    for argument in func._schema.arguments:
        _refuse_write(func, argument, kwargs.get(argument.name))
    args, kwargs = tree_map_only(QuantizedTensor, lambda t: t.dequantize(), (tuple(args), kwargs))
    return func(*args, **kwargs)


def _refuse_write(func: Any, argument: Any, given: Any) -> None:
    writes = argument.alias_info is not None and argument.alias_info.is_write
    if writes and any(isinstance(leaf, QuantizedTensor) for leaf in tree_leaves(given)):
        raise UnsupportedError(
            f"{func} would write a quantized weight in place. That would quantize it anew from its own rounded value, "
            f"and small updates would be lost. Update an FP32 master and cast it (zerocast.optim.ZeroOptimizer, "
            f"zerocast.CastPlan), or compute a new value from weight.dequantize() and weight.copy_() it."
        )


QuantizedTensor.fallback = staticmethod(_on_values)


# --- aliases and copies ------------------------------------------------------------------------------------------


@_implements(aten.detach.default, aten.alias.default)
def _alias(func: Any, tensor: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(tensor.storage)


@_implements(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, tensor: QuantizedTensor, size: Sequence[int]) -> torch.Tensor:
    value = torch.empty(tensor.shape, device="meta").view(size)
    return (
        _alias(func, tensor)
        if value.shape == tensor.shape
        else _on_values(func, (tensor, size), {})
    )


@_implements(aten.clone.default)
def _clone(func: Any, tensor: QuantizedTensor, *, memory_format: Any = None) -> QuantizedTensor:
    return QuantizedTensor(tensor.storage.to())


@_implements(aten._to_copy.default)
def _to_copy(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> torch.Tensor:
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype not in NOMINAL_DTYPES:
        return _on_values(func, (tensor,), kwargs)
    return QuantizedTensor(tensor.storage.to(kwargs.get("device"), dtype))


# --- writes ------------------------------------------------------------------------------------------------------


@_implements(aten.copy_.default)
def _copy_(
    func: Any, into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    if not isinstance(into, QuantizedTensor):
        assert isinstance(source, QuantizedTensor)
        return into.copy_(source.dequantize(), non_blocking)
    if isinstance(source, QuantizedTensor):
        if source.recipe == into.recipe and source.shape == into.shape:
            _copy_bytes(into, source)
            return into
        source = source.dequantize()
    try:
        source = source.expand(into.shape)
    except RuntimeError as error:
        raise InputError(
            f"copy_ into a quantized weight of shape {tuple(into.shape)} needs that shape or one that expands to it, "
            f"got {tuple(source.shape)}."
        ) from error
    quantize_into(into.storage, source)
    return into


def _copy_bytes(into: QuantizedTensor, source: QuantizedTensor) -> None:
    for name, buffer in source.storage.buffers.items():
        if name not in DERIVED:
            into.storage.buffers[name].copy_(buffer)
    into.storage.mark_written()
    rebuild_derived([into.storage])


@_implements(aten.zero_.default)
def _zero_(func: Any, tensor: QuantizedTensor) -> QuantizedTensor:
    quantize_into(tensor.storage, torch.zeros((), device=tensor.device).expand(tensor.shape))
    return tensor


# --- factories ---------------------------------------------------------------------------------------------------


@_implements(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.new_empty_strided.default,
)  # fmt: skip
def _factory(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A plain tensor: only shape, dtype and device are taken from the weight."""
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return func(like, *args, **kwargs)
