"""QuantizedTensor: a weight that is codes and scales in memory and a BF16, FP16 or FP32 tensor to torch.

To torch it has the *nominal* shape and dtype; its value is what its codes decode to. All that it holds is a
:class:`QuantizedStorage`, which its aliases share. It is a good citizen of torch (``nn.Parameter`` with a full-shape
``.grad``, ``deepcopy``, ``torch.save``, ``state_dict``, ``to``, ``torch.compile``) under four rules:

* an operation that does not know it works on the dequantized value, and gradients flow through to the whole weight as
  if it were high precision (straight-through);
* ``copy_`` into it quantizes; bytes are copied where both sides have one recipe;
* any other in-place operation is refused, because the result would have to be quantized anew behind the caller's back;
* ``to`` moves it between devices and nominal dtypes and leaves the codes alone; to any other dtype it dequantizes.

NOT here: what each torch operation does (:mod:`zerocast.tensors.operations`), and how weights are made
(:mod:`zerocast.tensors.quantize`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from zerocast.errors import MissingDataError
from zerocast.recipes import Recipe
from zerocast.tensors.dequantize import dequantize
from zerocast.tensors.storage import DERIVED, QuantizedStorage

Operation = Callable[..., Any]


class QuantizedTensor(torch.Tensor):
    """A quantized weight; made by :func:`zerocast.quantize` or :func:`zerocast.empty`.

    Attributes:
        storage: the bytes, shared by all aliases of the weight.
    """

    storage: QuantizedStorage  # type: ignore[assignment]  # torch's own `storage()` is deprecated and has no meaning here

    # What torch calls instead of Python's attribute machinery, so that results are not wrapped a second time.
    __torch_function__ = torch._C._disabled_torch_function_impl

    operations: ClassVar[dict[Any, Operation]] = {}
    """ATen operations that know quantized weights; filled by :mod:`zerocast.tensors.operations`."""

    fallback: ClassVar[Operation]
    """What every other operation does."""

    @staticmethod
    def __new__(cls, storage: QuantizedStorage) -> QuantizedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, storage.shape, dtype=storage.dtype, device=storage.device, requires_grad=False
        )
        tensor.storage = storage
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        operation = cls.operations.get(func)
        if operation is None:
            return cls.fallback(func, args, kwargs or {})
        return operation(func, *args, **(kwargs or {}))

    # --- what it holds ---

    @property
    def recipe(self) -> Recipe:
        """The scheme that gives the bytes their meaning."""
        return self.storage.recipe

    @property
    def rowwise_data(self) -> torch.Tensor:
        """uint8: the codes, which an all-gather moves; the live buffer."""
        return self.storage.buffers["rowwise_data"]

    @property
    def rowwise_scale_inv(self) -> torch.Tensor:
        """The scales that multiply the codes; in the recipe's dtype and shape, padding included."""
        return self.storage.buffers["rowwise_scale_inv"]

    @property
    def columnwise_data(self) -> torch.Tensor:
        """uint8: the codes of the transposed weight.

        Raises:
            MissingDataError: the weight was made with ``columnwise=False``.
            StaleCopyError: a cast has changed the codes since.
        """
        self._require_columnwise("columnwise_data")
        return self.storage.derived("columnwise_data")

    @property
    def columnwise_scale_inv(self) -> torch.Tensor:
        """The scales of :attr:`columnwise_data`, with the same errors; the rowwise ones where a scheme has one plane."""
        self._require_columnwise("columnwise_scale_inv")
        own = "columnwise_scale_inv" in self.storage.buffers
        return self.storage.derived("columnwise_scale_inv" if own else "rowwise_scale_inv")

    @property
    def amax(self) -> torch.Tensor:  # type: ignore[override]  # hides torch.Tensor.amax(), as the recipe's word wins
        """FP32 [1]: the tensor's amax, in schemes that store it.

        Raises:
            MissingDataError: in the others.
        """
        if "amax" not in self.storage.buffers:
            raise MissingDataError(
                f"amax is stored by recipes that decode with it, and {type(self.recipe).__name__} does not; its scale "
                f"is rowwise_scale_inv."
            )
        return self.storage.buffers["amax"]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The value as a plain tensor of ``dtype``, the nominal one by default; no gradient flows through."""
        return dequantize(self.storage).to(dtype or self.storage.dtype)

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The value that the codes were first made from, on the CPU in its own dtype; None where it was not kept.

        An optimizer starts its masters from it. It is gone once the codes have been written again.
        """
        return self.storage.high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Give the memory of :meth:`get_high_precision_init_val` back."""
        self.storage.high_precision_init_val = None

    def _require_columnwise(self, name: str) -> None:
        if not self.storage.has_columnwise:
            raise MissingDataError(
                f"{name} is not there: this weight was made with columnwise=False and never holds a columnwise copy."
            )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        parts = [f"shape={tuple(self.shape)}", f"dtype={self.dtype}", f"recipe={self.recipe}"]
        if self.device.type != "cpu":
            parts.append(f"device='{self.device}'")
        if self.requires_grad:
            parts.append("requires_grad=True")
        return f"{type(self).__name__}({', '.join(parts)})"

    # --- copying and saving ---

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors that are leaves of the graph can be deep-copied, as in torch."
            )
        storage = memo.get(id(self.storage)) or self.storage.__deepcopy__(memo)
        memo[id(self)] = copied = _restore(
            storage, self.requires_grad, isinstance(self, torch.nn.Parameter)
        )
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _restore, (self.storage, self.requires_grad, isinstance(self, torch.nn.Parameter))

    # --- torch.compile ---

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Recipe, torch.dtype]]:
        """The buffers that may be read now, and what they mean."""
        stale = self.storage.is_stale
        names = [name for name in self.storage.buffers if not (stale and name in DERIVED)]
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


def _restore(storage: QuantizedStorage, requires_grad: bool, is_parameter: bool) -> QuantizedTensor:
    """A weight around ``storage``, as unpickling and deepcopy make it."""
    tensor = QuantizedTensor(storage)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)  # type: ignore[return-value]
    return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]
