"""MPI ranks gather large parts twice, with a timeout of 1 s; the second time rank 1 does something
else, which is this program's argument. Every rank prints what came of it, at the latest in the
collective that follows.
"""

import sys
import time

import torch

from zerocast.comm import MpiCommunicator, mpi, mpi_peers
from zerocast.comm.communicator import PartCopies

FAULT = sys.argv[1]


class Reader(PartCopies):
    """Fails on rank 1 at its fifth piece, where that is the fault."""

    pieces = 0

    def copy(self, rank: int, theirs: torch.Tensor) -> None:
        raise AssertionError("MPI has no other rank's buffer")

    def arrived(self, begin: int, end: int) -> None:
        self.pieces += 1
        if FAULT == "fails to read" and comm.rank == 1 and self.pieces == 5:
            raise MemoryError("planted")


mpi._PIECE = 1 << 16
if FAULT != "is late":  # else the job is to last until it has come
    mpi_peers._LAST = 0.5
comm = MpiCommunicator(timeout=1.0)
assert comm.maxima([comm.rank]) == [comm.size - 1]
buffer = torch.zeros(comm.size << 20, dtype=torch.uint8)
reader = Reader()
if FAULT != "fails to read":
    comm.start_all_gather_by(buffer, None, reader)()
    assert reader.pieces == 16 * (comm.size - 1)
said = "nothing"
try:
    if comm.rank == 1 and FAULT == "raises":
        raise OSError("planted")
    if comm.rank == 1 and FAULT == "is late":
        time.sleep(1.5)
    if comm.rank == 1 and FAULT == "gathers less":
        buffer = buffer[: -comm.size].clone()
    comm.start_all_gather_by(buffer, None, reader)()
    comm.barrier()
except Exception as error:
    comm.announce(error)
    said = f"{type(error).__name__}: {error}"
sys.stdout.write(f"rank {comm.rank} saw {said}\n")  # at once, as ranks share it
sys.stdout.flush()
