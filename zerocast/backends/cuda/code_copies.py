"""Copies codes between weights and the buffer that is sent, on CUDA, by one launch in each
direction for any number of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerocast.backends.cuda import tiling
from zerocast.backends.cuda.cuts import Cuts
from zerocast.backends.cuda.launcher import Kernel
from zerocast.backends.cuda.prepared import Tables
from zerocast.backends.tables import Address
from zerocast.numerics import CodeCopy, LaunchOn, SharedByte

THREADS = 128
"""Threads of a block."""

COPIED = 1, 1 << 14
"""The rows and bytes of a tile."""

KEPT = -1
"""Stands for a nibble that keeps its value."""


def copy_codes(
    tables: Tables,
    address: Address,
    copies: Sequence[CodeCopy],
    shared: Sequence[SharedByte] = (),
    *,
    into_weights: bool,
) -> LaunchOn:
    """Return the launch of :meth:`zerocast.numerics.Backend.stage_codes`, or ``store_codes``."""
    rows = [[address(copy.codes), copy.staged, len(copy.codes), 0] for copy in copies]
    sizes = [row[2] for row in rows]
    for byte in shared:
        low, high = (KEPT if place is None else place for place in (byte.low, byte.high))
        rows.append([address(byte.codes), low, 0, high])
        sizes.append(1)
    cuts = Cuts.of(((tiling.plane_tiles, 0, (1, size), COPIED),) for size in sizes)
    kernel = Kernel("copy_codes", THREADS, ("true" if into_weights else "false",))
    return tables.launch(kernel, rows, cuts, [], (copies, shared), buffers=1)
