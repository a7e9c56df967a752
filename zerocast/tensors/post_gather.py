"""Post-all-gather processing: derived copies, made from the present codes of weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerocast.backends import backend_for
from zerocast.numerics import Launch
from zerocast.recipes import Recipe
from zerocast.tensors.operands import tensor_operand
from zerocast.tensors.storage import QuantizedStorage


def rebuild_derived(storages: Iterable[QuantizedStorage]) -> None:
    """Make the derived copies of weights from their present codes.

    Weights without a columnwise copy are skipped.
    """
    storages = list(storages)
    for launch in prepare_rebuild(storages):
        launch()
    for storage in storages:
        storage.mark_rebuilt()


def prepare_rebuild(storages: Iterable[QuantizedStorage]) -> list[Launch]:
    """What makes the derived copies of weights as long as their buffers stay where they are.

    One launch for each recipe and device. Afterwards call :meth:`QuantizedStorage.mark_rebuilt`.
    """
    groups: dict[tuple[Recipe, torch.device], list[QuantizedStorage]] = {}
    for storage in storages:
        if storage.derived_names:
            groups.setdefault((storage.recipe, storage.device), []).append(storage)
    return [
        backend_for(device).transpose(recipe.numerics, [tensor_operand(s) for s in group])
        for (recipe, device), group in groups.items()
    ]
