"""MpiCommunicator: ranks are MPI processes, reached through mpi4py.

mpi4py is imported when the first communicator is made, never by ``import zerocast``. MPI reads and
writes the tensors' own memory by address, without copies and without an array library. Only
reductions name a dtype; everything else is sent as bytes (one MPI library would refuse a bfloat16
tensor, another would change its values).

One call moves at most ``chunk`` items, below MPI's classic limit of 2**31 - 1, so tensors of any
length work the same with every MPI library, not only with one that has MPI-4's large counts.

NOT here: how a rank waits, and how failures are handled (:mod:`zerocast.comm.mpi_peers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerocast.arguments import check_integer
from zerocast.comm.buffers import AllToAllOperands
from zerocast.comm.communicator import Wait
from zerocast.comm.failure import DEFAULT_TIMEOUT, check_timeout
from zerocast.comm.mpi_peers import MpiPeers
from zerocast.comm.peers import Begin
from zerocast.comm.processes import ProcessCommunicator
from zerocast.errors import BackendError, InputError

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 24331
"""The tag of an all-to-all's messages, to keep them apart from a caller's on the communicator."""


def import_mpi() -> Any:
    """Import and return mpi4py's ``MPI`` module.

    Raises:
        BackendError: where mpi4py or the MPI library is missing, with the remedy.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, libmpi is not
        raise BackendError(
            f"an MPI communicator needs mpi4py and an MPI library, got '{error}'; install both by "
            f"pip install 'zerocast[mpi]', or mpi4py beside the MPI library of your cluster."
        ) from error
    return MPI


class MpiCommunicator(ProcessCommunicator):
    """The ranks of an mpi4py intracommunicator.

    Tensors that are not on the CPU are copied to (pinned) host memory, travel from there and are
    copied back (:meth:`stages` says so). A CUDA-aware MPI takes a GPU's tensors as they are, once
    the GPU has done what torch's current stream holds: MPI knows no streams.

    Args:
        comm: the intracommunicator; None means ``MPI.COMM_WORLD``. The caller frees it.
        timeout: the seconds that a collective waits for other ranks.
        chunk: the most items that one MPI call moves.
        cuda_aware: whether this MPI library takes addresses of a GPU's memory; MPI has no query
            for it. A library that does not take them ends the process.

    Raises:
        BackendError: where mpi4py or the MPI library is missing.
        InputError: for another kind of communicator, or ``COMM_NULL``.
    """

    _peers: MpiPeers
    _serving = torch.device("cpu")
    _compares = True

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        chunk: int = 2**31 - 1,
        cuda_aware: bool = False,
    ) -> None:
        mpi = import_mpi()
        comm = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
            given = "COMM_NULL" if comm == mpi.COMM_NULL else type(comm).__name__
            raise InputError(
                f"MpiCommunicator takes an mpi4py intracommunicator that this rank belongs to, got "
                f"{given}; make one with Split, and use it on its members only."
            )
        self.timeout = check_timeout(timeout)
        self._mpi = mpi
        self._comm = comm
        self._peers = MpiPeers.of(mpi, comm)
        self._chunk = check_integer("chunk", chunk, 1, 2**31 - 1)
        self._served = ("cpu", "cuda") if cuda_aware else ("cpu",)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._types = {
            torch.int32: mpi.INT32_T,
            torch.int64: mpi.INT64_T,
            torch.float32: mpi.FLOAT,
            torch.float64: mpi.DOUBLE,
            torch.uint8: mpi.BYTE,
        }

    def stages(self, device: torch.device) -> bool:
        return device.type not in self._served

    def captures(self, device: torch.device) -> bool:
        return False  # MPI is called by the host, at once

    def barrier(self) -> None:
        self._start("barrier", lambda: [self._comm.Ibarrier()], None)()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MpiCommunicator) and self._comm == other._comm

    def __hash__(self) -> int:
        return hash((MpiCommunicator, self._comm.py2f()))

    def __repr__(self) -> str:
        return f"MpiCommunicator(rank={self.rank}, size={self.size})"

    def _start(self, call: str, begin: Begin, memory: Any, *, reduces: bool = False) -> Wait:
        return self._peers.start(call, begin, memory, self.timeout, reduces=reduces)

    def _ready(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` once a GPU has done all that writes it."""
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        return tensor

    def _begin_all_reduce(self, what: str, flat: torch.Tensor) -> list[MPI.Request]:
        op = self._mpi.MAX if what == "all_reduce_max_" else self._mpi.SUM
        return [
            self._comm.Iallreduce(self._mpi.IN_PLACE, self._memory(chunk), op)
            for chunk in flat.split(self._chunk)
        ]

    def _begin_all_gather(self, flat: torch.Tensor, chunks: Sequence[int]) -> list[MPI.Request]:
        if flat.numel() <= self._chunk:
            memory, _, kind = self._memory(flat)
            return [self._comm.Iallgatherv(self._mpi.IN_PLACE, [memory, chunks, kind])]
        # MPI's int cannot say where the later parts begin: every rank broadcasts its part, still in
        # place, and no more bytes travel than in a gather.
        parts = enumerate(flat.split(chunks))
        return [each for root, part in parts for each in self._begin_broadcast(part, root)]

    def _exchanges_in_place(self, given: AllToAllOperands) -> bool:
        return given.is_equal and given.buffer.numel() <= self._chunk

    def _begin_all_to_all(self, given: AllToAllOperands) -> list[MPI.Request]:
        output, flat, takes, gives, is_equal = given
        if not is_equal or flat.numel() > self._chunk:
            return self._exchange(output.split(takes), flat.split(gives))
        own = self._mpi.IN_PLACE if given.is_in_place else self._memory(flat, gives[0])
        return [self._comm.Ialltoall(own, self._memory(output, takes[0]))]

    def _exchange(
        self, takes: Sequence[torch.Tensor], gives: Sequence[torch.Tensor]
    ) -> list[MPI.Request]:
        """Begin to exchange parts of any length, message by message, with every rank that has one
        for this rank or is sent one.
        """
        requests: list[MPI.Request] = []
        for shift in range(self.size):
            source, to = (self.rank - shift) % self.size, (self.rank + shift) % self.size
            into, own = (p.split(self._chunk) if len(p) else () for p in (takes[source], gives[to]))
            requests += [self._comm.Irecv(self._memory(part), source, _TAG) for part in into]
            requests += [self._comm.Isend(self._memory(part), to, _TAG) for part in own]
        return requests

    def _begin_broadcast(self, flat: torch.Tensor, root: int) -> list[MPI.Request]:
        return [self._comm.Ibcast(self._memory(chunk), root) for chunk in flat.split(self._chunk)]

    def _memory(self, tensor: torch.Tensor, count: int | None = None) -> list[Any]:
        """Return a contiguous tensor as mpi4py takes memory: address, count, datatype; the count is
        that of each rank's part where it is given.
        """
        assert tensor.is_contiguous()
        memory = self._mpi.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, tensor.numel() if count is None else count, self._types[tensor.dtype]]
