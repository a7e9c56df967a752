"""The operands of a weight's cast, transpose and decoding: buffers and planes, as backends need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from zerocast.layout import NOTHING, BlockGrid, Extent, Plane, ScaleLayout, Source, round_up
from zerocast.numerics import FourOverSixErrors, PlaneBuffers, Rounding, TensorOperand
from zerocast.tensors.owned_shard import OwnScales
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.tp_shard import COLUMNS


@dataclass(frozen=True, slots=True)
class Amaxes:
    """The memory of the amaxes of one weight.

    Attributes:
        tensor: int32 [1], the tensor's amax; None for a weight that is not cast.
        blocks: by the name of each plane that is cast, int32: the amaxes of its blocks, or of those
            that this rank keeps.
        first_block: by the name of a plane, the number of the first block of these; a missing entry
            means 0.
    """

    tensor: torch.Tensor | None
    blocks: Mapping[str, torch.Tensor]
    first_block: Mapping[str, int]

    @classmethod
    def whole(cls, storage: QuantizedStorage, amax: torch.Tensor) -> Amaxes:
        """Return all amaxes of a weight in ``amax``, int32 [storage.amax_slots]."""
        return cls(amax[-1:], block_amaxes(storage, amax, amax[-1:]), {})


NO_AMAXES = Amaxes(None, {}, {})
"""The amaxes of a weight that is not cast."""


def tensor_operand(
    storage: QuantizedStorage,
    slot: int = 0,
    extent: Extent = NOTHING,
    amaxes: Amaxes = NO_AMAXES,
    *,
    own_codes: Mapping[str, torch.Tensor] | None = None,
    candidates: FourOverSixErrors | None = None,
    advances: bool = True,
    judges_amaxes: bool = False,
) -> TensorOperand:
    """Return the operand of a weight, without the plane that is cast from the transposed tensor.

    Args:
        storage: the weight's bytes.
        slot: the index of the master in :class:`Masters`.
        extent: the elements that the master holds.
        amaxes: the amaxes of a weight that is cast.
        own_codes: by buffer name, a buffer that receives the shard's codes instead, from the byte
            on in which the extent starts.
        candidates: the candidates of a weight whose blocks choose their scales.
        advances: whether the state of delayed scaling advances with the cast.
        judges_amaxes: whether the tensor's amax is needed even if no scale depends on it.
    """
    recipe, buffers = storage.recipe, storage.buffers
    codes = {**buffers, **(own_codes or {})}
    planes = tuple(
        PlaneBuffers(
            plane,
            amaxes.blocks.get(_amaxes_of(plane)),
            codes.get(plane.codes_name),
            buffers.get(plane.scales_name),
            amaxes.first_block.get(_amaxes_of(plane), 0),
        )
        for plane in storage.planes
        if plane.source is not Source.TRANSPOSED_MASTER
    )
    delayed, codes_start = recipe.delayed_state(buffers), 0
    if own_codes:
        per_byte = 8 // storage.form.numerics.fmt.bits
        codes_start = extent.start // per_byte * per_byte
    return TensorOperand(
        planes,
        slot,
        extent,
        recipe.round_to(storage.dtype),
        codes_start,
        amaxes.tensor if recipe.scales_tensor or judges_amaxes else None,
        buffers.get("amax") if advances or delayed is None else None,
        delayed,
        candidates,
        _rounding(storage, storage.planes[0]),
        advances or delayed is None,
    )


def scale_operand(operand: TensorOperand, own: Mapping[str, OwnScales]) -> TensorOperand:
    """Return the operand that makes scales if ranks gather some: by plane name those in ``own``.

    Of these planes this rank makes only its own scales. Scales that are derived from them are
    expanded after the gather.
    """
    if not own:
        return operand
    planes = [
        _compact(operand, each, own[each.plane.name]) if each.plane.name in own else each
        for each in operand.scaled_planes
        if each.plane.is_cast or "rowwise" not in own
    ]
    candidates = operand.candidates
    if candidates is not None and "rowwise" in own:
        first = own["rowwise"].blocks.start
        choices = candidates.choices[max(first - candidates.first_block, 0) :]
        candidates = replace(candidates, choices=choices, first_block=0)
    return replace(operand, planes=tuple(planes), candidates=candidates)


def _compact(operand: TensorOperand, buffers: PlaneBuffers, own: OwnScales) -> PlaneBuffers:
    """Return a plane of one row with this rank's scales, one per block.

    It has no ``scale_inv`` if the rank makes no scale.
    """
    assert buffers.block_amax is not None
    grid = BlockGrid(1, max(len(own.blocks), 1), 1, 1)
    plane = Plane(buffers.plane.name, buffers.plane.source, (1, 1), ScaleLayout(grid))
    if not own.blocks:
        return PlaneBuffers(plane, buffers.block_amax)
    first = own.blocks.start - buffers.first_block
    return PlaneBuffers(
        plane, buffers.block_amax[first : first + len(own.blocks)], scale_inv=own.entries
    )


def expand_operand(
    storage: QuantizedStorage, compact: Mapping[str, torch.Tensor]
) -> TensorOperand | None:
    """Return the operand that expands ``compact`` scales into a weight's stored scales, or None.

    ``compact`` has one scale per block, by the name of their plane. The result is None if the
    weight has no such plane.
    """
    planes = []
    for plane in storage.planes:
        scales, scale_inv = plane.scales, storage.buffers.get(plane.scales_name)
        if scale_inv is not None and _amaxes_of(plane) in compact:
            seen = replace(plane, scales=scales.of_transposed()) if plane.is_derived else plane
            made_from = compact[_amaxes_of(plane)]
            planes.append(PlaneBuffers(seen, scale_inv=scale_inv, compact=made_from))
    return TensorOperand(tuple(planes)) if planes else None


def _amaxes_of(plane: Plane) -> str:
    """Return the name of the plane whose amaxes a plane's scales are computed from."""
    return plane.name if plane.is_cast else "rowwise"


def transposed_operand(
    storage: QuantizedStorage, plane: Plane, slot: int, amax: torch.Tensor
) -> TensorOperand:
    """Return the operand that casts the transposed tensor, the master at ``slot``, into ``plane``.

    Its rows are whole bytes.
    """
    buffers, whole = storage.buffers, plane.in_whole_bytes(storage.form.numerics.fmt.bits)
    amaxes = block_amaxes(storage, amax, amax[-1:])
    given = amaxes[plane.name], buffers[plane.codes_name], buffers[plane.scales_name]
    return TensorOperand(
        (PlaneBuffers(whole, *given),),
        slot,
        Extent(0, whole.grid.numel),
        storage.recipe.round_to(storage.dtype),
        tensor_amax=amax[-1:] if storage.recipe.scales_tensor else None,
        rounding=_rounding(storage, whole),
        advances=False,  # as the tensor itself does
    )


def decoded_operand(storage: QuantizedStorage, plane: Plane, values: torch.Tensor) -> TensorOperand:
    """Return the operand that decodes the codes of ``plane`` into ``values``, FP32."""
    rowwise, buffers = storage.planes[0], storage.buffers
    codes = buffers[plane.codes_name if plane.stores_codes else rowwise.codes_name]
    scale_inv = buffers[plane.scales_name if plane.stores_scales else rowwise.scales_name]
    given = PlaneBuffers(plane, codes=codes, scale_inv=scale_inv)
    return TensorOperand((given,), amax=buffers.get("amax"), values=values)


def block_amaxes(
    storage: QuantizedStorage, amax: torch.Tensor, tensor_amax: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Split ``amax``, int32 [storage.amax_slots], by the name of each plane that is cast."""
    if storage.recipe.has_one_block:
        return {"rowwise": tensor_amax}
    planes = storage.cast_planes
    blocks = [plane.grid.num_blocks for plane in planes]
    amaxes = amax[: sum(blocks)].split(blocks)
    return {plane.name: each for plane, each in zip(planes, amaxes, strict=True)}


def _rounding(storage: QuantizedStorage, plane: Plane) -> Rounding | None:
    """Return the source of the random bits for a cast into ``plane``, or None."""
    recipe, tp_shard = storage.recipe, storage.tp_shard
    rounding = recipe.rounding(storage.buffers)
    if rounding is None or tp_shard is None:
        return rounding
    rows, cols = tp_shard.matrix
    whole = round_up(rows, 8 // recipe.numerics.fmt.bits) if plane.is_transposed else cols
    cuts_columns = plane.grid_dim(tp_shard.dim) == COLUMNS
    origin = tp_shard.start if cuts_columns else tp_shard.start * whole
    return replace(rounding, origin=origin, skip=whole - plane.grid.cols)
