"""RecordingCommunicator: counts a group's collectives, their bytes and their time.

Note: bytes sent
~~~~~~~~~~~~~~~~
What one of D ranks sends is counted by the ring algorithm, which is optimal in volume, whatever the
transport does (gloo's reduce-scatter, for example, is an all-reduce). With n bytes in
the whole buffer::

    all-reduce        2 (D - 1) / D * n    a reduce-scatter, then an all-gather
    reduce-scatter      (D - 1) / D * n
    all-gather          n - part[r + 1]    rank r passes on every part but its successor's own;
                                           (D - 1) / D * n where the parts are equal
    all-to-all          n - part[r]        what is sent to the other ranks
    broadcast           n, or 0 on the last rank before the root
    objects             (D - 1) * pickled size, as if all ranks' were as large as this one's
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.comm import buffers
from zerocast.comm.communicator import Communicator, Parts, Wait
from zerocast.comm.uncopied import Uncopied
from zerocast.errors import InputError


@dataclass(slots=True)
class Traffic:
    """A sum over collectives.

    Attributes:
        calls: the number of calls.
        payload_bytes: the buffers that they were called on.
        sent_bytes: what this rank sends, see "Note: bytes sent".
        seconds: wall time inside the calls on the host, waiting for slower ranks included.
    """

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0

    def add(self, other: Traffic) -> None:
        """Count ``other`` in."""
        self.calls += other.calls
        self.payload_bytes += other.payload_bytes
        self.sent_bytes += other.sent_bytes
        self.seconds += other.seconds


class RecordingCommunicator(Communicator, Uncopied):
    """Passes every collective on to ``comm`` and counts it, by label and kind.

    Kinds are ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``,
    ``all_gather_object`` and ``barrier``. Only collectives that succeed are counted.

    Attributes:
        comm: the communicator that does the work.
        traffic: (label, kind) -> what was counted; the label is "" outside :meth:`label`.
    """

    instead = "make one of the other communicator"

    def __init__(self, comm: Communicator) -> None:
        if not isinstance(comm, Communicator):
            raise InputError(
                "RecordingCommunicator records a zerocast communicator, got "
                f"{type(comm).__name__}; make one with zerocast.comm.as_communicator."
            )
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.timeout = comm.timeout
        self.traffic: dict[tuple[str, str], Traffic] = {}
        self._label = ""

    @contextmanager
    def label(self, name: str) -> Iterator[None]:
        """Count what is called within the context under ``name``."""
        outer, self._label = self._label, name
        try:
            yield
        finally:
            self._label = outer

    def total(self, *, kind: str | None = None, label: str | None = None) -> Traffic:
        """Return the sum over the given kind and label; None means all of them."""
        total = Traffic()
        for (its_label, its_kind), traffic in self.traffic.items():
            if kind in (None, its_kind) and label in (None, its_label):
                total.add(traffic)
        return total

    def reset(self) -> None:
        """Set all counts to zero."""
        self.traffic = {}

    def _all_reduce(self, what: str, buffer: torch.Tensor) -> None:
        with self._count("all_reduce", lambda: self._ring(buffer, passes=2)):
            getattr(self.comm, what)(buffer)

    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        with self._count("all_gather", lambda: self._all_but(self.rank + 1, buffer, counts)):
            self.comm.all_gather_(buffer, counts)

    def start_all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> Wait:
        with self._count("all_gather", lambda: self._all_but(self.rank + 1, buffer, counts)):
            wait = self.comm.start_all_gather_(buffer, counts)
        return self._timed("all_gather", wait)

    def reduce_scatter_sum(self, output: torch.Tensor, buffer: torch.Tensor) -> None:
        with self._count("reduce_scatter", lambda: self._ring(buffer, passes=1)):
            self.comm.reduce_scatter_sum(output, buffer)

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Parts = None, sent: Parts = None
    ) -> Wait:
        with self._count("all_to_all", lambda: self._all_but(self.rank, buffer, sent)):
            wait = self.comm.start_all_to_all(output, buffer, received, sent)
        return self._timed("all_to_all", wait)

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        is_last = (self.rank + 1) % self.size == root
        with self._count("broadcast", lambda: (buffer.nbytes, 0 if is_last else buffer.nbytes)):
            self.comm.broadcast_(buffer, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        payload = len(buffers.pickled(obj))
        with self._count("all_gather_object", lambda: (payload, (self.size - 1) * payload)):
            return self.comm.all_gather_object(obj)

    def barrier(self) -> None:
        with self._count("barrier", lambda: (0, 0)):
            self.comm.barrier()

    def announce(self, error: BaseException) -> None:
        self.comm.announce(error)

    def stages(self, device: torch.device) -> bool:
        return self.comm.stages(device)

    def captures(self, device: torch.device) -> bool:
        return self.comm.captures(device)

    def __repr__(self) -> str:
        return f"RecordingCommunicator({self.comm!r})"

    # The bytes that a collective is called on and those that it sends, once it has accepted its
    # buffer.

    def _ring(self, buffer: torch.Tensor, passes: int) -> tuple[int, int]:
        """Return both for ``passes`` passes of a ring, in which all parts but one are sent."""
        return buffer.nbytes, passes * (self.size - 1) * buffer.nbytes // self.size

    def _all_but(self, rank: int, buffer: torch.Tensor, counts: Parts) -> tuple[int, int]:
        """Return both for a collective that sends all parts of ``buffer`` but that of a rank."""
        if counts is None:
            return buffer.nbytes, buffer.nbytes - buffer.nbytes // self.size
        return buffer.nbytes, buffer.nbytes - int(counts[rank % self.size]) * buffer.itemsize

    def _timed(self, kind: str, wait: Wait) -> Wait:
        """Return ``wait``, whose time is counted as that of the collective just begun."""
        counted = self.traffic[self._label, kind]

        def timed_wait() -> None:
            start = time.perf_counter()
            wait()
            counted.seconds += time.perf_counter() - start

        return timed_wait

    @contextmanager
    def _count(self, kind: str, sizes: Callable[[], tuple[int, int]]) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        counted = self.traffic.setdefault((self._label, kind), Traffic())
        counted.add(Traffic(1, *sizes(), seconds))
