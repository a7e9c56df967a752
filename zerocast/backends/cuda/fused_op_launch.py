"""Launches the kernel that computes a fused operation on CUDA. Its only argument is ``FusedTable``
of ``fused_op.h``, passed by value: no table is sent to the device.
"""

from __future__ import annotations

from zerocast.backends.cuda.launcher import Kernel, KernelArguments, Launcher
from zerocast.backends.fused_op_rows import fused_row
from zerocast.backends.launches import nothing
from zerocast.backends.tables import Address
from zerocast.layout import ceil_div
from zerocast.numerics import FusedOperand, Launch

THREADS, WARPS, PIECE = 128, 4, 512
"""Threads and warps of a block, and the columns of a row that a warp computes at a time; it takes a
whole row of a norm."""


def fused_op(launcher: Launcher, address: Address, target: FusedOperand) -> Launch:
    """Return the launch of :meth:`zerocast.numerics.Backend.fused_op`."""
    rows, cols = target.output.shape
    if rows == 0:
        return nothing
    is_norm = target.op.is_norm
    kernel = Kernel("fused_op", THREADS, ("true" if is_norm else "false",))
    handle = launcher.prepare(kernel)
    units = rows if is_norm else rows * ceil_div(cols, PIECE)
    grid = min(ceil_div(units, WARPS), launcher.max_grid)
    arguments = KernelArguments([], fused_row(target, address), alive=target)
    return lambda: launcher.launch(kernel, handle, grid, arguments)
