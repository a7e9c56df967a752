"""OwnedShard: what one rank holds of a weight between its cast and the gather that makes it whole.

The codes are those of the rank's elements. There is one scale per block, without the repeats and
padding of stored planes and without the scales of derived copies: these are made in the whole
weight, after the gather (:func:`zerocast.tensors.post_gather.prepare_expansion`).

The scale of a block is made by the rank that owns the block's first element. First elements ascend
with block numbers, also from matrix to matrix of a stack. So a rank's blocks of one plane are one
range, and the scales of all ranks, ordered by elements, are those of the plane.
If the blocks of a plane span tensor-parallel shards, every rank makes all of its scales, because
every rank has their amaxes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from zerocast.layout import BlockGrid, Extent
from zerocast.numerics import byte_span
from zerocast.recipes import Form, Recipe
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.tp_shard import TensorParallelShard

NO_BUFFERS: Mapping[str, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class OwnScales:
    """The scales of one plane that this rank makes.

    Attributes:
        blocks: their numbers; for a stack counted over all matrices in order.
        entries: the numerics' ``scale_dtype`` [len(blocks)].
    """

    blocks: range
    entries: torch.Tensor

    def of_matrix(self, index: int, count: int) -> OwnScales:
        """Return the scales of one matrix of a stack, each of which has ``count`` blocks."""
        begin, start = index * count, self.blocks.start
        first, last = max(start, begin), min(self.blocks.stop, begin + count)
        if first >= last:
            return OwnScales(range(0), self.entries[:0])
        return OwnScales(
            range(first - begin, last - begin), self.entries[first - start : last - start]
        )


class OwnedShard(QuantizedStorage):
    """One rank's part of a weight, as a cast writes it.

    :attr:`buffers` are what every rank holds whole: the tensor amax, the recipe's state, and the
    scale of a weight with one scale. Use :meth:`allocate` to make one.

    Attributes:
        device: the device of all buffers.
        has_columnwise: whether columnwise codes are cast, too.
        has_scales: True, because scales need not be among the buffers.
        extent: the elements that this rank owns.
        own_codes: by gathered buffer uint8, the bytes that hold the codes of these elements.
        own_scales: by plane; empty for a weight that has one scale, or no elements.
        by_owner: the names of the planes, the same on every rank, of which a rank makes only the
            scales of the blocks that it owns. Of other planes it makes all scales.
    """

    device: torch.device = torch.device("cpu")
    has_columnwise: bool = False
    has_scales: bool = True
    extent: Extent
    own_codes: Mapping[str, torch.Tensor] = NO_BUFFERS
    own_scales: Mapping[str, OwnScales]
    by_owner: Collection[str]

    @classmethod
    def allocate(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        recipe: Recipe,
        device: torch.device,
        extent: Extent,
        *,
        columnwise: bool = False,
        tp_shard: TensorParallelShard | None = None,
        state: Mapping[str, torch.Tensor] = NO_BUFFERS,
        by_owner: Collection[str] | None = None,
        memory: Mapping[str, torch.Tensor] = NO_BUFFERS,
    ) -> OwnedShard:
        """Return an unfilled shard with codes 0.

        Args:
            shape, dtype, recipe, tp_shard: those of the whole weight, as for a storage.
            device, extent, by_owner: the attributes; by default all planes are by owner except
                those whose blocks span tensor-parallel shards.
            columnwise: whether the whole weight has a columnwise copy.
            state: the recipe's state; by default a new one.
            memory: by buffer name, uint8 memory that receives this rank's codes or scales from its
                first byte on; by default new memory.
        """

        def room(name: str, nbytes: int) -> torch.Tensor:
            if name in memory:
                return memory[name][:nbytes]
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)

        form = Form(recipe, shape, columnwise=columnwise)
        scaled, numerics = form.planes_by_block, form.numerics
        left_out = {plane.codes_name for plane in form.planes}
        left_out |= {plane.scales_name for plane in form.planes if scaled or plane.is_derived}
        buffers = {
            name: spec.allocate(device)
            for name, spec in form.buffers.items()
            if name not in left_out and name not in state
        }
        shard = cls(shape, dtype, recipe, {**buffers, **state}, tp_shard)
        shard.device, shard.has_columnwise = device, len(form.gathered) > 1
        if by_owner is None:
            by_owner = {plane.name for plane in scaled if not shard.spans_tp_shards(plane)}
        shard.extent, shard.by_owner = extent, by_owner
        first, last = byte_span(numerics.fmt, extent.start, extent.end)
        shard.own_codes = {name: room(name, last - first) for name in form.gathered}
        shard.own_scales = {}
        for plane in scaled:
            blocks = range(form.num_matrices * plane.grid.num_blocks)
            if plane.name in by_owner:
                blocks = owned_blocks(plane.grid, extent)
            entries = room(plane.scales_name, len(blocks) * numerics.scale_dtype.itemsize)
            shard.own_scales[plane.name] = OwnScales(blocks, entries.view(numerics.scale_dtype))
        return shard

    def matrix(self, index: int) -> OwnedShard:
        """Return matrix ``index`` of a stack, without codes."""
        found = super().matrix(index)
        matrix = OwnedShard(found.shape, found.dtype, found.recipe, found.buffers, found.tp_shard)
        matrix.device, matrix.has_columnwise = self.device, self.has_columnwise
        matrix.extent, matrix.by_owner = self.extent, self.by_owner
        matrix.own_scales = {
            plane.name: self.own_scales[plane.name].of_matrix(index, plane.grid.num_blocks)
            for plane in self.form.planes_by_block
        }
        return matrix


def owned_blocks(grid: BlockGrid, extent: Extent) -> range:
    """Return the blocks that begin in ``extent``, numbered over all matrices of a stack."""
    return range(blocks_before(grid, extent.start), blocks_before(grid, extent.end))


def blocks_before(grid: BlockGrid, element: int) -> int:
    """Return how many blocks, of all matrices of a stack, begin before ``element``."""
    matrix, in_matrix = divmod(element, grid.numel)
    return matrix * grid.num_blocks + grid.blocks_before(in_matrix)
