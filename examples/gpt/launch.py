"""Who started us: mpiexec, torchrun, or nobody."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from zerocast.comm import Communicator, as_communicator

# Set for every rank by MPICH and Intel MPI, by Open MPI, and by PMIx launchers such as srun.
MPI_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK")

INTERFACE = "GLOO_SOCKET_IFNAME"
"""What names the network interface of gloo; without it gloo looks up the host's own name."""

SECONDS = 5.0
"""For a connection to another host."""


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
    """A store of rank 0 that all ranks reach, by an address: hosts need not know each other's
    names. Makes gloo use the interface by which this rank reaches it.
    """
    if comm.size == 1:
        return torch.distributed.HashStore()
    own, store = interfaces(), None
    if comm.rank == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    offered, port = comm.all_gather_object((list(own), store.port if store else None))[0]
    there, here = route(offered, port)
    if here in own:
        os.environ[INTERFACE] = own[here]
    return store or torch.distributed.TCPStore(there, port, is_master=False)


def interfaces() -> dict[str, str]:
    """By IPv4 address of this host the network interface that has it, the loopback last; only those
    of ``GLOO_SOCKET_IFNAME`` where the user sets it.
    """
    siocgifaddr, found = 0x8915, {}  # Linux's request for the address of an interface
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in os.environ[INTERFACE].split(",") if INTERFACE in os.environ else names:
            with suppress(OSError):  # it has no address
                asked = struct.pack("256s", name.encode())
                found[socket.inet_ntoa(fcntl.ioctl(any_socket, siocgifaddr, asked)[20:24])] = name
    return dict(sorted(found.items(), key=lambda each: each[0].startswith("127.")))


def route(addresses: list[str], port: int) -> tuple[str, str]:
    """The first of another host's ``addresses`` that answers, and this host's that leads there."""
    for address in addresses:
        with suppress(OSError), socket.create_connection((address, port), SECONDS) as connection:
            return address, connection.getsockname()[0]
    raise ConnectionError(f"no address of rank 0 answers at port {port}: {', '.join(addresses)}")


def share_cores(comm: Communicator) -> Communicator:
    """Give each rank its part of its host's cores. Collective."""
    ranks = comm.all_gather_object(socket.gethostname()).count(socket.gethostname())
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
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
