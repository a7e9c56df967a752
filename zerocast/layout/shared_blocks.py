"""SharedBlocks: which blocks, and which rows inside blocks, the boundaries between shards cut.

A scheme whose blocks choose between two scales needs to know which blocks more than one rank owns;
that is decided here, from who owns what, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerocast.layout.block_grid import BlockGrid
from zerocast.layout.extent import Extent


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """The places of one weight that more than one rank owns.

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
        """The cuts that the shards ``extents``, which cover the weight, make."""
        bounds = {bound for e in extents if e for bound in (e.start, e.end)} - {0, grid.numel}
        rows = {bound // grid.cols // grid.block_h for bound in bounds
                if bound % (grid.cols * grid.block_h)}  # fmt: skip
        segments = {bound - bound % grid.cols % grid.block_w for bound in bounds
                    if bound % grid.cols % grid.block_w}  # fmt: skip
        return cls(tuple(sorted(rows)), tuple(sorted(segments)))
