"""Computes positions as integers: ranges of elements, blocks and their scales, flat buffers over
ranks.
"""

from zerocast.layout.block_grid import BlockGrid, ScaleLayout, ceil_div, round_up
from zerocast.layout.extent import NOTHING, Extent, chunk
from zerocast.layout.flat_layout import FlatLayout, check_partition
from zerocast.layout.owners import Owners
from zerocast.layout.plane import FULL, ONE_BLOCK, Block, Plane, Source, grid_of
from zerocast.layout.shared_blocks import CutBlocks, SharedBlocks
from zerocast.layout.whole_rows import whole_rows
