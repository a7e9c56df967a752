"""Post-all-gather processing makes the derived copies of weights from their present codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from zerocast.backends import backend_for
from zerocast.numerics import Backend, Launch, Numerics, TakenDigest, TensorOperand
from zerocast.recipes import Recipe
from zerocast.tensors.digest import TakenDigests
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.weight_operands import expand_operand, tensor_operand


def rebuild_derived(storages: Iterable[QuantizedStorage]) -> None:
    """Make the derived copies of weights from their present codes.

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
    *,
    digested: Mapping[QuantizedStorage, QuantizedStorage] = MappingProxyType({}),
) -> list[Launch]:
    """Return the launches that make the derived copies of weights as long as their buffers stay
    where they are: one for each recipe and device, by ``backend`` or the device's own.

    Operands in ``cast`` are used where they hold the same codes, that is unless the cast writes
    codes elsewhere. ``digested``: by some of the weights the one whose matrix it is, or itself: of
    these, launches on a CPU that can take digests of the codes that they read are :class:`Rebuild`.

    Afterwards call :meth:`Writes.mark_rebuilt`.
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
        by, numerics = backend or backend_for(device), recipe.numerics
        operands = [operand_of(each) for stack in group for each in stack.matrices]
        if digested and by.digests_transposed and device.type == "cpu":
            launches.append(Rebuild(by, numerics, operands, [digested.get(each) for each in group]))
        else:
            launches.append(by.transpose(numerics, operands))
    return launches


class Rebuild(TakenDigests):
    """The launch that makes the derived copies of matrices, with the digests of their codes."""

    def __init__(
        self,
        backend: Backend,
        numerics: Numerics,
        operands: Sequence[TensorOperand],
        weights: Sequence[QuantizedStorage | None],
    ) -> None:
        super().__init__(list(map(_digested, operands, weights)))
        given = [
            replace(operand, planes=(replace(first, digest=TakenDigest(place[1], total)), second))
            if place
            else operand
            for operand, (first, second), place, total in zip(
                operands,
                (operand.planes for operand in operands),
                self.ranges,
                self.sums.split(1),
                strict=True,
            )
        ]
        self._launch = backend.transpose(numerics, given)

    def __call__(self) -> None:
        self.clear()
        self._launch()


def _digested(
    operand: TensorOperand, weight: QuantizedStorage | None
) -> tuple[int, int, int] | None:
    """What a matrix has of a weight's codes, where its rows are whole lines of a digest."""
    if weight is None:
        return None
    codes, whole = operand.planes[0].codes, weight.buffers["rowwise_data"].data_ptr()
    assert codes is not None
    first, size = codes.data_ptr() - whole, codes.numel()
    if not size or first % 64 or size % (64 * operand.grid.rows):
        return None
    return whole, first, first + size


def prepare_expansion(
    storages: Sequence[QuantizedStorage],
    compact: Mapping[int, Mapping[str, torch.Tensor]],
    backend: Backend,
) -> list[Launch]:
    """Return the launches that make stored scales from gathered ones, one a block: one for each
    recipe.

    Args:
        storages: the weights, on one device.
        compact: the scales of planes, by place and name, for the weights that gather some.
        backend: the backend of the device.
    """
    by_recipe: dict[Recipe, list[TensorOperand]] = {}
    for i, scales in compact.items():
        operand = expand_operand(storages[i], scales)
        if operand is not None:
            by_recipe.setdefault(storages[i].recipe, []).append(operand)
    return [
        backend.expand_scales(recipe.numerics, operands) for recipe, operands in by_recipe.items()
    ]
