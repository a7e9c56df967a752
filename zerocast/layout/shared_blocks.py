"""CutBlocks and SharedBlocks: the blocks, and the rows inside blocks, that boundaries between
shards cut.

The amax of a block of which several ranks own elements is reduced before a cast, and a scheme whose
blocks choose between two scales exchanges their errors. This module finds these blocks from who
owns what, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from zerocast.layout.block_grid import BlockGrid
from zerocast.layout.extent import Extent
from zerocast.layout.owners import Owners


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """The rows of blocks, and rows inside blocks, of one weight of which several ranks own
    elements.

    Attributes:
        rows: the rows of blocks that are cut, ascending. (Blocks of such a row that one rank owns
            alone are counted in: rows of blocks are counted whole.)
        segments: the flat indices of the first elements of the rows of blocks' rows, ``block_w``
            elements inside one block, that are cut; ascending.
    """

    rows: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()

    @classmethod
    def of(cls, grid: BlockGrid, extents: Iterable[Extent]) -> SharedBlocks:
        """Return the cuts that the shards ``extents``, which cover the weight, make."""
        bounds = {bound for e in extents if e for bound in (e.start, e.end)} - {grid.numel}
        rows = {bound // grid.cols // grid.block_h for bound in bounds
                if bound % (grid.cols * grid.block_h)}  # fmt: skip
        segments = {bound - bound % grid.cols % grid.block_w for bound in bounds
                    if bound % grid.cols % grid.block_w}  # fmt: skip
        return cls(tuple(sorted(rows)), tuple(sorted(segments)))


class CutBlocks:
    """The blocks that boundaries between ranks cut, and their entries in what the ranks reduce.

    Entries are ordered plane after plane, block after block.

    A boundary between two shards cuts adjacent blocks, so they are kept as ranges, one a boundary.

    Args:
        planes: for each plane the place of its weight among those of ``owners``, and its blocks.
        owners: the owners of the weights.

    Attributes:
        count: the number of blocks that are cut, on all ranks together.
    """

    def __init__(self, planes: Sequence[tuple[int, BlockGrid]], owners: Owners) -> None:
        fields = [(w, g.rows, g.cols, g.block_h, g.block_w, g.blocks_w, g.num_blocks)
                  for w, g in planes]  # fmt: skip
        table = torch.tensor(fields, dtype=torch.int64, device="cpu").view(len(planes), 7)
        # The blocks of all planes are numbered on from one to the next.
        self._firsts = table[:, 6].cumsum(0) - table[:, 6]
        boundaries = (owners.first_of.diff()[table[:, 0]] - 1).clamp(min=0)
        plane = _repeated(boundaries)
        # The shard that begins at each boundary.
        shard = owners.first_of[table[plane, 0]] + 1 + _counted(boundaries)
        self._left, self._right = owners.rank[shard - 1], owners.rank[shard]
        start, end = cut_by(owners.start[shard], *table[plane, 1:6].unbind(1))
        first = self._firsts[plane]
        self._start, self._end = first + start, first + end
        # Of the blocks that several boundaries cut, the first one has the entries: ends ascend.
        reached = self._end.roll(1)
        reached[:1] = 0
        begin = torch.maximum(self._start, reached)
        counts = self._end - begin
        entries = counts.cumsum(0) - counts
        self._begin, self._entry = begin[counts > 0], entries[counts > 0]
        self.count = int(counts.sum())

    def of_rank(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the blocks that the boundaries of ``rank``'s shards cut, int64 [blocks] on the CPU
        each: the place of the plane, the block's number in it, and its entry.
        """
        mine = (self._left == rank) | (self._right == rank)
        counts = (self._end - self._start)[mine]
        blocks = (self._start[mine][_repeated(counts)] + _counted(counts)).unique()
        plane = torch.searchsorted(self._firsts, blocks, right=True) - 1
        cut = torch.searchsorted(self._begin, blocks, right=True) - 1
        entry = self._entry[cut] + blocks - self._begin[cut]
        return plane, blocks - self._firsts[plane], entry


def cut_by(
    element: torch.Tensor, rows: torch.Tensor, cols: torch.Tensor, block_h: torch.Tensor,
    block_w: torch.Tensor, blocks_w: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the blocks ``[start, end)`` that have elements before ``element``, and others from it
    on.
    """
    row, col = element // cols, element % cols
    above = row % block_h  # rows of the same blocks
    is_last = (above == block_h - 1) | (row == rows - 1)
    # In the first row of a block only blocks left of the boundary have elements before it, in the
    # last row only blocks right of it have elements after it; in between every block has both.
    start = torch.where(is_last, col // block_w, 0)
    end = torch.where(above == 0, -(-col // block_w), blocks_w)
    first = row // block_h * blocks_w
    return first + start, first + end


def _repeated(counts: torch.Tensor) -> torch.Tensor:
    """Return the index of each count, repeated that many times."""
    return torch.arange(len(counts), dtype=torch.int64, device="cpu").repeat_interleave(counts)


def _counted(counts: torch.Tensor) -> torch.Tensor:
    """Return the numbers from 0 to below each count, one count after the other."""
    total = torch.arange(int(counts.sum()), dtype=torch.int64, device="cpu")
    return total - (counts.cumsum(0) - counts)[_repeated(counts)]
