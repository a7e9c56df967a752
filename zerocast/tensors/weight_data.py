"""WeightData: the buffers of a quantized weight, by name: codes, scales and recipe state.

Each access returns a new alias of the buffer: a write to it writes the weight. Giving the
alias other memory (``.data = ...``, ``set_``) does not move the weight, so this need not be checked
(:mod:`zerocast.tensors.ledger`). Reading a buffer that is missing or stale raises an error that
says how to get it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zerocast.errors import InputError, MissingDataError
from zerocast.recipes import Recipe
from zerocast.tensors.dequantize import dequantize
from zerocast.tensors.post_gather import rebuild_derived
from zerocast.tensors.storage import QuantizedStorage


class WeightData(torch.Tensor):
    """The attributes of :class:`QuantizedTensor` that read its storage.

    Attributes:
        quantized_storage: the bytes, shared by all aliases of the weight.
    """

    quantized_storage: QuantizedStorage

    @property
    def recipe(self) -> Recipe:
        """The scheme that gives the bytes their meaning."""
        return self.quantized_storage.recipe

    @property
    def rowwise_data(self) -> torch.Tensor:
        """uint8: the codes, which an all-gather moves; an alias of the buffer.

        Raises:
            MissingDataError: if a quantizer made only the columnwise codes.
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
        """uint8: the codes that the transposed GEMM reads.

        They are those of the transposed weight [K, M], or [M, K] if they are quantized
        independently of the rowwise ones (MX, row-wise FP8). If one plane of codes serves both,
        this is :attr:`rowwise_data`.

        Raises:
            MissingDataError: if the weight was made with ``columnwise=False``.
            StaleCopyError: if a cast has changed the codes since.
        """
        return self._columnwise("columnwise_data", shared="rowwise_data")

    @property
    def columnwise_scale_inv(self) -> torch.Tensor:
        """The scales of :attr:`columnwise_data`, with the same errors.

        If a recipe has one plane of scales for both, this is :attr:`rowwise_scale_inv`.
        """
        return self._columnwise("columnwise_scale_inv", shared="rowwise_scale_inv")

    @property
    def amax(self) -> torch.Tensor:  # type: ignore[override]
        """FP32 [1]: the tensor's amax, in recipes that store it. (It hides ``Tensor.amax()``.)

        Raises:
            MissingDataError: under other recipes.
        """
        if "amax" not in self.quantized_storage.buffers:
            raise MissingDataError(
                f"amax is stored by recipes that decode with it, and {type(self.recipe).__name__} "
                f"does not; its scale is rowwise_scale_inv."
            )
        return self.quantized_storage.buffers["amax"].detach()

    @property
    def scale(self) -> torch.Tensor:
        """FP32 [1]: the scale of the next cast, under delayed scaling.

        Raises:
            MissingDataError: under other recipes, as for the other buffers of the recipe state.
        """
        return self._state("scale")

    @property
    def cast_scale(self) -> torch.Tensor:
        """FP32 [1]: the scale of the latest cast, under delayed scaling."""
        return self._state("cast_scale")

    @property
    def amax_history(self) -> torch.Tensor:
        """FP32 [amax_history_len]: amaxes of earlier casts, under delayed scaling."""
        return self._state("amax_history")

    @property
    def rounding_counter(self) -> torch.Tensor:
        """int64 [2]: the name's hash and the count of casts, under stochastic rounding."""
        return self._state("rounding_counter")

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the value as a plain tensor of ``dtype``, by default the nominal one.

        The value is that of the rowwise codes, or of the columnwise ones if there are no rowwise
        ones. No gradient flows through it; torch's own operations on the weight have one.
        """
        columnwise = not self.quantized_storage.has_rowwise
        return dequantize(self.quantized_storage, columnwise=columnwise).to(
            dtype or self.quantized_storage.dtype
        )

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Free the rowwise or the columnwise copy (False), require it (True), or keep it (None).

        A required columnwise copy that is missing is made, if the rowwise codes determine it.

        Raises:
            InputError: if nothing would be left.
            MissingDataError: if a required copy is missing and cannot be derived.
        """
        held = (self.quantized_storage.has_rowwise, self.quantized_storage.has_columnwise)
        keeps_rowwise, keeps_columnwise = (
            has if usage is None else usage
            for has, usage in zip(held, (rowwise_usage, columnwise_usage), strict=True)
        )
        if not (keeps_rowwise or keeps_columnwise):
            raise InputError(
                "a quantized tensor must keep its rowwise copy, its columnwise copy or both, got "
                "False for all that it has; delete the tensor instead."
            )
        if keeps_rowwise:
            self._rowwise("rowwise_data")
        if keeps_columnwise and not self.quantized_storage.has_columnwise:
            storage = self.quantized_storage
            if not storage.can_derive_columnwise:
                self._require_columnwise("columnwise_data")
            storage.add_columnwise()
            if not storage.is_stale:
                rebuild_derived([storage])
        self.quantized_storage.drop(rowwise=not keeps_rowwise, columnwise=not keeps_columnwise)

    @property
    def get_high_precision_init_val(self) -> Callable[[], torch.Tensor]:
        """``weight.get_high_precision_init_val()`` returns the value that the codes were made from.

        It is on the CPU, in its original dtype. An optimizer starts its masters from it. It is
        dropped once the codes have been cast again.

        Raises:
            MissingDataError: if no value is kept. ``hasattr`` then returns False, which frameworks
                use to decide whether to call the method.
        """
        value = self.quantized_storage.high_precision_init_val
        if value is None:
            raise MissingDataError(
                "this weight keeps no high-precision initial value: none was kept when it was "
                "made, or its codes changed since. Make it with "
                "preserve_high_precision_init_val=True, or start from weight.dequantize()."
            )
        return lambda: value

    def clear_high_precision_init_val(self) -> None:
        """Free the value of :meth:`get_high_precision_init_val`."""
        self.quantized_storage.high_precision_init_val = None

    def _state(self, name: str) -> torch.Tensor:
        if name not in self.quantized_storage.buffers:
            raise MissingDataError(
                f"{name} is state of weights of other recipes, and not of this one of "
                f"{type(self.recipe).__name__}."
            )
        return self.quantized_storage.buffers[name].detach()

    def _rowwise(self, name: str) -> torch.Tensor:
        if not self.quantized_storage.has_rowwise:
            raise MissingDataError(
                f"{name} is not there: this tensor was made, or kept, with its columnwise copy "
                f"only. Quantize it with rowwise=True."
            )
        return self.quantized_storage.buffers[name].detach()

    def _columnwise(self, name: str, shared: str) -> torch.Tensor:
        """Return the buffer ``name``, or if missing the one that serves both copies."""
        self._require_columnwise(name)
        storage = self.quantized_storage
        return storage.derived(name if name in storage.buffers else shared).detach()

    def _require_columnwise(self, name: str) -> None:
        storage = self.quantized_storage
        if storage.has_columnwise:
            return
        remedy = (
            "weight.update_usage(columnwise_usage=True) makes it from the rowwise codes"
            if storage.can_derive_columnwise
            else f"under {type(self.recipe).__name__} it cannot be made from the rowwise codes; "
            f"quantize the high-precision value again, with columnwise=True"
        )
        raise MissingDataError(
            f"{name} is not there: this weight was made, or kept, without its columnwise copy; "
            f"{remedy}."
        )


def _held(name: str) -> property:
    return property(lambda weight: weight.quantized_storage.buffers[name])


HELD = "_held_"
"""Prefix of the attributes, named after buffers, in which torch.compile finds the buffers that are
inputs of a graph."""

for _name in (
    "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax", "scale",
    "cast_scale", "amax_history", "rounding_counter",
):  # fmt: skip
    setattr(WeightData, HELD + _name, _held(_name))
