"""MpiCommunicator: ranks are MPI processes, reached through mpi4py.

mpi4py is imported when the first communicator is made, never by ``import zerocast``. MPI reads and
writes the tensors' own memory by address: nothing is copied, and no array library stands between.
It is told of no dtype but those it reduces; everything else travels as bytes (a bfloat16 tensor
handed over as it is would be refused by one MPI library and garbled by another).

One call moves at most ``chunk`` items, below MPI's classic limit of 2**31 - 1, so tensors of any
length work the same with every MPI library, not only with one that has MPI-4's large counts.

NOT here: how a rank waits, and what becomes of failures (:mod:`zerocast.comm.mpi_peers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerocast.arguments import check_integer
from zerocast.comm import buffers
from zerocast.comm.communicator import Communicator, Parts, Wait
from zerocast.comm.failure import DEFAULT_TIMEOUT, check_timeout
from zerocast.comm.mpi_peers import MpiPeers
from zerocast.comm.peers import Begin
from zerocast.errors import BackendError, InputError

if TYPE_CHECKING:
    from mpi4py import MPI

_HOST = torch.device("cpu")

_TAG = 24331
"""Of messages between two ranks, so that a caller's own on the same communicator are others."""


def import_mpi() -> Any:
    """mpi4py's ``MPI`` module.

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


class MpiCommunicator(Communicator):
    """The ranks of an mpi4py intracommunicator.

    Tensors that are not on the CPU are copied to (pinned) host memory, travel from there and are
    copied back (:meth:`stages` says so). A CUDA-aware MPI takes a GPU's tensors as they are, once
    the GPU has done what torch's current stream holds: MPI knows no streams.

    Args:
        comm: the intracommunicator; None means ``MPI.COMM_WORLD``. It stays the caller's to free.
        timeout: how many seconds a collective waits for other ranks.
        chunk: the most items that one MPI call moves.
        cuda_aware: whether this MPI library takes addresses of a GPU's memory, which it does not
            say of itself. One that does not ends the process at such an address.

    Raises:
        BackendError: where mpi4py or the MPI library is missing.
        InputError: for another kind of communicator, or ``COMM_NULL``.
    """

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

    def all_reduce_max_(self, buffer: torch.Tensor) -> None:
        flat = buffers.reduce_operand("all_reduce_max_", buffer)
        self._all_reduce("all_reduce_max_", flat, self._mpi.MAX)

    def all_reduce_sum_(self, buffer: torch.Tensor) -> None:
        flat = buffers.reduce_operand("all_reduce_sum_", buffer)
        self._all_reduce("all_reduce_sum_", flat, self._mpi.SUM)

    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        with self._in_reach(flat) as host:
            self._start_all_gather(host, chunks)()

    def start_all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> Wait:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        if self.stages(flat.device):
            return super().start_all_gather_(buffer, counts)
        return self._start_all_gather(_settled(flat), chunks)

    def _start_all_gather(self, flat: torch.Tensor, chunks: Sequence[int]) -> Wait:
        def begin() -> list[MPI.Request]:
            if flat.numel() <= self._chunk:
                memory, _, kind = self._memory(flat)
                return [self._comm.Iallgatherv(self._mpi.IN_PLACE, [memory, chunks, kind])]
            # MPI's int cannot say where the later parts begin: every rank broadcasts its part,
            # still in place, and no more bytes travel than in a gather.
            parts = enumerate(flat.split(chunks))
            return [each for root, part in parts for each in self._broadcast(part, root)]

        text = f"all_gather_ of {flat.numel()} bytes in parts #{hash(tuple(chunks)) % 2**32:08x}"
        return self._start(text, begin, flat)

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Parts = None, sent: Parts = None
    ) -> Wait:
        out, flat, takes, gives = buffers.exchange_operands(
            output, buffer, received, sent, self.size
        )
        is_equal = received is None and sent is None and flat.numel() <= self._chunk
        staged, in_place = self.stages(flat.device), buffers.is_in_place(out, flat)
        copies = staged or (in_place and not is_equal)
        host = flat.to(_HOST, copy=True) if copies else _settled(flat)
        into = torch.empty_like(out, device=_HOST) if staged else out

        def begin() -> list[MPI.Request]:
            if not is_equal:
                return self._start_exchange(into.split(takes), host.split(gives))
            if in_place and not staged:
                return [self._comm.Ialltoall(self._mpi.IN_PLACE, self._memory(into, takes[0]))]
            own, part = self._memory(host, gives[0]), self._memory(into, takes[0])
            return [self._comm.Ialltoall(own, part)]

        size = f" of {host.numel()} bytes" if received is None and sent is None else ""
        arrive = self._start(f"all_to_all{size}", begin, (host, into))

        def wait() -> None:
            arrive()
            if staged:
                out.copy_(into)

        return wait

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        flat = buffers.broadcast_operand(buffer, root, self.size)
        with self._in_reach(flat) as host:
            text = f"broadcast_ of {host.numel()} bytes from rank {root}"
            self._start(text, lambda: self._broadcast(host, root), host)()

    def barrier(self) -> None:
        self._start("barrier", lambda: [self._comm.Ibarrier()], None)()

    def announce(self, error: BaseException) -> None:
        self._peers.announce(error)

    def _start(self, call: str, begin: Begin, memory: Any, *, reduces: bool = False) -> Wait:
        return self._peers.start(call, begin, memory, self.timeout, reduces=reduces)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MpiCommunicator) and self._comm == other._comm

    def __hash__(self) -> int:
        return hash((MpiCommunicator, self._comm.py2f()))

    def __repr__(self) -> str:
        return f"MpiCommunicator(rank={self.rank}, size={self.size})"

    def _in_reach(self, tensor: torch.Tensor) -> Any:
        """``tensor`` where MPI can reach it."""
        if self.stages(tensor.device):
            return buffers.on_device(tensor, _HOST)
        return buffers.on_device(_settled(tensor), None)

    def _memory(self, tensor: torch.Tensor, count: int | None = None) -> list[Any]:
        """Return a contiguous tensor as mpi4py takes memory: address, count, datatype; the count is
        that of each rank's part where it is given.
        """
        assert tensor.is_contiguous()
        memory = self._mpi.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, tensor.numel() if count is None else count, self._types[tensor.dtype]]

    def _all_reduce(self, what: str, flat: torch.Tensor, op: MPI.Op) -> None:
        with self._in_reach(flat) as host:

            def begin() -> list[MPI.Request]:
                return [
                    self._comm.Iallreduce(self._mpi.IN_PLACE, self._memory(chunk), op)
                    for chunk in host.split(self._chunk)
                ]

            self._start(f"{what} on {host.dtype} [{host.numel()}]", begin, host, reduces=True)()

    def _start_exchange(
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

    def _broadcast(self, flat: torch.Tensor, root: int) -> list[MPI.Request]:
        return [self._comm.Ibcast(self._memory(chunk), root) for chunk in flat.split(self._chunk)]


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, once a GPU has done all that writes it."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor
