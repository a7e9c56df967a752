"""QuantizedTensor, with the attributes and methods of TransformerEngine's tensors.

All quantized weights of zerocast have one class, and their recipe determines the scheme. This
module has classes by scheme, for ``isinstance``, and TransformerEngine's attributes for buffers:

    Float8Tensor (delayed and current scaling)   _data, _transpose, _scale_inv
    all others                                   _rowwise_data, _columnwise_data,
                                                 _rowwise_scale_inv, _columnwise_scale_inv
    NVFP4Tensor, too                             _amax_rowwise, _amax_columnwise

Each is the live buffer, or None if the weight does not hold that copy. An assigned tensor becomes
the buffer. If this changes the codes or scales from which the columnwise copy is derived, the next
forward or ``post_all_gather_processing`` rebuilds that copy. Assigning None frees the copy.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch

from zerocast import InputError, MissingDataError, QuantizedTensor, Recipe, UnsupportedError
from zerocast.adapters.transformer_engine.pytorch.constants import DType
from zerocast.adapters.transformer_engine.pytorch.quantizer import Quantizer
from zerocast.arguments import why_unusable

__all__ = ["QuantizedTensor", "QuantizedTensorStorage", "Quantizer"]

QuantizedTensorStorage = QuantizedTensor


class _SchemeMeta(torch._C._TensorMeta):
    """A metaclass whose classes have as instances all quantized tensors of their schemes."""

    schemes: tuple[str, ...]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, QuantizedTensor) and instance.recipe.scheme in cls.schemes


class SchemeTensor(QuantizedTensor, metaclass=_SchemeMeta):
    """The class of quantized tensors of some schemes, for ``isinstance`` only.

    Raises:
        UnsupportedError: if it is instantiated.
    """

    schemes: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *given: Any, **named: Any) -> Any:
        raise UnsupportedError(
            f"a {cls.__name__} is made by a layer under quantized_model_init, by a quantizer, by "
            "zerocast.quantize or by zerocast.empty; to fill it with given codes and scales, "
            "assign them to its attributes (_data, _rowwise_data, _scale_inv, ...)."
        )


# --- attributes of tensors ---

_PER_TENSOR = {
    "_data": "rowwise_data", "_transpose": "columnwise_data", "_scale_inv": "rowwise_scale_inv",
}  # fmt: skip
_PER_BLOCK = {
    f"_{name}": name
    for name in ("rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv")
}
_NVFP4 = _PER_BLOCK | {"_amax_rowwise": "amax", "_amax_columnwise": "amax"}
_COLUMNWISE = ("_transpose", "_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise")


def _fields(recipe: Recipe) -> dict[str, str]:
    """Return the names of buffers by the attributes that a tensor of this recipe has."""
    return {"delayed": _PER_TENSOR, "current": _PER_TENSOR, "nvfp4": _NVFP4}.get(
        recipe.scheme, _PER_BLOCK
    )


def _check_field(tensor: QuantizedTensor, field: str) -> None:
    fields = _fields(tensor.recipe)
    if field not in fields:
        raise MissingDataError(
            f"{field} is an attribute of tensors of other recipes; a tensor of "
            f"{type(tensor.recipe).__name__} has {', '.join(fields)}."
        )


def _read(tensor: QuantizedTensor, field: str) -> torch.Tensor | None:
    _check_field(tensor, field)
    storage, name = tensor.quantized_storage, _fields(tensor.recipe)[field]
    if field in _COLUMNWISE:
        return getattr(tensor, name) if storage.has_columnwise else None
    found = storage.buffers.get(name)
    return None if found is None else found.detach()


def _assign(tensor: QuantizedTensor, field: str, value: torch.Tensor | None) -> None:
    """Make ``value`` the buffer; or, if it is None, free the copy.

    Raises:
        InputError: if ``value`` has another shape, dtype or device, or is not contiguous.
        MissingDataError: if the tensor does not hold that copy.
    """
    _check_field(tensor, field)
    storage, name = tensor.quantized_storage, _fields(tensor.recipe)[field]
    columnwise = field in _COLUMNWISE
    if value is None:
        if columnwise and storage.has_columnwise:
            tensor.update_usage(columnwise_usage=False)
        elif not columnwise and storage.has_rowwise:
            tensor.update_usage(rowwise_usage=False)
        return
    if columnwise and not storage.has_columnwise:
        getattr(tensor, "columnwise_data")  # noqa: B009  # raises an error
    name = name if name in storage.buffers else name.replace("columnwise", "rowwise")
    old = storage.buffers.get(name)
    if old is None:
        raise MissingDataError(
            f"{field} cannot be assigned to a tensor without its {name}; quantize into one that "
            "holds it."
        )
    problem = why_unusable(value, (old.dtype,), old.device)
    if problem is None and value.shape != old.shape:
        problem = f"shape {tuple(value.shape)}"
    if problem is not None:
        raise InputError(
            f"{field} must be a contiguous {old.dtype} tensor of shape {tuple(old.shape)} on "
            f"{old.device} with allocated storage, got {problem}."
        )
    same = torch.equal(value, old)
    storage.replace(name, value.detach())
    if not same:
        storage.writes.take_over(rebuild_on_use=True)


def _attribute(field: str) -> property:
    def get(tensor: QuantizedTensor) -> torch.Tensor | None:
        return _read(tensor, field)

    def put(tensor: QuantizedTensor, value: torch.Tensor | None) -> None:
        _assign(tensor, field, value)

    return property(get, put, doc=f"TransformerEngine's ``{field}``.")


class _Members:
    """The other attributes that are added to quantized tensors."""

    def _get_quantizer(self) -> Quantizer:
        """Return a quantizer that casts as this tensor was cast."""
        return Quantizer.of(cast("QuantizedTensor", self))

    @property
    def _quantizer(self) -> Quantizer:
        return self._get_quantizer()

    @property
    def _fp8_dtype(self) -> DType:
        return DType.of(cast("QuantizedTensor", self).recipe.numerics.fmt.name)

    _fp4_dtype = _fp8_dtype

    def quantize_(
        self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Cast ``tensor`` into this one, and return this one."""
        own = cast("QuantizedTensor", self)
        return self._get_quantizer().update_quantized(tensor, own, noop_flag=noop_flag)

    def get_usages(self) -> dict[str, bool]:
        """Return which copies it holds, not stale: ``{"rowwise": ..., "columnwise": ...}``."""
        storage = cast("QuantizedTensor", self).quantized_storage
        columnwise = storage.has_columnwise and not storage.is_stale
        return {"rowwise": storage.has_rowwise, "columnwise": columnwise}


for _name in (*_PER_TENSOR, *_NVFP4):
    setattr(QuantizedTensor, _name, _attribute(_name))
for _name, _member in vars(_Members).items():
    if not _name.startswith("__"):
        setattr(QuantizedTensor, _name, _member)
