"""QuantizedTensor: a tensor of codes and scales that torch treats as BF16, FP16 or FP32.

To torch it has the *nominal* shape and dtype; its value is what its codes decode to. Its data is a
:class:`QuantizedStorage`, which its aliases share. It can be used as any torch tensor
(``nn.Parameter`` with a full-shape ``.grad``, ``deepcopy``, ``torch.save``, ``state_dict``,
``torch.compile``) under four rules:

* an operation without an implementation for it works on the dequantized value; gradients reach the
  whole weight as if it were in high precision (straight-through);
* ``copy_`` into it quantizes; bytes are copied if both sides have the same recipe;
* any other in-place operation is refused, also through a view: the result would have to be
  quantized again without the caller noticing;
* ``to`` moves it between devices and keeps the codes; to another dtype it dequantizes. A
  module's ``to``, ``half`` and others change the nominal dtype of its parameters and also keep
  their codes.

NOT here: the attributes that read its buffers (:class:`zerocast.tensors.weight_data.WeightData`),
what each torch operation does (:mod:`zerocast.tensors.operations`), and how weights are
made (:mod:`zerocast.tensors.quantize`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch

from zerocast.errors import InputError, UnsupportedError
from zerocast.recipes import Recipe
from zerocast.tensors.dequantize import NAMES_IN_GRAPHS
from zerocast.tensors.dequantized_view import OTHER_NAMESPACES, refuse_function, refuse_memory
from zerocast.tensors.post_gather import rebuild_derived
from zerocast.tensors.saved_storage import checked_storage
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.weight_data import HELD, WeightData
from zerocast.tensors.wrappers import decomposed, inference_mode_of

Operation = Callable[..., Any]
"""``operation(func, *args, **kwargs)``: what the ATen operation ``func`` does."""


class QuantizedTensor(WeightData):
    """A quantized weight; made by :func:`zerocast.quantize` or :func:`zerocast.empty`.

    Attributes:
        quantized_storage: the bytes, shared by all aliases of the weight.
    """

    operations: ClassVar[dict[Any, Operation]] = {}
    """ATen operations with an implementation for quantized weights, which
    :mod:`zerocast.tensors.operations` adds.
    """

    fallback: ClassVar[Callable[[Any, Any, Any], Any]]
    """``fallback(func, args, kwargs)``: what every other operation does."""

    # Only the operations below torch's functions are intercepted. Otherwise results would be
    # wrapped a second time, and torch.compile would fail.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, storage: QuantizedStorage, *others: Any, **options: Any) -> QuantizedTensor:
        if not isinstance(storage, QuantizedStorage) or others or options:
            raise UnsupportedError(
                "a quantized weight is made by zerocast.quantize or zerocast.empty. Code that "
                "makes new parameters by their class (accelerate's init_empty_weights and its "
                "loading of checkpoints) needs a model without quantized weights: call "
                "zerocast.nn.convert afterwards."
            )
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, storage.shape, dtype=storage.dtype, device=storage.device
        )
        tensor.quantized_storage = storage
        # C++ code that torch does not dispatch would read or write at address 0.
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        # Compile for each shape: a graph of variable shapes would not match the layout of bytes.
        tensor._dynamo_static_indices = set(range(len(storage.shape)))  # type: ignore[attr-defined]
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operation, kwargs = cls.operations.get(func), kwargs or {}
        if (run := OTHER_NAMESPACES.get(func.namespace)) is not None:
            return run(func, args, kwargs)
        if operation is None and (out := decomposed(func, args, kwargs)) is not NotImplemented:
            return out
        with inference_mode_of(args[0]) if func.is_view else nullcontext():
            if operation is None:
                return cls.fallback(func, args, kwargs)
            return operation(func, *args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = [f"shape={tuple(self.shape)}", f"dtype={self.dtype}", f"recipe={self.recipe}"]
        if self.device.type != "cpu":
            parts.append(f"device='{self.device}'")
        if self.requires_grad:
            parts.append("requires_grad=True")
        return f"{type(self).__name__}({', '.join(parts)})"

    # --- what torch reads from memory, which a wrapper does not have ---

    @property
    def data(self) -> torch.Tensor:
        """An alias without a gradient; assigning to it is refused."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise UnsupportedError(
            "assigning to .data of a quantized weight would change its shape and dtype and not its "
            "codes; use weight.copy_(value), zerocast.replace_raw_data to move the codes, or, for "
            "a module in high precision, a new torch.nn.Parameter(weight.dequantize(dtype))."
        )

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value as :meth:`torch.Tensor.numpy` does, but read-only."""
        array = self.dequantize().requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False
        return array

    apply_ = map_ = map2_ = refuse_function  # type: ignore[assignment]

    def tolist(self) -> Any:
        """Return the value as :meth:`torch.Tensor.tolist` does."""
        return self.dequantize().tolist()

    data_ptr = storage = __dlpack__ = refuse_memory

    def take_place_of(self, parameter: QuantizedTensor) -> None:
        """Make ``parameter`` hold the bytes of this tensor, with its device and dtype.

        It stays the same object: its attributes, its hooks and references to it are kept, as when
        ``.data`` of a plain parameter is assigned. Aliases made of it earlier keep the earlier
        bytes.
        """
        if torch._has_compatible_shallow_copy_type(parameter, self):
            torch.Tensor.data.__set__(parameter, self.detach())  # type: ignore[attr-defined]
        else:  # to or from the meta device
            hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            fresh = self.detach().requires_grad_(parameter.requires_grad)
            torch._C._swap_tensor_impl(parameter, fresh)
            parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks
        parameter.quantized_storage = self.quantized_storage

    def share_memory_(self) -> QuantizedTensor:
        """Move the bytes into memory that child processes share."""
        for name, buffer in self.quantized_storage.buffers.items():
            self.quantized_storage.replace(name, buffer.share_memory_())
        return self

    def is_shared(self) -> bool:
        """Return whether :meth:`share_memory_` has been called, or the device shares anyway."""
        return all(buffer.is_shared() for buffer in self.quantized_storage.buffers.values())

    # --- copying and saving ---

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaves of the autograd graph can be deep-copied, as in torch.")
        is_parameter = isinstance(self, torch.nn.Parameter)
        copied = restore(
            copy.deepcopy(self.quantized_storage, memo), self.requires_grad, is_parameter
        )
        memo[id(self)] = copied
        attributes = {k: v for k, v in vars(self).items() if k not in vars(copied)}
        vars(copied).update(copy.deepcopy(attributes, memo))
        copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return restore, (
            self.quantized_storage,
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
        )

    # --- torch.compile ---

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Recipe, torch.dtype, tuple[str, ...]]]:
        """Return the names of the buffers, and what they mean.

        Raises:
            StaleCopyError: between a cast and its post-all-gather processing, as a layer's forward.
        """
        storage = self.quantized_storage
        storage.prepare_for_forward(lambda stale: rebuild_derived([stale]))
        names = [HELD + name for name in storage.buffers]
        return names, (self.recipe, storage.dtype, NAMES_IN_GRAPHS)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor],
        context: tuple[Recipe, torch.dtype, tuple[str, ...]],
        outer_size: Any,
        outer_stride: Any,
    ) -> QuantizedTensor:
        """Return a weight around buffers that torch.compile made.

        Raises:
            InputError: if they are not those of such a weight.
        """
        recipe, dtype, _ = context
        buffers = {name.removeprefix(HELD): buffer for name, buffer in inner.items()}
        return QuantizedTensor(checked_storage(outer_size, dtype, recipe, buffers))


def restore(storage: QuantizedStorage, requires_grad: bool, is_parameter: bool) -> QuantizedTensor:
    """Return a weight around ``storage``, for unpickling and deepcopy.

    Raises:
        InputError: if it is not a storage.
    """
    if not isinstance(storage, QuantizedStorage):
        raise InputError(
            f"a quantized weight that is loaded needs a QuantizedStorage, got "
            f"{type(storage).__name__}; the file is damaged or was not written by zerocast."
        )
    tensor = QuantizedTensor(storage)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)  # type: ignore[return-value]
    return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]
