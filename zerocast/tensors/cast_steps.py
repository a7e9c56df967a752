"""CastSteps: the operations of a cast, in their order.

    partial_amax     the amaxes of this rank's shards         then ranks take the maximum
                     (and the codes of whole blocks)
    partial_select   4-over-6: the errors of both scales      then ranks take the sum
                     (and the codes of whole blocks)
    select           4-over-6: the choice of blocks that ranks share
    compute_scale    the scales of all blocks
    partial_cast     the codes of this rank's shards          then ranks gather them
    expand_scales    the stored scales, where ranks gather one a block
    transpose        the derived columnwise copies

Recipes state arithmetic and planes, backends run operations; their order is stated here alone.
Delayed scaling multiplies by a scale that earlier casts gave, so its codes and its amax take one
pass, in ``partial_amax``, and ``compute_scale`` closes the cast. Scales that belong to blocks alone
wait for no other rank where a shard holds the whole block: such rows of blocks are measured and
cast in one pass, in ``partial_amax``, and ``partial_cast`` writes the others. Under 4-over-6 the
pass that chooses their scales, ``partial_select``, casts them. Where nothing may be written before
the amaxes were judged, codes wait for ``compute_scale`` otherwise, and precede it if it is delayed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from zerocast.layout import NOTHING, Extent, whole_rows
from zerocast.numerics import (
    AdamWUpdate,
    Backend,
    Launch,
    LaunchUpdates,
    Masters,
    Numerics,
    NVFP4Numerics,
    Operands,
    TakenDigest,
    TensorOperand,
)
from zerocast.recipes import Recipe
from zerocast.tensors.digest import TakenDigests
from zerocast.tensors.post_gather import Rebuild, prepare_expansion, prepare_rebuild
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.weight_operands import OwnScales, scale_operand

STEPS = (
    "partial_amax", "partial_select", "select", "compute_scale", "partial_cast", "expand_scales",
    "transpose",
)  # fmt: skip


class CastSteps:
    """The launches of casting some weights: one a step and recipe, whatever their number.

    They are prepared for the weights' buffers as they lie now.

    Args:
        backend: the backend of the weights' device.
        operands: for each weight its bytes, and what is cast into them.
        masters: the values that are cast, in the slots of the operands.
        judges_amaxes: whether nothing may be written before ``compute_scale``.
        own_scales: the scales that this rank makes, by place, where ranks gather scales.
        compact: all of these scales once gathered, by place.
        stages: the places of the weights that each stage of ``partial_cast`` writes; all are of one
            where there are none.

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
        self._launches: dict[str, list[Launch]] = {step: [] for step in STEPS}
        self._backend, self._masters, self._judges_amaxes = backend, masters, judges_amaxes
        self._of_updates: list[tuple[Numerics, Operands, Masters]] = []
        self._digests: list[CastDigests] = []
        self._partial_casts: list[tuple[str, int, Numerics, Operands]] = []  # by step and place
        self._updates: list[LaunchUpdates] | None = None  # made when there are any
        self._stages: list[int] = []  # of each launch of partial_cast
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
            self._prepare(recipe, cast, by_stage, scaled)
        self._storages = storages = [storage for storage, _ in operands]
        self._storage_of = {id(operand.planes[0]): storage for storage, operand in operands}
        self._launches["expand_scales"] = prepare_expansion(storages, compact, backend)
        self._prepare_rebuild = partial(prepare_rebuild, storages, backend, dict(operands))
        self._launches["transpose"] = self._prepare_rebuild()

    def run(self, *steps: str) -> None:
        """Launch the operations of ``steps``."""
        for step in steps:
            for launch in self._launches[step]:
                launch()

    def take_digests(
        self,
        weights: Sequence[QuantizedStorage],
        staged: Container[QuantizedStorage] = (),
        shown: Container[QuantizedStorage] = (),
    ) -> None:
        """Let digests be taken of codes that pass through a CPU's registers or caches.

        Args:
            weights: by place the weight that it is a matrix of, or itself.
            staged: those of which a gather takes digests as it copies a rank's own codes, too.
                Without derived copies they are taken as a pass makes them that measures and casts.
            shown: those of which a gather takes digests of others' codes. A rank's own are taken
                as it casts them; as the step ``transpose`` reads them, of all but these weights.
        """
        of = dict(zip(self._storages, weights, strict=True))
        rebuilt = {
            matrix: weight
            for matrix, weight in of.items()
            if weight not in staged and weight not in shown
        }
        self._launches["transpose"] = self._prepare_rebuild(digested=rebuilt)
        if not self._backend.digests_cast:
            return

        def digests_of(operands: Operands, extents: Sequence[Extent]) -> CastDigests:
            own = [of[self._storage_of[id(operand.planes[0])]] for operand in operands]
            wanted = [
                extent if weight in shown or not weight.derived_names else NOTHING
                for weight, extent in zip(own, extents, strict=True)
            ]
            return CastDigests(operands, own, wanted)

        for i, (numerics, operands, masters) in enumerate(self._of_updates):
            digests = digests_of(operands, [each.whole for each in operands])
            digests.is_of_updates = True
            if any(digests.ranges):
                self._of_updates[i] = numerics, digests.operands, masters
                cast = self._backend.partial_amax_cast(numerics, digests.operands, masters)
                self._launches["partial_amax"][i] = partial(digests.take_by, cast)
                self._digests.append(digests)
        for step, i, numerics, operands in self._partial_casts:
            later = [NOTHING if each.whole else each.extent for each in operands]
            digests = digests_of(operands, later)
            if any(digests.ranges):
                cast = self._backend.partial_cast(numerics, digests.operands, self._masters)
                self._launches[step][i] = partial(digests.take_by, cast)
                self._digests.append(digests)

    def digests(self) -> list[TakenDigests]:
        """Those that the latest step ``transpose`` has taken, and, the first time after it, those
        of the latest cast: whoever gathers again may have written codes since.
        """
        of_cast = [each for each in self._digests if each.is_new]
        for each in of_cast:
            each.is_new = False
        return [*self.rebuilt, *of_cast]

    @property
    def cast_digested(self) -> set[int]:
        """The addresses of the codes of which casts take digests."""
        return {place[0] for each in self._digests for place in each.ranges if place}

    @property
    def rebuilt(self) -> Sequence[TakenDigests]:
        """The digests that the latest step ``transpose`` has taken."""
        return [each for each in self._launches["transpose"] if isinstance(each, Rebuild)]

    def update(self, updates: Sequence[AdamWUpdate | None]) -> None:
        """Update masters, by slot, and do the step ``partial_amax`` of all in the same pass. It
        cannot be used where amaxes are judged.
        """
        if self._updates is None:
            self._updates = [self._backend.adamw_cast(*each) for each in self._of_updates]
        for digests in self._digests:
            digests.begin(is_taken=digests.is_of_updates)
        for launch in self._updates:
            launch(updates)

    def run_stage(self, stage: int) -> None:
        """Launch ``partial_cast`` for the weights of one stage."""
        for own, launch in zip(self._stages, self._launches["partial_cast"], strict=True):
            if own == stage:
                launch()

    def _prepare(
        self,
        recipe: Recipe,
        operands: Operands,
        by_stage: Mapping[int, Operands],
        scaled: Operands,
    ) -> None:
        """Prepare the steps of weights under one recipe, whose scales are those of ``scaled``."""
        numerics, launches = recipe.numerics, self._launches
        backend, masters = self._backend, self._masters
        scale = backend.compute_scale(numerics, scaled)
        measured = operands
        if recipe.chooses_scales:  # nothing is cast before
            measured = [replace(operand, whole=NOTHING) for operand in operands]
        self._of_updates.append((numerics, measured, masters))
        if recipe.casts_before_reduction:
            cast = backend.partial_cast(numerics, operands, masters)
            step = "compute_scale" if self._judges_amaxes else "partial_amax"
            self._partial_casts.append((step, len(launches[step]), numerics, operands))
        if recipe.casts_before_reduction and not self._judges_amaxes:
            self.writes_early = True
            launches["partial_amax"].append(cast)
            launches["compute_scale"].append(scale)
        elif recipe.casts_before_reduction:
            launches["partial_amax"].append(backend.partial_amax(operands, masters))
            # When the codes are written, their scale must not have moved on yet.
            launches["compute_scale"] += [cast, scale]
        else:
            if any(operand.whole for operand in measured):
                self.writes_early = True
                amax = backend.partial_amax_cast(numerics, measured, masters)
            else:
                amax = backend.partial_amax(measured, masters)
            launches["partial_amax"].append(amax)
            launches["compute_scale"].append(scale)
            for stage, own in by_stage.items():
                place = len(launches["partial_cast"])
                self._partial_casts.append(("partial_cast", place, numerics, own))
                launches["partial_cast"].append(backend.partial_cast(numerics, own, masters))
                self._stages.append(stage)
        if recipe.chooses_scales:
            assert isinstance(numerics, NVFP4Numerics)
            self.chooses_scales = True
            self.writes_selected |= any(operand.whole for operand in operands)
            launches["partial_select"].append(backend.partial_select(numerics, operands, masters))
            launches["select"].append(backend.select(numerics, operands))


class CastDigests(TakenDigests):
    """The digests of codes that a launch casts.

    Args:
        operands: of the launch.
        weights: by operand the weight that it is a matrix of, or itself.
        extents: by operand the elements of which digests are wanted.

    Attributes:
        operands: those, with what asks for the digests.
        is_new: whether nobody has used those of the latest cast.
        is_of_updates: whether an update takes them, too.
    """

    is_new = is_of_updates = False

    def __init__(
        self,
        operands: Operands,
        weights: Sequence[QuantizedStorage],
        extents: Sequence[Extent],
    ) -> None:
        found = list(map(_ranges_of, operands, weights, extents))
        super().__init__([place for _, places in found for place in places])
        sums = iter(self.sums.split(1))
        self.operands = [
            replace(
                operand,
                planes=tuple(
                    replace(each, digest=TakenDigest(first, next(sums)))
                    if places and each.plane.is_cast
                    else each
                    for each in operand.planes
                ),
            )
            for operand, (first, places) in zip(operands, found, strict=True)
        ]

    def begin(self, *, is_taken: bool = True) -> None:
        """Forget those of the cast before; ``is_taken``: before a launch that takes others."""
        self.clear()
        self.is_new = is_taken

    def take_by(self, cast: Launch) -> None:
        """Run the launch of :attr:`operands`."""
        self.begin()
        cast()


def _ranges_of(
    operand: TensorOperand, weight: QuantizedStorage, extent: Extent
) -> tuple[int, list[tuple[int, int, int]]]:
    """What a launch casts of a weight's codes: where the matrix begins in them, and the ranges of
    :class:`TakenDigests`, by plane, of bytes that hold nothing but elements of ``extent``. No
    ranges where it is cast elsewhere, or the launch can take no digest of it.
    """
    if not extent:
        return 0, []
    in_byte = 8 // weight.form.numerics.fmt.bits
    begin, end = -(-extent.start // in_byte), extent.end // in_byte
    firsts, ranges = set[int](), []
    for each in operand.cast_planes:
        assert each.codes is not None
        for whole in (weight.buffers[name] for name in weight.gathered):
            first = each.codes.data_ptr() - whole.data_ptr()
            if 0 <= first < whole.nbytes:
                firsts.add(first)
                ranges.append((whole.data_ptr(), first + begin, first + end))
    alike = len(ranges) == len(operand.cast_planes) and len(firsts) == 1 and not operand.codes_start
    first = min(firsts, default=0)
    return first, ranges if alike and first % 64 == 0 and begin < end else []


def whole_rows_of(storage: QuantizedStorage, operand: TensorOperand, backend: Backend) -> Extent:
    """Return the elements of an operand that one pass of ``backend`` measures and casts: rows of
    blocks of which no other rank owns elements, under scales that depend on blocks alone. Under
    4-over-6: that one pass chooses the scales of, and casts.
    """
    recipe = storage.recipe
    waits = recipe.scales_tensor or recipe.casts_before_reduction or storage.shared_amaxes()
    if waits and not recipe.chooses_scales:
        return NOTHING
    grids = [each.plane.grid for each in operand.cast_planes]
    if not backend.reads_once(recipe.numerics, grids):
        return NOTHING
    return whole_rows(grids, operand.extent)
