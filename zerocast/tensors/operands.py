"""The operands of a weight's cast, transpose and decoding: its buffers and planes, as backends take
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from zerocast.layout import BlockGrid, Extent, Plane, Source, round_up
from zerocast.ops import (
    Candidates,
    CastShard,
    ColumnwiseScales,
    ColumnwiseShard,
    DequantizeTarget,
    Rounding,
    ScaleTarget,
    SelectTarget,
    TransposeTarget,
)
from zerocast.tensors.part import COLUMNS
from zerocast.tensors.storage import QuantizedStorage


def cast_grid(storage: QuantizedStorage, plane: Plane) -> BlockGrid:
    """The blocks of what is cast into ``plane``. Its rows are whole bytes: of the transposed tensor
    an odd row of 4-bit codes ends with one zero more.
    """
    return replace(plane.grid, cols=round_up(plane.grid.cols, 8 // storage.recipe.law.fmt.bits))


@dataclass(frozen=True, slots=True)
class CastOperand:
    """What this rank casts of one weight, and where from and to.

    Attributes:
        storage: the weight's bytes.
        slot: the place of the master in :class:`Masters`.
        extent: the elements that it holds.
        amax: int32 [storage.amax_slots].
        shared_amax: int32 [1], the tensor's amax where weights share it; None for the last of
            ``amax``.
        codes, columnwise_codes: flat buffers that receive the shard's codes instead of the weight's
            own.
        codes_start: the element at which these buffers start.
        candidates: of a weight whose blocks choose their scales.
        transposed_slot: the place of the transposed master, where there is one.
    """

    storage: QuantizedStorage
    slot: int
    extent: Extent
    amax: torch.Tensor
    shared_amax: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    columnwise_codes: torch.Tensor | None = None
    codes_start: int = 0
    candidates: Candidates | None = None
    transposed_slot: int | None = None

    @property
    def tensor_amax(self) -> torch.Tensor:
        """int32 [1]."""
        return self.amax[-1:] if self.shared_amax is None else self.shared_amax

    @property
    def block_amaxes(self) -> list[torch.Tensor]:
        """Those of each plane that is cast, int32 [its blocks]."""
        if self.storage.recipe.has_one_block:
            return [self.tensor_amax]
        blocks = [plane.grid.num_blocks for plane in self.storage.cast_planes]
        return list(self.amax[: sum(blocks)].split(blocks))

    def shards(self) -> list[CastShard]:
        """The operands of amax and cast: one, or two where the transposed tensor is cast, too."""
        storage, amaxes = self.storage, self.block_amaxes
        recipe, buffers = storage.recipe, storage.buffers
        rowwise, *second = storage.cast_planes
        columnwise, transposed = None, []
        for plane in second:
            grid = cast_grid(storage, plane)
            if plane.is_gathered:
                codes = self.columnwise_codes
                if codes is None:
                    codes = buffers[plane.codes_name].view(-1)
                columnwise = ColumnwiseShard(grid, amaxes[1], codes)
            elif self.transposed_slot is not None:
                shard = CastShard(
                    self.transposed_slot,
                    Extent(0, grid.numel),
                    grid,
                    recipe.round_to(storage.dtype),
                    amaxes[1],
                    self.tensor_amax,
                    buffers[plane.codes_name].view(-1),
                    rounding=_rounding(storage, plane),
                )
                transposed.append(shard)
        shard = CastShard(
            self.slot,
            self.extent,
            rowwise.grid,
            recipe.round_to(storage.dtype),
            amaxes[0],
            self.tensor_amax,
            buffers[rowwise.codes_name].view(-1) if self.codes is None else self.codes,
            self.codes_start,
            columnwise,
            recipe.delayed_state(buffers),
            self.candidates,
            _rounding(storage, rowwise),
        )
        return [shard, *transposed]

    def scale_targets(self) -> list[ScaleTarget]:
        """The weight's scales, as many operands as :meth:`shards` gives."""
        storage, amaxes = self.storage, self.block_amaxes
        recipe, buffers = storage.recipe, storage.buffers
        rowwise, *second = storage.planes
        columnwise, transposed = None, []
        for plane in second:
            if plane.is_derived:
                continue
            block_amax, scale_inv = amaxes[plane.is_cast], buffers[plane.scales_name]
            if plane.source is Source.TRANSPOSED_MASTER:
                target = ScaleTarget(plane.scales, block_amax, self.tensor_amax, scale_inv)
                transposed.append(target)
            else:
                columnwise = ColumnwiseScales(plane.scales, block_amax, scale_inv)
        target = ScaleTarget(
            rowwise.scales,
            amaxes[0],
            self.tensor_amax,
            buffers[rowwise.scales_name],
            buffers.get("amax"),
            columnwise,
            recipe.delayed_state(buffers),
            self.candidates,
            recipe.rounding(buffers),
        )
        return [target, *transposed]

    def select_target(self) -> SelectTarget:
        """The choice of scales, of a weight with candidates."""
        assert self.candidates is not None
        grid, amaxes = self.storage.grid, self.block_amaxes
        return SelectTarget(grid, amaxes[0], self.tensor_amax, self.candidates)


def _rounding(storage: QuantizedStorage, plane: Plane) -> Rounding | None:
    """Where the random words of what is cast into ``plane`` come from."""
    recipe, part = storage.recipe, storage.part
    rounding = recipe.rounding(storage.buffers)
    if rounding is None or part is None:
        return rounding
    rows, cols = part.matrix
    whole = round_up(rows, 8 // recipe.law.fmt.bits) if plane.is_transposed else cols
    cuts_columns = plane.grid_dim(part.dim) == COLUMNS
    origin = part.start if cuts_columns else part.start * whole
    return replace(rounding, origin=origin, skip=whole - cast_grid(storage, plane).cols)


def transpose_target(storage: QuantizedStorage) -> TransposeTarget:
    """The weight's codes and its derived columnwise copy."""
    (rowwise, columnwise), buffers = storage.planes, storage.buffers
    return TransposeTarget(
        storage.recipe.law.fmt,
        rowwise.scales,
        buffers[rowwise.codes_name],
        buffers[rowwise.scales_name],
        columnwise.scales,
        buffers[columnwise.codes_name],
        buffers.get(columnwise.scales_name),
    )


def dequantize_target(
    storage: QuantizedStorage, plane: Plane, out: torch.Tensor
) -> DequantizeTarget:
    """The codes of ``plane``, and the FP32 tensor of the matrix of its grid that receives their
    values.
    """
    rowwise, buffers = storage.planes[0], storage.buffers
    return DequantizeTarget(
        plane.scales,
        buffers[plane.codes_name if plane.stores_codes else rowwise.codes_name],
        buffers[plane.scales_name if plane.stores_scales else rowwise.scales_name],
        buffers.get("amax"),
        out,
    )
