"""Defines what torch's operations do with a :class:`QuantizedTensor`.

Aliases and copies keep the codes, and ``copy_`` and ``zero_`` quantize. Views, and factories, which
make plain tensors of the nominal shape and dtype, are defined here, too. Everything else runs on
the dequantized value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zerocast.arguments import check_memory
from zerocast.errors import InputError, UnsupportedError
from zerocast.recipes import NOMINAL_DTYPES
from zerocast.tensors.dequantize import dequantize
from zerocast.tensors.dequantized_view import DequantizedView, refuse_writes
from zerocast.tensors.post_gather import rebuild_derived
from zerocast.tensors.quantize import quantize_into
from zerocast.tensors.quantized_tensor import Operation, QuantizedTensor

aten = torch.ops.aten


def _implements(*functions: Any) -> Callable[[Operation], Operation]:
    def register(operation: Operation) -> Operation:
        QuantizedTensor.operations.update(dict.fromkeys(functions, operation))
        return operation

    return register


def _on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on dequantized values; refuse it if it would write one of them.

    A view of the weight cannot be a view of its value, which is made for this call. It becomes a
    :class:`DequantizedView`, which is read-only.
    """
    refuse_writes(func, args, kwargs, QuantizedTensor)
    args, kwargs = tree_map_only(QuantizedTensor, lambda t: t.dequantize(), (tuple(args), kwargs))
    out = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, DequantizedView, out) if func.is_view else out


QuantizedTensor.fallback = staticmethod(_on_values)


# --- aliases and views ---


@_implements(aten.detach.default, aten.alias.default)
def _alias(func: Any, tensor: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(tensor.quantized_storage)


@_implements(
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default,
    aten.slice.Tensor, aten.as_strided.default, aten.expand.default,
    aten.split.Tensor, aten.split_with_sizes.default,
)  # fmt: skip
def _view(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """Return an alias if the view is the whole weight (``w[:]``, ``w.view_as(w)``).

    Any other view is one of the value. This includes views of some rows: they share scales with
    adjacent rows, so they could not be written as a separate weight.
    """
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    views = func(whole, *args, **kwargs)
    for view in views if isinstance(views, (list, tuple)) else [views]:
        if (view.shape, view.stride(), view.storage_offset()) != (whole.shape, whole.stride(), 0):
            return _on_values(func, (tensor, *args), kwargs)
    return tree_map_only(torch.Tensor, lambda _: QuantizedTensor(tensor.quantized_storage), views)


@_implements(aten.select.int)
def _select(func: Any, tensor: QuantizedTensor, dim: int, index: int) -> Any:
    """Return one matrix of a stack (experts), decoding only that matrix."""
    storage = tensor.quantized_storage
    if len(storage.stack) == 1 and dim in (0, -tensor.dim()):
        return DequantizedView(QuantizedTensor(storage.matrix(index)).dequantize())
    return _on_values(func, (tensor, dim, index), {})


# --- copies ---


@_implements(aten.clone.default)
def _clone(func: Any, tensor: QuantizedTensor, *, memory_format: Any = None) -> QuantizedTensor:
    return QuantizedTensor(tensor.quantized_storage.to())


@_implements(aten._to_copy.default)
def _to_copy(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> torch.Tensor:
    """Keep the codes on another device; for another dtype return the value.

    If a module is converted (``module.half()``), its parameters stay quantized weights under
    another nominal dtype.
    """
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype not in NOMINAL_DTYPES or (dtype != tensor.dtype and not _converts_module()):
        return _on_values(func, (tensor,), kwargs)
    return QuantizedTensor(tensor.quantized_storage.to(kwargs.get("device"), dtype))


def _converts_module() -> bool:
    """Return whether ``Module._apply``, which changes a module's device or dtype, is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.nn.Module._apply.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# --- writes ---


@_implements(aten.copy_.default)
def _copy_(
    func: Any, into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    if not isinstance(into, QuantizedTensor):
        assert isinstance(source, QuantizedTensor)
        return into.copy_(source.dequantize(), non_blocking)
    check_memory("the source of copy_", source)
    if into.device.type == "meta" or _holds(into, source):
        return into
    storage = into.quantized_storage
    if storage.gathered_from is not None:
        raise UnsupportedError(
            "a weight that was gathered cannot be written, because the next gather overwrites it: "
            f"call reshard() on the module that shards {storage.gathered_from}, and then write its "
            "parameter, which is the master."
        )
    keeps_init_val = storage.keeps_source or storage.high_precision_init_val is not None
    if isinstance(source, QuantizedTensor):
        init_val = source.quantized_storage.high_precision_init_val
        if source.recipe == into.recipe and source.shape == into.shape:
            _copy_bytes(into, source)
        else:
            _quantize_into(into, source.dequantize())
    else:
        init_val = source
        _quantize_into(into, source)
    if keeps_init_val and init_val is not None:
        # Masters that start later must start from what was loaded, not from the replaced value.
        value = init_val.detach().expand(into.shape).to("cpu", copy=True).contiguous()
        storage.high_precision_init_val = value
    return into


def _holds(into: QuantizedTensor, source: torch.Tensor) -> bool:
    """Return whether ``source`` is bit for bit what ``into`` holds; then a copy writes nothing.

    So wrappers that copy a model's values over themselves (torch's DistributedDataParallel) do not
    change codes, state, version and initial value.

    Collective if a cast of ``into`` is: all ranks of its group write, or none.
    """
    storage = into.quantized_storage
    if isinstance(source, QuantizedTensor):
        given = source.quantized_storage
        return (
            (source.recipe, source.shape) == (into.recipe, into.shape)
            and given.high_precision_init_val is None
            and storage.writes.are_readable
            and all(
                name in given.buffers and _same_bits(buffer, given.buffers[name])
                for name, buffer in storage.originals.items()
            )
        )
    same = False
    readable = storage.has_rowwise and storage.writes.are_readable
    if source.shape == into.shape and source.dtype in NOMINAL_DTYPES and readable:
        value, plain = dequantize(storage), source.detach().to(storage.device)
        same = any(
            _same_bits(value.to(dtype).to(plain.dtype), plain)
            for dtype in (storage.dtype, torch.float32)
        )
    if storage.shared_amaxes():
        assert storage.tp_shard is not None
        differs = torch.tensor([not same], dtype=torch.int32, device=storage.device)
        storage.tp_shard.require_comm().all_reduce_max_(differs)
        same = not bool(differs)
    return same


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and torch.equal(
        *(t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    )


def _quantize_into(into: QuantizedTensor, source: torch.Tensor) -> None:
    try:
        source = source.expand(into.shape)
    except RuntimeError as error:
        raise InputError(
            f"copy_ into a quantized weight of shape {tuple(into.shape)} needs that shape or one "
            f"that expands to it, got {tuple(source.shape)}."
        ) from error
    quantize_into(into.quantized_storage, source)


def _copy_bytes(into: QuantizedTensor, source: QuantizedTensor) -> None:
    storage, given = into.quantized_storage, source.quantized_storage.buffers
    if not storage.originals.keys() <= given.keys():
        _quantize_into(into, source.dequantize())  # the source lacks the columnwise copy
        return
    for name, buffer in storage.originals.items():
        buffer.copy_(given[name])
    storage.mark_written()
    rebuild_derived([storage])


@_implements(aten._foreach_copy_.default)
def _foreach_copy_(
    func: Any,
    into: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    non_blocking: bool = False,
) -> None:
    for each, source in zip(into, sources, strict=True):
        each.copy_(source, non_blocking)


@_implements(aten.zero_.default)
def _zero_(func: Any, tensor: QuantizedTensor) -> QuantizedTensor:
    zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    return _copy_(aten.copy_.default, tensor, zero)


# --- factories ---


@_implements(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default,
    aten.full_like.default, aten.rand_like.default, aten.randn_like.default,
    aten.new_empty.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty_strided.default,
)  # fmt: skip
def _factory(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a plain tensor with the weight's shape, dtype and device.

    But a tensor that replaces a weight (on the meta device, or in ``Module.to_empty``) is an
    unfilled weight.
    """
    device = torch.device(kwargs.get("device") or tensor.device)
    from_meta = tensor.device.type == "meta" and device.type != "meta"
    if func is aten.empty_like.default and (from_meta or _converts_module()):
        return QuantizedTensor(tensor.quantized_storage.materialized(device))
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return func(like, *args, **kwargs)


@_implements(aten.new_zeros.default)
def _new_zeros(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a plain tensor; refuse if FSDP2's ``fully_shard`` asks for a shard of the weight.

    ``fully_shard`` calls no other operation by which it could be detected.
    """
    frame = sys._getframe(2)  # torch's caller, or modes of torch in between
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        if frame.f_globals["__name__"].startswith("torch.distributed.fsdp."):
            raise UnsupportedError(
                "fully_shard would decode a weight that holds codes, gather it in high precision "
                "and train it from rounded values; before fully_shard, make the layers outside of "
                "zerocast.model_init and call zerocast.nn.convert(model, recipe, "
                "weights='master'). Weights that hold codes are trained by "
                "zerocast.optim.ZeroOptimizer."
            )
        frame = frame.f_back  # type: ignore[assignment]
    return _factory(func, tensor, *args, **kwargs)
