"""CastSteps: the launches of a cast by their steps (:mod:`zerocast.tensors.pipeline`).

Recipes define arithmetic and planes, backends run operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from zerocast.layout import NOTHING, Extent, whole_rows
from zerocast.numerics import (
    AdamWUpdate,
    Backend,
    Float8DelayedNumerics,
    Launch,
    LaunchUpdates,
    Masters,
    Numerics,
    NVFP4Numerics,
    Operands,
    TensorOperand,
)
from zerocast.recipes import Recipe
from zerocast.tensors.owned_shard import OwnScales
from zerocast.tensors.pipeline import ORDER, CastPipeline
from zerocast.tensors.post_gather import prepare_expansion, prepare_rebuild
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.weight_operands import scale_operand


class CastSteps:
    """The launches of casting some weights: one per step and recipe, for any number of weights.

    They are prepared for the current buffers of the weights. There are two more steps:
    "expand_scales" makes the stored scales if ranks gather one per block, and "transpose" makes the
    derived columnwise copies.

    Args:
        backend: the backend of the weights' device.
        operands: for each weight its storage, and its operand.
        masters: the values that are cast, in the slots of the operands.
        judges_amaxes: whether nothing may be written before ``compute_scale``.
        own_scales: by index the scales that this rank makes, if ranks gather scales.
        compact: by index all of these scales once gathered.
        stages: for each stage of ``partial_cast`` the indices of the weights that it writes; empty
            for a single stage.

    Attributes:
        writes_early: whether the first step writes codes: under delayed scaling, and of whole
            blocks.
        writes_selected: whether the step that chooses scales writes codes, of whole blocks.
        chooses_scales: whether there are steps of 4-over-6.
    """

    def __init__(
        self,
        backend: Backend,
        operands: Sequence[tuple[QuantizedStorage, TensorOperand]],
        masters: Masters,
        *,
        judges_amaxes: bool = False,
        own_scales: Mapping[int, Mapping[str, OwnScales]] = MappingProxyType({}),
        compact: Mapping[int, Mapping[str, torch.Tensor]] = MappingProxyType({}),
        stages: Sequence[Sequence[int]] = (),
    ) -> None:
        self._launches: dict[str, list[Launch]] = defaultdict(list)
        self._backend = backend
        self._of_updates: list[tuple[Numerics, Operands, Masters]] = []
        self._updates: list[LaunchUpdates] | None = None  # made on first use
        self._stages: list[int] = []  # the stage of each launch of partial_cast
        stage_of = {i: stage for stage, places in enumerate(stages) for i in places}
        self.writes_early = self.writes_selected = self.chooses_scales = False
        operands = [
            (s, replace(operand, whole=whole_rows_of(s, operand, backend)))
            if s.recipe.chooses_scales or not judges_amaxes
            else (s, operand)
            for s, operand in operands
        ]
        by_recipe: dict[Recipe, list[int]] = {}
        for i, (storage, _) in enumerate(operands):
            by_recipe.setdefault(storage.recipe, []).append(i)
        for recipe, alike in by_recipe.items():
            cast = [operands[i][1] for i in alike]
            by_stage: dict[int, list[TensorOperand]] = {}
            for i in alike:
                by_stage.setdefault(stage_of.get(i, 0), []).append(operands[i][1])
            scaled = [scale_operand(operands[i][1], own_scales.get(i, {})) for i in alike]
            for step, launch in launches_of(
                backend, recipe.numerics, cast, masters, scaled,
                stages=[*by_stage.values()], judges_amaxes=judges_amaxes,
            ):  # fmt: skip
                self._launches[step].append(launch)
            are_whole = any(operand.whole for operand in cast)
            if recipe.casts_before_reduction:
                self.writes_early |= not judges_amaxes
            else:
                self._stages += by_stage
                self.writes_early |= are_whole and not recipe.chooses_scales
            self.chooses_scales |= recipe.chooses_scales
            self.writes_selected |= are_whole and recipe.chooses_scales
            self._of_updates.append((recipe.numerics, _measured(recipe.numerics, cast), masters))
        storages = [storage for storage, _ in operands]
        self._launches["expand_scales"] = prepare_expansion(storages, compact, backend)
        self._launches["transpose"] = prepare_rebuild(storages, backend, dict(operands))

    def run(self, step: str) -> None:
        """Launch the operations of a step."""
        for launch in self._launches[step]:
            launch()

    def pipeline(self, **others: Callable[[], None]) -> CastPipeline:
        """Return the steps of a cast that launch something, and ``others`` by name."""
        steps = [step for step in ORDER if self._launches[step]]
        return CastPipeline(**{step: partial(self.run, step) for step in steps} | others)

    def update(self, updates: Sequence[AdamWUpdate | None]) -> None:
        """Update masters, by slot, and run the step ``partial_amax`` of all in the same pass.

        It must not be used if amaxes are judged.
        """
        if self._updates is None:
            self._updates = [self._backend.adamw_cast(*each) for each in self._of_updates]
        for launch in self._updates:
            launch(updates)

    def run_stage(self, stage: int) -> None:
        """Launch ``partial_cast`` for the weights of one stage."""
        for own, launch in zip(self._stages, self._launches["partial_cast"], strict=True):
            if own == stage:
                launch()


def launches_of(
    backend: Backend,
    numerics: Numerics,
    operands: Operands,
    masters: Masters,
    scaled: Operands,
    *,
    stages: Sequence[Operands] = (),
    judges_amaxes: bool = False,
) -> Iterator[tuple[str, Launch]]:
    """Yield every launch that casts weights under one numerics, with its step.

    Args:
        backend, masters, judges_amaxes: as for :class:`CastSteps`.
        operands: what is cast.
        scaled: the same operands, with the scales that this rank makes.
        stages: what each launch of ``partial_cast`` writes; empty for a single stage.
    """
    measured = _measured(numerics, operands)
    if not isinstance(numerics, Float8DelayedNumerics):
        yield "partial_amax", backend.partial_amax(measured, masters, numerics)
        for own in stages or [operands]:
            yield "partial_cast", backend.partial_cast(numerics, own, masters)
    elif judges_amaxes:
        yield "partial_amax", backend.partial_amax(operands, masters)
        # When the codes are written, the scale must not yet be that of the next cast.
        yield "compute_scale", backend.partial_cast(numerics, operands, masters)
    else:
        yield "partial_amax", backend.partial_cast(numerics, operands, masters)
    if isinstance(numerics, NVFP4Numerics) and numerics.four_over_six is not None:
        yield "partial_select", backend.partial_select(numerics, operands, masters)
        yield "select", backend.select(numerics, operands)
    yield "compute_scale", backend.compute_scale(numerics, scaled)


def _measured(numerics: Numerics, operands: Operands) -> Operands:
    """Return the operands of the first step: under 4-over-6 it casts nothing."""
    if isinstance(numerics, NVFP4Numerics) and numerics.four_over_six is not None:
        return [replace(operand, whole=NOTHING) for operand in operands]
    return operands


def whole_rows_of(storage: QuantizedStorage, operand: TensorOperand, backend: Backend) -> Extent:
    """Return the elements of an operand that one pass of ``backend`` measures and casts.

    These are rows of blocks of which no other rank owns elements, under scales that depend on
    blocks alone. Under 4-over-6 that pass chooses the scales and casts.
    """
    recipe = storage.recipe
    waits = recipe.scales_tensor or recipe.casts_before_reduction or storage.shared_amaxes()
    if waits and not recipe.chooses_scales:
        return NOTHING
    grids = [each.plane.grid for each in operand.cast_planes]
    if not backend.reads_once(recipe.numerics, grids):
        return NOTHING
    return whole_rows(grids, operand.extent)
