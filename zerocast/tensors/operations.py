"""What torch's operations do with a :class:`QuantizedTensor`.
 Known here: aliases and copies, which keep the codes; ``copy_`` and ``zero_``, which quantize;
views; factories, which make plain tensors of the nominal shape and dtype. Everything else runs on
the dequantized value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zerocast.errors import InputError
from zerocast.recipes import NOMINAL_DTYPES
from zerocast.tensors.derived import rebuild_derived
from zerocast.tensors.quantize import quantize_into
from zerocast.tensors.quantized_tensor import Operation, QuantizedTensor
from zerocast.tensors.value_view import ValueView, refuse_writes

aten = torch.ops.aten


def _implements(*functions: Any) -> Callable[[Operation], Operation]:
    def register(operation: Operation) -> Operation:
        QuantizedTensor.operations.update(dict.fromkeys(functions, operation))
        return operation

    return register


def _on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on dequantized values; refuse it where it would write one of them.

    What torch calls a view of the weight cannot be one of its value, which is made for this call;
    it becomes a :class:`ValueView`, through which nothing can be written.
    """
    refuse_writes(func, args, kwargs, QuantizedTensor)
    args, kwargs = tree_map_only(QuantizedTensor, lambda t: t.dequantize(), (tuple(args), kwargs))
    out = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, ValueView, out) if func.is_view else out


QuantizedTensor.fallback = staticmethod(_on_values)


# --- aliases and views ---


@_implements(aten.detach.default, aten.alias.default)
def _alias(func: Any, tensor: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(tensor.storage)


@_implements(
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default,
    aten.slice.Tensor, aten.as_strided.default, aten.expand.default,
    aten.split.Tensor, aten.split_with_sizes.default,
)  # fmt: skip
def _view(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """An alias where the view is the whole weight again (``w[:]``, ``w.view_as(w)``).

    Everything else is values. Fewer rows, too: they share scales with the rows around them, so
    they could not be written as a weight of their own.
    """
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    views = func(whole, *args, **kwargs)
    for view in views if isinstance(views, (list, tuple)) else [views]:
        if (view.shape, view.stride(), view.storage_offset()) != (whole.shape, whole.stride(), 0):
            return _on_values(func, (tensor, *args), kwargs)
    return tree_map_only(torch.Tensor, lambda _: QuantizedTensor(tensor.storage), views)


# --- copies ---


@_implements(aten.clone.default)
def _clone(func: Any, tensor: QuantizedTensor, *, memory_format: Any = None) -> QuantizedTensor:
    return QuantizedTensor(tensor.storage.to())


@_implements(aten._to_copy.default)
def _to_copy(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> torch.Tensor:
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype not in NOMINAL_DTYPES:
        return _on_values(func, (tensor,), kwargs)
    return QuantizedTensor(tensor.storage.to(kwargs.get("device"), dtype))


# --- writes ---


@_implements(aten.copy_.default)
def _copy_(
    func: Any, into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    if not isinstance(into, QuantizedTensor):
        assert isinstance(source, QuantizedTensor)
        return into.copy_(source.dequantize(), non_blocking)
    keeps_init_val = into.storage.high_precision_init_val is not None
    if isinstance(source, QuantizedTensor):
        init_val = source.storage.high_precision_init_val
        if source.recipe == into.recipe and source.shape == into.shape:
            _copy_bytes(into, source)
        else:
            _quantize_into(into, source.dequantize())
    else:
        init_val = source
        _quantize_into(into, source)
    if keeps_init_val and init_val is not None:
        # Masters that are made later must start from what was loaded, not from what it replaced.
        value = init_val.detach().expand(into.shape).to("cpu", copy=True).contiguous()
        into.storage.high_precision_init_val = value
    return into


def _quantize_into(into: QuantizedTensor, source: torch.Tensor) -> None:
    try:
        source = source.expand(into.shape)
    except RuntimeError as error:
        raise InputError(
            f"copy_ into a quantized weight of shape {tuple(into.shape)} needs that shape or one "
            f"that expands to it, got {tuple(source.shape)}."
        ) from error
    quantize_into(into.storage, source)


def _copy_bytes(into: QuantizedTensor, source: QuantizedTensor) -> None:
    derived = into.storage.derived_names
    given = source.storage.buffers
    if not into.storage.buffers.keys() - set(derived) <= given.keys():
        _quantize_into(into, source.dequantize())  # the source lacks the columnwise copy
        return
    for name, buffer in into.storage.buffers.items():
        if name not in derived:
            buffer.copy_(given[name])
    into.storage.mark_written()
    rebuild_derived([into.storage])


@_implements(aten.zero_.default)
def _zero_(func: Any, tensor: QuantizedTensor) -> QuantizedTensor:
    zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    return _copy_(aten.copy_.default, tensor, zero)


# --- factories ---


@_implements(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default,
    aten.full_like.default, aten.rand_like.default, aten.randn_like.default,
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default,
    aten.new_full.default, aten.new_empty_strided.default,
)  # fmt: skip
def _factory(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A plain tensor: only shape, dtype and device are taken from the weight."""
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return func(like, *args, **kwargs)
