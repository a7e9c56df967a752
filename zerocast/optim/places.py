"""Places: where the weights of an optimizer lie, and whether one is another or elsewhere now.

A step writes memory that weights must read. The model has the weights themselves, so each is looked
at: is a quantized one still that storage, does a plain one lie where it lay. What quantized ones
hold lies in a few storages, which :class:`zerocast.cast.flat_plan.FlatPlan` looks at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerocast.errors import InputError
from zerocast.optim.stepped_weights import Weight
from zerocast.tensors import QuantizedStorage, QuantizedTensor


class Places:
    """The weights as they are, and where they lie, when this is made.

    Args:
        weights: of an optimizer.
        codes: the flat buffers of the quantized ones, which lie in one allocation.
    """

    def __init__(self, weights: Sequence[Weight], codes: Sequence[torch.Tensor]) -> None:
        self._weights = weights
        params = [weight.param for weight in weights]
        self._coded = [param for param in params if isinstance(param, QuantizedTensor)]
        self._plain = [param for param in params if not isinstance(param, QuantizedTensor)]
        self._flats = codes[:1]
        self._moves = QuantizedStorage.moves
        self._found, self._seen = self._look_closely(), self._look()

    def _look_closely(self) -> list[tuple[object, ...]]:
        return [(w.storage, *[plane.data_ptr() for plane in w.planes]) for w in self._weights]

    def _look(self) -> tuple[list[QuantizedStorage], list[int], list[int]]:
        """What is another where a weight has moved unsaid."""
        return (
            [weight.quantized_storage for weight in self._coded],
            list(map(torch.Tensor.data_ptr, self._plain)),
            list(map(torch.Tensor.data_ptr, self._flats)),
        )

    def error(self) -> InputError | None:
        """Return the error for a weight that no longer is what it was, or lies elsewhere."""
        if self._look() == self._seen and self._moves == QuantizedStorage.moves:
            return None
        for weight, now, before in zip(
            self._weights, self._look_closely(), self._found, strict=True
        ):
            if now != before:
                return InputError(
                    f"{weight.name} must stay in the buffer that ZeroOptimizer put it in, and no "
                    "longer lies there; convert or move a model (model.to, model.float) before "
                    "making its optimizer, and write weights in place (copy_)."
                )
        self._moves = QuantizedStorage.moves
        return None
