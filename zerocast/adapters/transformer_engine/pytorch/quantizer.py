"""Quantizer: a quantizer of zerocast with TransformerEngine's methods."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import ClassVar, Literal

import torch

from zerocast import InputError, MissingDataError, QuantizedTensor, Recipe, UnsupportedError
from zerocast import Quantizer as OwnQuantizer
from zerocast.adapters.transformer_engine.pytorch.constants import DType
from zerocast.arguments import check_device
from zerocast.nn.quantizer import StateSlot
from zerocast.tensors import quantize_into


def check_one_value(**given: tuple[object, object]) -> None:
    """Raise :class:`UnsupportedError` for an argument with an unsupported value; ``given`` has, by
    name, its value and the only supported value.
    """
    for name, (value, served) in given.items():
        if value is not served and value != served:
            raise UnsupportedError(
                f"{name}={value!r} is not supported; leave it {served!r}. "
                "docs/transformer_engine.md says what replaces it."
            )


def _usage(name: Literal["rowwise", "columnwise"]) -> property:
    def set_usage(quantizer: OwnQuantizer, value: bool) -> None:
        quantizer.set_usage(**{name: value})

    return property(attrgetter(name), set_usage, doc=f"Whether results hold {name} codes.")


class Quantizer(OwnQuantizer):
    """A quantizer with TransformerEngine's methods; subclasses by scheme have its constructors.

    Attributes:
        internal, optimize_for_gemm: attributes of TransformerEngine that have no effect here.
    """

    scheme: ClassVar[str] = ""
    internal = optimize_for_gemm = False
    _classes: ClassVar[dict[str, type[Quantizer]]] = {}

    def __init_subclass__(cls) -> None:
        cls._classes[cls.scheme] = cls

    def _start(
        self,
        recipe: Recipe,
        rowwise: bool,
        columnwise: bool,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Initialize; ``state`` has buffers of the recipe state by name; missing ones are
        allocated.
        """
        given, specs = state or {}, recipe.own_buffers()
        device = next((each.device for each in given.values()), None)
        device = check_device("device", device)
        self._state = {
            name: given[name] if name in given else specs[name].allocate(device)
            for name in recipe.state
        }
        slot = StateSlot(self._tensors, self._record) if self._state else None
        super().__init__(recipe, rowwise=rowwise, columnwise=columnwise, slot=slot)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the state. The slot calls this, so a copied quantizer's slot has the copy's."""
        return dict(self._state)

    def _record(self, amax: torch.Tensor) -> None:
        """Set the state's amax to the maximum of itself and ``amax`` of a cast, int32 [1]."""
        largest = self._state["amax"]
        torch.maximum(largest, amax.view(torch.float32), out=largest)

    @classmethod
    def of(cls, tensor: QuantizedTensor) -> Quantizer:
        """Return a quantizer that casts as ``tensor`` was cast, for the copies that it holds.

        Raises:
            MissingDataError: if the tensor does not hold the recipe state.
        """
        storage, recipe = tensor.quantized_storage, tensor.recipe
        missing = [name for name in recipe.state if name not in storage.buffers]
        if missing:
            raise MissingDataError(
                f"this tensor does not hold {', '.join(missing)}, which {recipe} needs, because a "
                "quantizer made it; cast into it with that quantizer's update_quantized."
            )
        kind = cls._classes.get(recipe.scheme, Quantizer)
        made = kind.__new__(kind)
        state = {name: storage.buffers[name] for name in recipe.state}
        made._start(recipe, storage.has_rowwise, storage.has_columnwise, state)
        return made

    def copy(self) -> Quantizer:
        """Return a copy whose usage can be set independently."""
        return copy.copy(self)

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        """The format of the codes."""
        return DType.of(self.recipe.numerics.fmt.name)

    rowwise_usage, columnwise_usage = _usage("rowwise"), _usage("columnwise")

    def get_usages(self) -> dict[str, bool]:
        """Return both usages: ``{"rowwise": ..., "columnwise": ...}``."""
        return {"rowwise": self.rowwise, "columnwise": self.columnwise}

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """Call :meth:`zerocast.Quantizer.make_empty`; the dtype is FP32 by default."""
        made = super().make_empty(torch.Size(shape), dtype=dtype, device=device)
        return made.requires_grad_(requires_grad)  # type: ignore[return-value]

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """Quantize ``tensor``, converted to ``dtype``, by :meth:`zerocast.Quantizer.quantize`; or
        into ``out`` by :meth:`update_quantized`, without conversion.
        """
        if out is not None:
            return self.update_quantized(tensor, out)
        return super().quantize(tensor if dtype is None else tensor.to(dtype))

    __call__ = quantize

    def multi_quantize(self, list_of_tensors: Iterable[torch.Tensor]) -> list[QuantizedTensor]:
        """Quantize each tensor."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Return whether the recipe can quantize a tensor of this shape."""
        try:
            self.recipe.check_shape(inp.shape)
        except InputError:
            return False
        return True

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Cast ``src`` into every copy that ``dst`` holds, and return ``dst``.

        Args:
            src: a tensor that expands to the shape of ``dst``.
            dst: a quantized tensor whose codes and scales have the same meaning as this
                quantizer's.
            noop_flag: must be None.

        Raises:
            InputError: if the codes and scales of ``dst`` have another meaning.
            UnsupportedError: for a ``noop_flag``.
        """
        if noop_flag is not None:
            raise UnsupportedError(
                "noop_flag is not supported; leave it None, and call update_quantized only when a "
                "cast is wanted."
            )
        given = dst.recipe if isinstance(dst, QuantizedTensor) else None
        if given is None or _meaning(given) != _meaning(self.recipe):
            kind = type(dst).__name__ if given is None else given
            raise InputError(
                f"dst must be a quantized tensor of {self.recipe}, got {kind}; use "
                "dst._get_quantizer(), or dst.copy_(src)."
            )
        storage = dst.quantized_storage
        if all(storage.buffers.get(name) is own for name, own in self._state.items()):
            with torch.no_grad():
                return dst.copy_(src)  # type: ignore[return-value]
        with self.cast_into(storage) as whole:
            self.record(quantize_into(whole, src.expand(dst.shape), advances=False))
        return dst


def _meaning(recipe: Recipe) -> tuple[object, ...]:
    """Return the properties of a recipe that define the meaning of codes and scales."""
    return recipe.numerics, recipe.block, recipe.columnwise_source, recipe.round_master
