"""ScaleShards: the scales of a weight, one a block, over the ranks that FSDP2 gathers it from.

They are compact on a rank, and become what a weight stores (repeated, padded, columnwise) in the
gathered weight alone, which FSDP2 frees. The scale of a block is made by the rank that has the
block's first element, and is sent beside the codes. FSDP2 gathers equal parts, so every rank sends
as many as the first one, which has most.

The scales of two kinds of planes are made by every rank, and none is sent: where blocks reach
across tensor-parallel shards, and where a block has more rows than a rank. Ranks cut such blocks,
so their amaxes reach all ranks in any case, and parts of equal size would be sent for blocks that
few ranks own: for columns that have one scale each (row-wise FP8) one for each column and rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zerocast.layout import Extent, Plane, ceil_div, round_up
from zerocast.recipes import Recipe
from zerocast.sharded.row_shards import RowShards
from zerocast.tensors import TensorParallelShard
from zerocast.tensors.weight_operands import OwnScales

_ALIGNMENT = 16
"""Bytes: what a kernel stores at once."""


@dataclass(frozen=True, slots=True)
class _SentPlane:
    """The scales of one plane, in the units that ranks make: of a matrix a row of blocks, of a
    stack the matrices of one entry of its first dimension, which is its row here.

    Attributes:
        height: rows in a unit.
        blocks: in a unit.
        start: the byte at which they begin in what a rank sends.
    """

    height: int
    blocks: int
    start: int

    def units_before(self, row: int) -> int:
        """Return how many units begin before ``row``."""
        return ceil_div(row, self.height)


class ScaleShards:
    """The scales of one weight, or tensor-parallel shard.

    Args:
        rows: who has which rows.
        recipe: the scheme.
        columnwise: whether the weight has a columnwise plane.
        tp_shard: the part of a larger weight that it is.

    Attributes:
        planes: the planes whose scales are compact, by name: all with amaxes, but of a weight with
            one scale or without elements.
        sent_bytes: the bytes that each rank sends; 0 where every rank makes all scales.
    """

    def __init__(
        self,
        rows: RowShards,
        recipe: Recipe,
        *,
        columnwise: bool,
        tp_shard: TensorParallelShard | None,
    ) -> None:
        self._ranks, self._dtype = rows.world_size, recipe.numerics.scale_dtype
        stack = recipe.stack_of(rows.shape)
        self.matrices = stack.numel()
        # In rows of the matrix; of a stack in those of its first dimension.
        each = 1 if stack else rows.shape[1:-1].numel()
        self._count, self._of_rank = rows.shape[0] * each, rows.rows * each
        self.planes: dict[str, Plane] = {}
        self._sent: dict[str, _SentPlane] = {}
        size = 0
        for plane in recipe.planes(rows.shape, columnwise=columnwise):
            if not plane.is_cast or recipe.has_one_block or not rows.shape.numel():
                continue
            self.planes[plane.name] = plane
            height, blocks = plane.grid.block_h, plane.grid.blocks_w
            if stack:
                height, blocks = 1, stack[1:].numel() * plane.grid.num_blocks
            spans = tp_shard is not None and tp_shard.is_spanned_by(plane, recipe)
            if rows.world_size > 1 and height <= self._of_rank and not spans:
                start = round_up(size, _ALIGNMENT)
                sent = self._sent[plane.name] = _SentPlane(height, blocks, start)
                size = start + sent.units_before(self._of_rank) * blocks * self._dtype.itemsize
        self.sent_bytes = rows.padded_bytes(size)
        self._places: dict[str, torch.Tensor] = {}

    @property
    def by_owner(self) -> frozenset[str]:
        """The names of the planes whose scales are sent."""
        return frozenset(self._sent)

    @property
    def reduced_amaxes(self) -> int:
        """The number of amaxes of blocks that ranks reduce before a cast: those of blocks that they
        cut, and of planes whose scales every rank makes.
        """
        count = 0
        for name, plane in self.planes.items():
            if name not in self._sent:
                count += self.matrices * plane.grid.num_blocks
            elif (sent := self._sent[name]).height > 1:
                starts = range(0, self._count, self._of_rank)
                cut = {row // sent.height for row in starts if row % sent.height}
                count += len(cut) * sent.blocks
        return count

    # --- before the all-gather ---

    def allocate_made(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return room for the scales that every rank makes, by plane [matrices, blocks]."""
        return {
            name: torch.zeros(
                self.matrices, plane.grid.num_blocks, dtype=self._dtype, device=device
            )
            for name, plane in self.planes.items()
            if name not in self._sent
        }

    def own(
        self, sent: torch.Tensor, made: Mapping[str, torch.Tensor], rank: int
    ) -> list[dict[str, OwnScales]]:
        """Return, by matrix and plane, where the scales lie that ``rank`` makes: in ``sent``, uint8
        [sent_bytes], and ``made``.
        """
        if not self.planes:
            return []
        bounds = [min(self._of_rank * each, self._count) for each in (rank, rank + 1)]
        own: list[dict[str, OwnScales]] = []
        for i in range(self.matrices):
            of_matrix = {}
            for name, plane in self.planes.items():
                count = plane.grid.num_blocks
                if name in made:
                    of_matrix[name] = OwnScales(range(count), made[name][i])
                    continue
                each = self._sent[name]
                first, last = (each.units_before(row) * each.blocks for row in bounds)
                entries = self._entries(sent[each.start :], last - first)
                mine = Extent(first, last).intersect(Extent(i * count, (i + 1) * count))
                of_matrix[name] = OwnScales(
                    range(mine.start - i * count, mine.end - i * count) if mine else range(0),
                    entries[mine.start - first : mine.end - first] if mine else entries[:0],
                )
            own.append(of_matrix)
        return own

    def _entries(self, codes: torch.Tensor, count: int) -> torch.Tensor:
        return codes[: count * self._dtype.itemsize].view(self._dtype)

    # --- after the all-gather ---

    def whole(
        self, gathered: torch.Tensor | None, made: Mapping[str, torch.Tensor]
    ) -> dict[int, dict[str, torch.Tensor]]:
        """Return, by matrix and plane, the scales of all blocks, from what ranks sent, uint8
        [ranks * sent_bytes] if they did, and from what this one ``made``.
        """
        found = dict(made)
        for name, sent in self._sent.items():
            assert gathered is not None
            nbytes = sent.blocks * self._dtype.itemsize
            size = sent.units_before(self._of_rank) * nbytes
            parts = gathered.view(self._ranks, -1)[:, sent.start : sent.start + size]
            units = parts.reshape(-1, nbytes)
            if self._of_rank % sent.height:
                units = units.index_select(0, self._places_of(name, units.device))
            total = sent.units_before(self._count)
            scales = units[:total].reshape(-1).contiguous().view(self._dtype)
            found[name] = scales.view(self.matrices, -1)
        return {i: {name: each[i] for name, each in found.items()} for i in range(self.matrices)}

    def _places_of(self, name: str, device: torch.device) -> torch.Tensor:
        """Return, by unit of a plane, its place among what was gathered, int64."""
        if name not in self._places:
            sent, rows = self._sent[name], self._of_rank
            unit = torch.arange(sent.units_before(self._count), dtype=torch.int64, device=device)
            rank = unit * sent.height // rows
            first = -(rank * rows // -sent.height)  # the rank's first unit
            self._places[name] = rank * sent.units_before(rows) + unit - first
        return self._places[name]
