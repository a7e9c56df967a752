"""Post-all-gather processing makes the derived copies of weights from their present codes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerocast.backends import backend_for
from zerocast.numerics import Backend, Launch
from zerocast.recipes import Recipe
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.weight_operands import tensor_operand


def rebuild_derived(storages: Iterable[QuantizedStorage]) -> None:
    """Make the derived copies of weights from their present codes.

    Weights without a columnwise copy are skipped.
    """
    storages = list(storages)
    for launch in prepare_rebuild(storages):
        launch()
    for storage in storages:
        storage.mark_rebuilt()


def prepare_rebuild(
    storages: Iterable[QuantizedStorage], backend: Backend | None = None
) -> list[Launch]:
    """The launches that make the derived copies of weights as long as their buffers stay where they
    are: one for each recipe and device, by ``backend`` or the device's own.

    Afterwards call :meth:`QuantizedStorage.mark_rebuilt`.
    """
    groups: dict[tuple[Recipe, torch.device], list[QuantizedStorage]] = {}
    for storage in storages:
        if storage.derived_names:
            groups.setdefault((storage.recipe, storage.device), []).append(storage)
    return [
        (backend or backend_for(device)).transpose(
            recipe.numerics, [tensor_operand(each) for stack in group for each in stack.matrices]
        )
        for (recipe, device), group in groups.items()
    ]
