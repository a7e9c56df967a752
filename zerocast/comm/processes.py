"""ProcessCommunicator: ranks that are processes, reached through MPI or torch.distributed.

Here operands are checked, tensors brought into memory that the transport takes, and collectives
started. A transport begins each collective, on bytes or, where values are reduced, on numbers.

In a large all-gather among ranks of one node, each copies the others' parts out of their memory,
which takes two small collectives: one exchanges the addresses of the buffers, and one confirms that
all have read. Where a rank may not read another's memory, the transport gathers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from zerocast.comm import buffers
from zerocast.comm.buffers import AllToAllOperands
from zerocast.comm.communicator import Communicator, Parts, Wait, nothing_to_wait_for
from zerocast.comm.failure import alone, announcing
from zerocast.comm.peer_memory import PeerBuffer, draw_token, read
from zerocast.comm.peers import MAXIMA, Begin, Peers
from zerocast.comm.uncopied import Uncopied

_LARGE = 1 << 21
"""Bytes of a part, on average, from which on ranks of one node copy them from each other."""


class ProcessCommunicator(Communicator, Uncopied):
    """A communicator whose ranks are processes; a subclass is one transport.

    The methods that a transport has begin a collective on 1-D tensors in memory that it takes, and
    return its requests.
    """

    instead = "call zerocast.as_communicator on a group of the other process"

    _peers: Peers
    _serving: torch.device
    """A device whose tensors the transport takes."""
    _compares: bool
    """Whether ranks compare what they call on the CPU: then maxima travel with that."""
    _skips_empty: ClassVar[bool] = False
    """Whether collectives on no elements are left out."""

    @abstractmethod
    def _start(self, call: str, begin: Begin, memory: Any, *, reduces: bool = False) -> Wait:
        """Start a collective; see ``start`` of the transport's :class:`Peers`."""

    @abstractmethod
    def _begin_all_reduce(self, what: str, flat: torch.Tensor) -> Sequence[Any]:
        """Begin the reduction ``what``, in place."""

    @abstractmethod
    def _begin_all_gather(self, flat: torch.Tensor, chunks: Sequence[int]) -> Sequence[Any]:
        """Begin to gather ``chunks[r]`` bytes of every rank r, in place."""

    @abstractmethod
    def _begin_all_to_all(self, given: AllToAllOperands) -> Sequence[Any]:
        """Begin to exchange parts."""

    @abstractmethod
    def _begin_broadcast(self, flat: torch.Tensor, root: int) -> Sequence[Any]:
        """Begin to send the bytes of ``root``, in place."""

    def _exchanges_in_place(self, given: AllToAllOperands) -> bool:
        """Say whether the transport can write over the bytes that it sends."""
        return False

    def _ready(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` once the transport may read it."""
        return tensor

    def maxima(self, numbers: Sequence[int]) -> list[int]:
        if len(numbers) > MAXIMA or not self._compares:
            return super().maxima(numbers)
        text = _text_of_reduction("all_reduce_max_", torch.int32, len(numbers))
        return self._peers.maxima(text, numbers, self.timeout)

    def _all_reduce(self, what: str, buffer: torch.Tensor) -> None:
        flat = buffers.reduce_operand(what, buffer)
        numel = flat.numel()
        if what == "all_reduce_max_" and flat.is_cpu and 0 < numel <= MAXIMA and self._compares:
            flat.copy_(torch.tensor(self.maxima(flat.tolist()), dtype=flat.dtype, device="cpu"))
        elif self._is_sent(flat):
            text = _text_of_reduction(what, flat.dtype, numel)
            with self._reached(flat) as reached:
                begin = lambda: self._begin_all_reduce(what, reached)  # noqa: E731
                self._start(text, begin, reached, reduces=True)()

    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        if self._is_sent(flat):
            with self._reached(flat) as reached:
                self._start_all_gather(reached, chunks)()

    def start_all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> Wait:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        if self.stages(flat.device) or not self._is_sent(flat):
            return super().start_all_gather_(buffer, counts)
        return self._start_all_gather(self._ready(flat), chunks)

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Parts = None, sent: Parts = None
    ) -> Wait:
        given = buffers.exchange_operands(output, buffer, received, sent, self.size)
        flat, staged = given.buffer, self.stages(output.device)
        if staged or (given.is_in_place and not self._exchanges_in_place(given)):
            flat = flat.to(self._serving if staged else flat.device, copy=True)
        into = flat.new_empty(len(given.output)) if staged else given.output
        reached = given._replace(buffer=self._ready(flat), output=into)
        size = f" of {flat.numel()} bytes" if given.is_equal else ""
        begin = lambda: self._begin_all_to_all(reached)  # noqa: E731
        wait = self._start(f"all_to_all{size}", begin, (reached.buffer, into))
        if not staged:
            return wait

        def wait_and_copy() -> None:
            wait()
            given.output.copy_(into)

        return wait_and_copy

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        flat = buffers.broadcast_operand(buffer, root, self.size)
        if self._is_sent(flat):
            with self._reached(flat) as reached:
                text = f"broadcast_ of {reached.numel()} bytes from rank {root}"
                self._start(text, lambda: self._begin_broadcast(reached, root), reached)()

    def announce(self, error: BaseException) -> None:
        self._peers.announce(error)

    def _start_all_gather(self, flat: torch.Tensor, chunks: Sequence[int]) -> Wait:
        text = _text_of_gather(flat, chunks)
        if flat.is_cpu and self._reads_memory(flat.numel()):
            if self._gather_from_memory(text, flat, chunks):
                return nothing_to_wait_for
            self._peers.reads_memory = False
        return self._start(text, lambda: self._begin_all_gather(flat, chunks), flat)

    def _reads_memory(self, size: int) -> bool:
        """Whether ranks read ``size`` bytes on the CPU from each other's memory: the same on all
        ranks of a group that has reduced or agreed before.
        """
        if size < self.size * _LARGE or not self._compares:
            return False
        return self._peers.share_node and self._peers.reads_memory

    def _gather_from_memory(self, text: str, flat: torch.Tensor, chunks: Sequence[int]) -> bool:
        """Copy the parts of all others; return whether every rank could do that."""
        peers = torch.zeros(self.size, len(PeerBuffer._fields), dtype=torch.int64, device="cpu")
        own = PeerBuffer.of(flat, token := draw_token(self.rank))
        peers[self.rank] = torch.tensor(own, dtype=torch.int64, device="cpu")
        as_bytes = peers.view(torch.uint8)
        sizes = [as_bytes.shape[1]] * self.size
        begin = lambda: self._begin_all_gather(as_bytes.view(-1), sizes)  # noqa: E731
        self._start(text, begin, (flat, peers, token))()
        is_read, parts = True, flat.split(list(chunks))
        with announcing([self]), alone():
            try:
                for shift in range(1, self.size):  # not all from the same one
                    rank = (self.rank + shift) % self.size
                    start = sum(chunks[:rank])
                    read(PeerBuffer(*peers[rank].tolist()), start, parts[rank])
            except OSError:
                is_read = False
        # Until all have read, this rank's part is not written, and none uses what it has read.
        [unread] = self._peers.maxima(f"the end of {text}", [not is_read], self.timeout)
        return not unread

    def _reached(self, tensor: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Give the context ``tensor`` in memory that the transport takes."""
        if self.stages(tensor.device):
            return buffers.on_device(tensor, self._serving)
        return buffers.on_device(self._ready(tensor), None)

    def _is_sent(self, flat: torch.Tensor) -> bool:
        return flat.numel() > 0 or not self._skips_empty


def _text_of_gather(flat: torch.Tensor, chunks: Sequence[int]) -> str:
    """Return the text by which ranks compare an all-gather."""
    return f"all_gather_ of {flat.numel()} bytes in parts #{hash(tuple(chunks)) % 2**32:08x}"


def _text_of_reduction(what: str, dtype: torch.dtype, numel: int) -> str:
    """Return the text by which ranks compare an all-reduce."""
    return f"{what} on {dtype} [{numel}]"
