"""Finds the rows of blocks that a shard holds whole: a scheme whose scales belong to blocks alone
measures and casts those in one read of the master.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerocast.layout.block_grid import BlockGrid
from zerocast.layout.extent import NOTHING, Extent

LARGEST_TILE = 1 << 16
"""The most elements of a rectangle of whole blocks that is read from memory once. It is read again
from a cache, which holds 256 KiB.
"""


def whole_rows(grids: Sequence[BlockGrid], extent: Extent) -> Extent:
    """Return the elements in whole rows of blocks inside ``extent``, of all ``grids`` of a matrix.

    :data:`NOTHING` if there are none, and if a rectangle of whole blocks of all grids is too large
    to be read once, for example where blocks are rows in one grid and columns in another.
    """
    height = math.lcm(*(grid.block_h for grid in grids))
    if not extent or height * math.lcm(*(grid.block_w for grid in grids)) > LARGEST_TILE:
        return NOTHING
    row, numel = height * grids[0].cols, grids[0].numel
    start = -(-extent.start // row) * row
    end = extent.end if extent.end == numel else extent.end // row * row
    return Extent(start, end) if start < end else NOTHING
