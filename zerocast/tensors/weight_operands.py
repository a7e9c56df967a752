"""The operands of a weight's cast, transpose and decoding: its buffers and planes, as backends take
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from zerocast.layout import NOTHING, Extent, Plane, Source, round_up
from zerocast.numerics import FourOverSixErrors, PlaneBuffers, Rounding, TensorOperand
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.tp_shard import COLUMNS


def tensor_operand(
    storage: QuantizedStorage,
    slot: int = 0,
    extent: Extent = NOTHING,
    amax: torch.Tensor | None = None,
    *,
    shared_amax: torch.Tensor | None = None,
    own_codes: Mapping[str, torch.Tensor] | None = None,
    candidates: FourOverSixErrors | None = None,
    advances: bool = True,
) -> TensorOperand:
    """A weight, without what is cast from the transposed tensor.

    Args:
        storage: the weight's bytes.
        slot: the place of the master in :class:`Masters`.
        extent: the elements that it holds.
        amax: int32 [storage.amax_slots], of a weight that is cast.
        shared_amax: int32 [1], the tensor's amax where weights share it; None for the last of
            ``amax``.
        own_codes: by name of a buffer, one that receives the shard's codes in its place, from the
            byte on in which the extent starts.
        candidates: of a weight whose blocks choose their scales.
        advances: whether delayed scaling moves on with the cast.
    """
    recipe, buffers = storage.recipe, storage.buffers
    codes, amaxes = {**buffers, **(own_codes or {})}, {}
    if amax is not None:
        shared_amax = amax[-1:] if shared_amax is None else shared_amax
        amaxes = block_amaxes(storage, amax, shared_amax)
    planes = tuple(
        PlaneBuffers(
            plane,
            amaxes.get(plane.name if plane.is_cast else "rowwise"),
            codes.get(plane.codes_name),
            buffers.get(plane.scales_name),
        )
        for plane in storage.planes
        if plane.source is not Source.TRANSPOSED_MASTER
    )
    delayed, codes_start = recipe.delayed_state(buffers), 0
    if own_codes:
        per_byte = 8 // recipe.numerics.fmt.bits
        codes_start = extent.start // per_byte * per_byte
    return TensorOperand(
        planes,
        slot,
        extent,
        recipe.round_to(storage.dtype),
        codes_start,
        shared_amax,
        buffers.get("amax") if advances or delayed is None else None,
        delayed,
        candidates,
        _rounding(storage, storage.planes[0]),
        advances or delayed is None,
    )


def transposed_operand(
    storage: QuantizedStorage, plane: Plane, slot: int, amax: torch.Tensor
) -> TensorOperand:
    """The transposed tensor, whose master is at ``slot``: what is cast into ``plane``. Its rows are
    whole bytes.
    """
    buffers, whole = storage.buffers, plane.in_whole_bytes(storage.recipe.numerics.fmt.bits)
    amaxes = block_amaxes(storage, amax, amax[-1:])
    given = amaxes[plane.name], buffers[plane.codes_name], buffers[plane.scales_name]
    return TensorOperand(
        (PlaneBuffers(whole, *given),),
        slot,
        Extent(0, whole.grid.numel),
        storage.recipe.round_to(storage.dtype),
        tensor_amax=amax[-1:],
        rounding=_rounding(storage, whole),
        advances=False,  # as the tensor itself does
    )


def decoded_operand(storage: QuantizedStorage, plane: Plane, values: torch.Tensor) -> TensorOperand:
    """The codes of ``plane``, and the FP32 tensor of the matrix of its grid that receives their
    values.
    """
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
    """Say where the random bits of what is cast into ``plane`` come from."""
    recipe, tp_shard = storage.recipe, storage.tp_shard
    rounding = recipe.rounding(storage.buffers)
    if rounding is None or tp_shard is None:
        return rounding
    rows, cols = tp_shard.matrix
    whole = round_up(rows, 8 // recipe.numerics.fmt.bits) if plane.is_transposed else cols
    cuts_columns = plane.grid_dim(tp_shard.dim) == COLUMNS
    origin = tp_shard.start if cuts_columns else tp_shard.start * whole
    return replace(rounding, origin=origin, skip=whole - plane.grid.cols)
