"""Run a program with a wrong scale planted in every cast: a fault to be found.

    mpirun -n 4 python -m mpi4py scripts/with_wrong_scale.py examples/train_gpt.py --check

Amaxes are 2^20 times too large once ranks have reduced them, those of blocks that a rank keeps to
itself, too. So scales are: codes that wait for them round to zero, and those of blocks that were
cast as they were measured stand for values as much too large. Ranks still agree with each other. A
smaller fault would not do for a check of the loss: training
makes up for a factor of 4 on one rank, say. The comparison of bytes finds any.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from zerocast.cast.amax_buffers import STEP_WORDS
from zerocast.cast.exchange import Exchange
from zerocast.errors import ZerocastError

FACTOR = 20 << 23
"""2^20 in the exponent of the FP32 values whose bits an amax buffer holds."""


def plant() -> None:
    """Let amaxes be wrong once they are reduced."""
    reduce_amax = Exchange.reduce_amax

    def reduce_wrongly(self: Exchange, step: int = 0, error: ZerocastError | None = None) -> None:
        reduce_amax(self, step, error)
        reduced = [entries[:-STEP_WORDS] for entries in self.buffers.of_group.values()]
        for amaxes in (*reduced, self.buffers._kept):
            amaxes[amaxes > 0] += FACTOR

    Exchange.reduce_amax = reduce_wrongly  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as if the program had been started itself
    plant()
    runpy.run_path(sys.argv[0], run_name="__main__")
