"""QuantizedTensor: codes and scales in memory, and to torch a tensor of BF16, FP16 or FP32.

To torch it has the *nominal* shape and dtype; its value is what its codes decode to. All that it
holds is a :class:`QuantizedStorage`, which its aliases share. It is a good citizen
(``nn.Parameter`` with a full-shape ``.grad``, ``deepcopy``, ``torch.save``, ``state_dict``,
``torch.compile``) under four rules:

* an operation that does not know it works on the dequantized value, and gradients reach the whole
  weight as if it were in high precision (straight-through);
* ``copy_`` into it quantizes; bytes are copied where both sides have one recipe;
* any other in-place operation is refused, through a view, too: the result would have to be
  quantized anew behind the caller's back;
* ``to`` moves it between devices and nominal dtypes and leaves the codes alone; to any other dtype
  it dequantizes.

NOT here: what each torch operation does (:mod:`zerocast.tensors.operations`), and how weights are
made (:mod:`zerocast.tensors.quantize`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch

from zerocast.errors import InputError, MissingDataError, UnsupportedError
from zerocast.recipes import Recipe
from zerocast.tensors.dequantize import dequantize
from zerocast.tensors.inference import decomposed, where_made
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.value_view import refuse_function

Operation = Callable[..., Any]
"""``operation(func, *args, **kwargs)``: what the ATen operation ``func`` does."""


class QuantizedTensor(torch.Tensor):
    """A quantized weight; made by :func:`zerocast.quantize` or :func:`zerocast.empty`.

    Attributes:
        storage: the bytes, shared by all aliases of the weight. (It hides torch's deprecated
            ``Tensor.storage()``, which has no meaning here.)
    """

    storage: QuantizedStorage  # type: ignore[assignment]

    operations: ClassVar[dict[Any, Operation]] = {}
    """ATen operations that know quantized weights: :mod:`zerocast.tensors.operations` fills it."""

    fallback: ClassVar[Callable[[Any, Any, Any], Any]]
    """``fallback(func, args, kwargs)``: what every other operation does."""

    # Torch's functions are not intercepted, only the operations below them: results would be
    # wrapped a second time, and torch.compile would give up.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, storage: QuantizedStorage) -> QuantizedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, storage.shape, dtype=storage.dtype, device=storage.device
        )
        tensor.storage = storage
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operation, kwargs = cls.operations.get(func), kwargs or {}
        if operation is None and (out := decomposed(func, args, kwargs)) is not NotImplemented:
            return out
        with where_made(args[0]) if func.is_view else nullcontext():
            if operation is None:
                return cls.fallback(func, args, kwargs)
            return operation(func, *args, **kwargs)

    # --- what it holds ---

    @property
    def recipe(self) -> Recipe:
        """The scheme that gives the bytes their meaning."""
        return self.storage.recipe

    @property
    def rowwise_data(self) -> torch.Tensor:
        """uint8: the codes, which an all-gather moves; the live buffer.

        Raises:
            MissingDataError: a quantizer made only the columnwise codes.
        """
        return self._rowwise("rowwise_data")

    @property
    def rowwise_scale_inv(self) -> torch.Tensor:
        """The scales that multiply the codes; in the recipe's dtype and shape, padding included.

        Raises:
            MissingDataError: as :attr:`rowwise_data`.
        """
        return self._rowwise("rowwise_scale_inv")

    @property
    def columnwise_data(self) -> torch.Tensor:
        """uint8: the codes that the transposed GEMM reads: of the transposed weight [K, M], or
        [M, K] where they are quantized independently of the rowwise ones (MXFP8, row-wise FP8).
        Where one plane of codes serves both, that is :attr:`rowwise_data`.

        Raises:
            MissingDataError: the weight was made with ``columnwise=False``.
            StaleCopyError: a cast has changed the codes since.
        """
        self._require_columnwise("columnwise_data")
        own = "columnwise_data" in self.storage.buffers
        return self.storage.derived("columnwise_data" if own else "rowwise_data")

    @property
    def columnwise_scale_inv(self) -> torch.Tensor:
        """The scales of :attr:`columnwise_data`, with the same errors.

        Where a recipe has one plane of scales for both, that is :attr:`rowwise_scale_inv`.
        """
        self._require_columnwise("columnwise_scale_inv")
        own = "columnwise_scale_inv" in self.storage.buffers
        return self.storage.derived("columnwise_scale_inv" if own else "rowwise_scale_inv")

    @property
    def amax(self) -> torch.Tensor:  # type: ignore[override]
        """FP32 [1]: the tensor's amax, in recipes that store it. (It hides ``Tensor.amax()``.)

        Raises:
            MissingDataError: in the others.
        """
        if "amax" not in self.storage.buffers:
            raise MissingDataError(
                f"amax is stored by recipes that decode with it, and {type(self.recipe).__name__} "
                f"does not; its scale is rowwise_scale_inv."
            )
        return self.storage.buffers["amax"]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The value as a plain tensor of ``dtype``, by default the nominal one.

        The rowwise codes' value, or the columnwise ones' where only those are there. No gradient
        flows through it; torch's own operations on the weight have one.
        """
        columnwise = not self.storage.has_rowwise
        return dequantize(self.storage, columnwise=columnwise).to(dtype or self.storage.dtype)

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Give the memory of the rowwise or of the columnwise copy back, by False; True makes sure
        that it is there, and None is no wish.

        Raises:
            InputError: where nothing would be left.
            MissingDataError: where a copy that is wished for is not there.
        """
        held = (self.storage.has_rowwise, self.storage.has_columnwise)
        keeps_rowwise, keeps_columnwise = (
            has if wish is None else wish
            for has, wish in zip(held, (rowwise_usage, columnwise_usage), strict=True)
        )
        if not (keeps_rowwise or keeps_columnwise):
            raise InputError(
                "a quantized tensor keeps its rowwise copy, its columnwise copy or both, got False "
                "for what it has; drop the tensor itself."
            )
        if keeps_rowwise:
            self._rowwise("rowwise_data")
        if keeps_columnwise:
            self._require_columnwise("columnwise_data")
        self.storage.drop(rowwise=not keeps_rowwise, columnwise=not keeps_columnwise)

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The value that the codes were made from, on the CPU in its own dtype; None if not kept.

        An optimizer starts its masters from it. It is gone once the codes have been cast again.
        """
        return self.storage.high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Give the memory of :meth:`get_high_precision_init_val` back."""
        self.storage.high_precision_init_val = None

    def _rowwise(self, name: str) -> torch.Tensor:
        if not self.storage.has_rowwise:
            raise MissingDataError(
                f"{name} is not there: this tensor was made, or kept, with its columnwise copy "
                f"only. Quantize it with rowwise=True."
            )
        return self.storage.buffers[name]

    def _require_columnwise(self, name: str) -> None:
        if not self.storage.has_columnwise:
            raise MissingDataError(
                f"{name} is not there: this weight was made with columnwise=False and never holds "
                f"a columnwise copy."
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = [f"shape={tuple(self.shape)}", f"dtype={self.dtype}", f"recipe={self.recipe}"]
        if self.device.type != "cpu":
            parts.append(f"device='{self.device}'")
        if self.requires_grad:
            parts.append("requires_grad=True")
        return f"{type(self).__name__}({', '.join(parts)})"

    # --- what torch answers from memory, which a wrapper does not have ---

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
        """As :meth:`torch.Tensor.numpy`, of the value and read-only: a write would be lost."""
        array = self.dequantize().requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False
        return array

    apply_ = map_ = map2_ = refuse_function  # type: ignore[assignment]

    def tolist(self) -> Any:
        """As :meth:`torch.Tensor.tolist`, of the value."""
        return self.dequantize().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        raise UnsupportedError(
            "a quantized weight has no memory of its nominal dtype to share; hand out "
            "weight.dequantize(), or weight.rowwise_data for the codes."
        )

    def share_memory_(self) -> QuantizedTensor:
        """Move the bytes into memory that child processes share."""
        for name, buffer in self.storage.buffers.items():
            self.storage.replace(name, buffer.share_memory_())
        return self

    def is_shared(self) -> bool:
        """Whether :meth:`share_memory_` has been called, or the device shares anyway."""
        return all(buffer.is_shared() for buffer in self.storage.buffers.values())

    # --- copying and saving ---

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaves of the autograd graph can be deep-copied, as in torch.")
        is_parameter = isinstance(self, torch.nn.Parameter)
        copied = restore(copy.deepcopy(self.storage, memo), self.requires_grad, is_parameter)
        memo[id(self)] = copied
        attributes = {k: v for k, v in vars(self).items() if k not in vars(copied)}
        vars(copied).update(copy.deepcopy(attributes, memo))
        copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return restore, (self.storage, self.requires_grad, isinstance(self, torch.nn.Parameter))

    # --- torch.compile ---

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Recipe, torch.dtype]]:
        """The buffers that may be read now, and what they mean."""
        unreadable = self.storage.derived_names if self.storage.is_stale else ()
        names = [name for name in self.storage.buffers if name not in unreadable]
        return names, (self.recipe, self.storage.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor],
        context: tuple[Recipe, torch.dtype],
        outer_size: Any,
        outer_stride: Any,
    ) -> QuantizedTensor:
        recipe, dtype = context
        return QuantizedTensor(QuantizedStorage(outer_size, dtype, recipe, dict(inner)))


def restore(storage: QuantizedStorage, requires_grad: bool, is_parameter: bool) -> QuantizedTensor:
    """A weight around ``storage``, as unpickling and deepcopy make it."""
    tensor = QuantizedTensor(storage)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)  # type: ignore[return-value]
    return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]
