"""Post-all-gather processing: makes the derived copies of weights from their current codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from zerocast.backends import backend_for
from zerocast.numerics import Backend, Launch, TensorOperand
from zerocast.recipes import Recipe
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.weight_operands import expand_operand, tensor_operand


def rebuild_derived(storages: Iterable[QuantizedStorage]) -> None:
    """Make the derived copies of weights from their current codes.

    Weights without a columnwise copy are skipped.
    """
    storages = list(storages)
    for storage in storages:
        storage.writes.require_scales()
    for launch in prepare_rebuild(storages):
        launch()
    for storage in storages:
        storage.writes.mark_rebuilt()


def prepare_rebuild(
    storages: Iterable[QuantizedStorage],
    backend: Backend | None = None,
    cast: Mapping[QuantizedStorage, TensorOperand] = MappingProxyType({}),
) -> list[Launch]:
    """Return launches that make the derived copies of weights, valid until a buffer moves.

    There is one for each recipe and device, by ``backend`` or the device's default. Operands in
    ``cast`` are used if they hold the same codes, that is unless the cast writes codes elsewhere.
    Call :meth:`Writes.mark_rebuilt` afterwards.
    """

    def operand_of(storage: QuantizedStorage) -> TensorOperand:
        known = cast.get(storage)
        if known is not None and known.planes[0].codes is storage.buffers["rowwise_data"]:
            return known
        return tensor_operand(storage)

    groups: dict[tuple[Recipe, torch.device], list[QuantizedStorage]] = {}
    for storage in storages:
        if storage.derived_names:
            groups.setdefault((storage.recipe, storage.device), []).append(storage)
    launches: list[Launch] = []
    for (recipe, device), group in groups.items():
        operands = [operand_of(each) for stack in group for each in stack.matrices]
        by = backend or backend_for(device)
        launches.append(by.transpose(recipe.numerics, operands))
    return launches


def prepare_expansion(
    storages: Sequence[QuantizedStorage],
    compact: Mapping[int, Mapping[str, torch.Tensor]],
    backend: Backend | None = None,
) -> list[Launch]:
    """Return the launches that make stored scales from gathered ones, one for each recipe.

    Args:
        storages: the weights, on one device.
        compact: by index and plane name the scales, one per block, of the weights that gather some.
        backend: the backend; None for the device's default.
    """
    by_recipe: dict[Recipe, list[TensorOperand]] = {}
    for i, scales in compact.items():
        operand = expand_operand(storages[i], scales)
        if operand is not None:
            by_recipe.setdefault(storages[i].recipe, []).append(operand)
    return [
        (backend or backend_for(storages[0].device)).expand_scales(recipe.numerics, operands)
        for recipe, operands in by_recipe.items()
    ]
