"""Who started us: mpiexec, torchrun, or nobody."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zerocast.comm import Communicator, as_communicator

# Set for every rank by MPICH and Intel MPI, by Open MPI, and by PMIx launchers such as srun.
MPI_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK")


@contextmanager
def launched_ranks() -> Iterator[Communicator]:
    """The ranks of this job; one where no launcher is seen. Shares the cores among them.

    An error that leaves the context on one rank ends the job, so that no rank waits for it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch.distributed.init_process_group("gloo")
        comm = share_cores(as_communicator(None))
        yield comm
        leave(comm)  # not after an error: it would wait for others
    elif any(name in os.environ for name in MPI_VARIABLES):
        from mpi4py import MPI

        try:
            yield share_cores(as_communicator(MPI.COMM_WORLD))
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)
    else:
        yield as_communicator(None)


@contextmanager
def launched_process_group() -> Iterator[Communicator]:
    """The ranks of this job as torch.distributed's default group, whoever started them.

    What is sharded over the group is out of reach when the context ends.
    """
    with launched_ranks() as comm:
        store = None
        if not torch.distributed.is_initialized():
            store = common_store(comm)
            torch.distributed.init_process_group(
                "gloo", store=store, rank=comm.rank, world_size=comm.size
            )
        yield as_communicator(None)
        if store is not None:
            leave(as_communicator(None))
            comm.barrier()  # rank 0 takes the store along


def leave(comm: Communicator) -> None:
    """Destroy torch.distributed's default group. Collective: gloo connects when ranks first meet,
    and one that leaves at once can cut off another that still connects, which aborts.
    """
    gc.collect()  # a model's cycles would keep the group alive until Python is gone
    comm.barrier()
    torch.distributed.destroy_process_group()
    # A thread of gloo takes Python's lock to let go of the tensors of a collective that is over,
    # and aborts the process if Python has begun to end by then. Groups wait for their threads, but
    # caches of DTensor keep a group that a model was sharded over.
    time.sleep(0.2)


def common_store(comm: Communicator) -> torch.distributed.Store:
    """A store of rank 0 that all ranks reach."""
    if comm.size == 1:
        return torch.distributed.HashStore()
    host, store = socket.gethostname(), None
    if comm.rank == 0:
        store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    host, port = comm.all_gather_object((host, store.port if store else None))[0]
    return store or torch.distributed.TCPStore(host, port, is_master=False)


def share_cores(comm: Communicator) -> Communicator:
    """Give each rank its part of the machine; the ranks are taken to run on one."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.size))
    return comm


def fast_dtype(comm: Communicator) -> torch.dtype:
    """BF16, or FP32 where this processor multiplies BF16 matrices many times slower. Collective.

    Processors without AVX-512 take a hundred times as long; a factor of 8 is beyond doubt.
    """
    seconds = {dtype: best_time(dtype) for dtype in (torch.float32, torch.bfloat16)}
    slow = seconds[torch.bfloat16] > 8 * seconds[torch.float32]
    return torch.float32 if comm.all_gather_object(slow)[0] else torch.bfloat16


def best_time(dtype: torch.dtype) -> float:
    """Seconds for a product of small matrices, undisturbed by what else the machine does."""
    matrix = torch.ones(256, 256, dtype=dtype)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - start)
    return min(times)
