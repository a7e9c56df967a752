"""Ranks copy large parts from each other's memory twice, with a timeout of 1 s; the second time
rank 1 does something else. Every rank prints what came of it, at the latest in the collective that
follows; first of torch.distributed, then of MPI. Arguments: what rank 1 does, and a file for a
store of torch's.
"""

import sys
import time

import torch
import torch.distributed as dist
from mpi4py import MPI

from zerocast.comm import (
    Communicator,
    MpiCommunicator,
    TorchDistributedCommunicator,
    mpi_peers,
    processes,
)
from zerocast.comm.peer_memory import PeerBuffer, read

FAULT, STORE = sys.argv[1:]
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
parts = 0


def faulty_read(peer: PeerBuffer, start: int, into: torch.Tensor) -> None:
    """Fail on rank 1 at its second part of the second gather, where that is the fault."""
    global parts
    parts += 1
    if FAULT == "fails to copy" and RANK == 1 and parts == 4:
        raise MemoryError("planted")
    read(peer, start, into)


def gather_twice(kind: str, comm: Communicator) -> None:
    """The second time with the fault; print what came of it."""
    global parts
    parts = 0
    assert comm.maxima([RANK]) == [SIZE - 1]
    buffer = torch.zeros(SIZE << 20, dtype=torch.uint8)
    comm.all_gather_(buffer)
    assert parts == SIZE - 1
    said = "nothing"
    try:
        if RANK == 1 and FAULT == "raises":
            raise OSError("planted")
        if RANK == 1 and FAULT == "is late":
            time.sleep(1.5)
        if RANK == 1 and FAULT == "gathers less":
            buffer = buffer[:-SIZE].clone()
        comm.all_gather_(buffer)
        comm.barrier()
    except Exception as error:
        comm.announce(error)
        said = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{kind}: rank {RANK} saw {said}\n")  # at once, as ranks share it
    sys.stdout.flush()


processes.read = faulty_read
processes._LARGE = 1 << 16
if FAULT != "is late":  # else the job is to last until it has come
    mpi_peers._LAST = 0.5
dist.init_process_group("gloo", store=dist.FileStore(STORE, SIZE), rank=RANK, world_size=SIZE)
gather_twice("torch_distributed", TorchDistributedCommunicator(dist.group.WORLD, timeout=1.0))
MPI.COMM_WORLD.Barrier()  # the late one has come
gather_twice("mpi", MpiCommunicator(timeout=1.0))
