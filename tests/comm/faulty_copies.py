"""Ranks copy large parts from each other's memory twice, with a timeout of 1 s; the second time
rank 1 does something else. Every rank prints what came of it, at the latest in the collective that
follows. Arguments: what rank 1 does, the kind of communicator, and a file for a store of torch's.
"""

import sys
import time

import torch
import torch.distributed as dist

from zerocast.comm import (
    Communicator,
    MpiCommunicator,
    TorchDistributedCommunicator,
    mpi_peers,
    processes,
)
from zerocast.comm.peer_memory import PeerBuffer, read

FAULT, KIND, STORE = sys.argv[1:]
parts = 0


def faulty_read(peer: PeerBuffer, start: int, into: torch.Tensor) -> None:
    """Fail on rank 1 at its second part of the second gather, where that is the fault."""
    global parts
    parts += 1
    if FAULT == "fails to copy" and comm.rank == 1 and parts == 4:
        raise MemoryError("planted")
    read(peer, start, into)


processes.read = faulty_read
processes._LARGE = 1 << 16
if FAULT != "is late":  # else the job is to last until it has come
    mpi_peers._LAST = 0.5
comm: Communicator = MpiCommunicator(timeout=1.0)
if KIND == "torch_distributed":
    store = dist.FileStore(STORE, comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    comm = TorchDistributedCommunicator(dist.group.WORLD, timeout=1.0)
assert comm.maxima([comm.rank]) == [comm.size - 1]
buffer = torch.zeros(comm.size << 20, dtype=torch.uint8)
comm.all_gather_(buffer)
assert parts == comm.size - 1
said = "nothing"
try:
    if comm.rank == 1 and FAULT == "raises":
        raise OSError("planted")
    if comm.rank == 1 and FAULT == "is late":
        time.sleep(1.5)
    if comm.rank == 1 and FAULT == "gathers less":
        buffer = buffer[: -comm.size].clone()
    comm.all_gather_(buffer)
    comm.barrier()
except Exception as error:
    comm.announce(error)
    said = f"{type(error).__name__}: {error}"
sys.stdout.write(f"rank {comm.rank} saw {said}\n")  # at once, as ranks share it
sys.stdout.flush()
