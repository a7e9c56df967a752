"""ProcessCommunicator: ranks that are processes, reached through MPI or torch.distributed.

Here operands are checked, tensors brought into memory that the transport takes, and collectives
started. A transport begins each collective, on bytes or, where values are reduced, on numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from zerocast.comm import buffers
from zerocast.comm.buffers import Exchange
from zerocast.comm.communicator import Communicator, Parts, Wait
from zerocast.comm.peers import Begin, Peers


class ProcessCommunicator(Communicator):
    """A communicator whose ranks are processes; a subclass is one transport.

    The methods that a transport has begin a collective on 1-D tensors in memory that it takes, and
    return its requests.
    """

    _peers: Peers
    _serving: torch.device
    """A device whose tensors the transport takes."""
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
    def _begin_all_to_all(self, given: Exchange) -> Sequence[Any]:
        """Begin to exchange parts."""

    @abstractmethod
    def _begin_broadcast(self, flat: torch.Tensor, root: int) -> Sequence[Any]:
        """Begin to send the bytes of ``root``, in place."""

    def _exchanges_in_place(self, given: Exchange) -> bool:
        """Say whether the transport can write over the bytes that it sends."""
        return False

    def _settled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` once the transport may read it."""
        return tensor

    def _all_reduce(self, what: str, buffer: torch.Tensor) -> None:
        flat = buffers.reduce_operand(what, buffer)
        if self._is_sent(flat):
            with self._reached(flat) as reached:
                begin = lambda: self._begin_all_reduce(what, reached)  # noqa: E731
                self._start(text_of_reduction(what, reached), begin, reached, reduces=True)()

    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        if self._is_sent(flat):
            with self._reached(flat) as reached:
                self._start_all_gather(reached, chunks)()

    def start_all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> Wait:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        if self.stages(flat.device) or not self._is_sent(flat):
            return super().start_all_gather_(buffer, counts)
        return self._start_all_gather(self._settled(flat), chunks)

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Parts = None, sent: Parts = None
    ) -> Wait:
        given = buffers.exchange_operands(output, buffer, received, sent, self.size)
        flat, staged = given.buffer, self.stages(output.device)
        if staged or (given.is_in_place and not self._exchanges_in_place(given)):
            flat = flat.to(self._serving if staged else flat.device, copy=True)
        into = flat.new_empty(len(given.output)) if staged else given.output
        reached = given._replace(buffer=self._settled(flat), output=into)
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
        begin = lambda: self._begin_all_gather(flat, chunks)  # noqa: E731
        return self._start(text_of_gather(flat, chunks), begin, flat)

    def _reached(self, tensor: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Give the context ``tensor`` in memory that the transport takes."""
        if self.stages(tensor.device):
            return buffers.on_device(tensor, self._serving)
        return buffers.on_device(self._settled(tensor), None)

    def _is_sent(self, flat: torch.Tensor) -> bool:
        return flat.numel() > 0 or not self._skips_empty


def text_of_gather(flat: torch.Tensor, chunks: Sequence[int]) -> str:
    """What ranks compare of an all-gather."""
    return f"all_gather_ of {flat.numel()} bytes in parts #{hash(tuple(chunks)) % 2**32:08x}"


def text_of_reduction(what: str, flat: torch.Tensor) -> str:
    """What ranks compare of an all-reduce."""
    return f"{what} on {flat.dtype} [{flat.numel()}]"
