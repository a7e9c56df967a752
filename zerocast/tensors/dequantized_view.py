"""DequantizedView: the read-only result of a view of a quantized weight.

``weight.t()``, ``weight[3]``, ``weight.view(-1)`` are views to torch, and code may write through a
view. The value behind this one is decoded when the view is made, so a write would be lost without
notice; it raises an error instead. Reads work as for any tensor; their results are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zerocast.errors import UnsupportedError
from zerocast.tensors.wrappers import decomposed, inference_mode_of, wrapper_of, written_arguments

OTHER_NAMESPACES: dict[str, Callable[[Any, Any, Any], Any]] = {}
"""For each namespace whose schemas do not say what they write, ``run(func, args, kwargs)``. Filled
by :mod:`zerocast.tensors.collectives`."""


def refuse_writes(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    kind: type[torch.Tensor] | tuple[type[torch.Tensor], ...],
) -> None:
    """Raise :class:`UnsupportedError` if ``func`` would write an argument of class ``kind``."""
    if any(isinstance(written, kind) for written in written_arguments(func, args, kwargs)):
        raise UnsupportedError(
            f"{func} would write a quantized weight in place. That would quantize it again from "
            f"its own rounded value, and small updates would be lost. Update an FP32 master and "
            f"cast it (zerocast.optim.ZeroOptimizer, zerocast.CastPlan), or compute the new value "
            f"from weight.dequantize() and weight.copy_() it."
        )


def refuse_function(tensor: torch.Tensor, *arguments: Any) -> Any:
    """Refuse ``apply_``, ``map_`` and ``map2_``: they write by a pointer that a wrapper lacks."""
    raise UnsupportedError(
        "a quantized weight has no memory of its nominal dtype to apply a Python function to in "
        "place; compute the new value from weight.dequantize() and weight.copy_() it."
    )


def refuse_memory(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """Refuse ``data_ptr``, ``storage`` and ``__dlpack__``, which expose a tensor's memory."""
    raise UnsupportedError(
        "a quantized weight has no memory of its nominal dtype whose address could be shared or "
        "saved; save the FP32 masters, or weight.dequantize(), which other programs can load; hand "
        "out weight.dequantize() for the value, or weight.rowwise_data for the codes."
    )


class DequantizedView(torch.Tensor):
    """A read-only view of a weight's dequantized value.

    Attributes:
        value: the plain tensor.
    """

    value: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> DequantizedView:
        view = wrapper_of(cls, value)
        torch._C._set_throw_on_mutable_data_ptr(view)  # as for a quantized weight
        return view

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (run := OTHER_NAMESPACES.get(func.namespace)) is not None:
            return run(func, args, kwargs)
        refuse_writes(func, args, kwargs, cls)
        if (out := decomposed(func, args, kwargs)) is not NotImplemented:
            return out
        with inference_mode_of(args[0]) if func.is_view else nullcontext():
            args, kwargs = tree_map_only(cls, lambda view: view.value, (args, kwargs))
            out = func(*args, **kwargs)
            return tree_map_only(torch.Tensor, cls, out) if func.is_view else out

    apply_ = map_ = map2_ = refuse_function  # type: ignore[assignment]
    data_ptr = storage = __dlpack__ = refuse_memory

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        """Return a plain copy, because callers such as collectives may read memory directly."""
        return self.value.clone(memory_format=memory_format)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value as :meth:`torch.Tensor.numpy` does, but read-only."""
        array = self.value.detach().requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the value as :meth:`torch.Tensor.tolist` does."""
        return self.value.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.value.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value.__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["value"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, outer_size: Any, outer_stride: Any
    ) -> DequantizedView:
        return DequantizedView(inner["value"])
