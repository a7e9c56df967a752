"""Communicator: the collectives that zerocast needs of a group of ranks.

They work in place on contiguous tensors. Every rank of the group calls them in the same order with
the same shapes and dtypes, also a rank that owns nothing. An implementation is a transport only:
its callers decide who sends what and what is agreed on, so all communicators give the same bytes.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from zerocast.comm import buffers
from zerocast.comm.buffers import Parts

Wait: TypeAlias = Callable[[], None]
"""Returns when a collective that was begun is over; it is called once."""


class Communicator(ABC):
    """A group of ranks.

    Attributes:
        rank: this rank's place, 0 to ``size - 1``.
        size: the number of ranks.
        timeout: the seconds that a collective waits for other ranks. Then it raises
            :class:`zerocast.PeerTimeoutError`, and so do those of all ranks that can still be
            reached; the group makes no further collective.
    """

    rank: int
    size: int
    timeout: float

    def all_reduce_max_(self, buffer: torch.Tensor) -> None:
        """Make ``buffer`` the element-wise maximum over all ranks, in place.

        Args:
            buffer: int32, any shape, contiguous.
        """
        self._all_reduce("all_reduce_max_", buffer)

    def maxima(self, numbers: Sequence[int]) -> list[int]:
        """Return the element-wise maxima over all ranks of a few numbers, int32, as
        :meth:`all_reduce_max_`.
        """
        buffer = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        self.all_reduce_max_(buffer)
        found: list[int] = buffer.tolist()
        return found

    def all_reduce_sum_(self, buffer: torch.Tensor) -> None:
        """Make ``buffer`` the sum over all ranks, in place.

        The same bits on every rank; the order of a floating-point sum is the communicator's.

        Args:
            buffer: float32, float64, int32 or int64, any shape, contiguous.
        """
        self._all_reduce("all_reduce_sum_", buffer)

    @abstractmethod
    def _all_reduce(self, what: str, buffer: torch.Tensor) -> None:
        """Do the collective of the name ``what``, one of the two above."""

    @abstractmethod
    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        """Fill ``buffer`` with every rank's part, in place.

        Rank r's part is ``counts[r]`` elements that follow those of rank r - 1. On entry this
        rank's part holds what it sends.

        Args:
            buffer: any dtype (float8 and bfloat16 travel as bytes), 1-D, contiguous.
            counts: the same on every rank; a count may be 0. None means equal parts, and then the
                buffer's length is a multiple of ``size``.
        """

    def all_gather_parts(self, own: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's part, 1-D and contiguous, of ``counts[r]`` elements of rank r; this
        rank's is ``own``. As :meth:`all_gather_`.
        """
        gathered = own.new_empty(sum(counts))
        parts = list(gathered.split(list(counts)))
        parts[self.rank].copy_(own)
        self.all_gather_(gathered, counts)
        return parts

    def start_all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> Wait:
        """Begin :meth:`all_gather_`; other collectives may follow before it is waited for.

        It is ordered among the collectives by its start. Where the transport cannot do it beside
        other work, the gather is over when this returns.

        Args:
            buffer, counts: as for :meth:`all_gather_`. Until the wait this rank's part may be read
                and the others' may not; nothing may be written.

        Returns:
            What waits until ``buffer`` holds every part; it is called once.
        """
        self.all_gather_(buffer, counts)
        return nothing_to_wait_for

    def reduce_scatter_sum(self, output: torch.Tensor, buffer: torch.Tensor) -> None:
        """Sum ``buffer`` over all ranks, in their order; rank r's part of the sum becomes its
        ``output``. It has the same bits on every transport.

        Args:
            output: float32, contiguous; may be this rank's own part of ``buffer``.
            buffer: float32, contiguous, ``size * output.numel()`` elements, parts in rank order.
                Afterwards its values are unspecified, except for an ``output`` that is part of it.
        """
        output, parts = buffers.scatter_operands(output, buffer, self.size)
        self.start_all_to_all(parts, parts)()
        first, *others = parts.view(self.size, output.numel())
        total = first.clone()
        for part in others:
            total += part
        output.copy_(total)

    @abstractmethod
    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Parts = None, sent: Parts = None
    ) -> Wait:
        """Begin an all-to-all: part r of ``buffer`` is sent to rank r, and part r of ``output`` is
        received from it. Other collectives may follow before it is waited for.

        It is ordered among the collectives by its start. Where the transport cannot do it beside
        other work, it is over when this returns.

        Args:
            output: of the dtype of ``buffer``, 1-D, contiguous; ``buffer`` itself where all parts
                are equal. Until the wait neither may be read or written.
            buffer: any dtype (it travels as bytes), 1-D, contiguous.
            received: the elements of each part of ``output``; None means equal parts.
            sent: the elements of each part of ``buffer``; None means equal parts. What rank r sends
                to rank s is as long as what s receives from r.

        Returns:
            What waits until ``output`` holds every part; it is called once.
        """

    @abstractmethod
    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        """Make ``buffer`` on every rank what it is on ``root``, in place.

        Args:
            buffer: any dtype, any shape, contiguous.
        """

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's ``obj`` (small, picklable), in rank order.

        It is for what is agreed on once, not for tensors. It takes two all-gathers of bytes unless
        the transport has a cheaper form.
        """
        pickled = buffers.pickled(obj)
        counts = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        counts[self.rank] = len(pickled)
        self.all_gather_(counts)
        gathered = torch.empty(int(counts.sum()), dtype=torch.uint8, device="cpu")
        parts = gathered.split(counts.tolist())
        parts[self.rank].copy_(torch.frombuffer(bytearray(pickled), dtype=torch.uint8))
        self.all_gather_(gathered, counts.tolist())
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def announce(self, error: BaseException) -> None:  # noqa: B027  (not every transport can)
        """Notify the other ranks, where the transport can, that ``error`` keeps this one from the
        next collective: those that wait in it raise :class:`zerocast.PeerFailedError` with its
        message. Not collective; it neither waits nor raises.
        """

    def stages(self, device: torch.device) -> bool:
        """Say whether tensors on ``device`` are sent from a copy in another device's memory."""
        return False

    def captures(self, device: torch.device) -> bool:
        """Say whether a CUDA graph can record collectives on ``device``'s tensors: not where the
        host takes part in them.
        """
        return not self.stages(device)

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""


def nothing_to_wait_for() -> None:
    """Return at once: the wait for a collective that is over."""
