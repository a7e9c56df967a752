"""A link that carries so many bytes a second while its ranks compute: for measuring what a refit
takes by the clock.

Ranks are processes, as a user's are: as threads of one they would wait for each other's Python.
What travels goes through memory that they share, copied by the ranks, and a collective is over when
a link of that rate would have carried it, which sends one collective after the other as they were
begun. Meanwhile a rank computes, or sleeps. So no rank pays for its link but by waiting, and by the
copies, which a network's card would make.

NOT for failures: a rank that raises leaves the others waiting, until their timeout.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from zerocast.comm import Communicator, RecordingCommunicator, buffers

T = TypeVar("T")

TIMEOUT = 120.0
_PROCESSES = multiprocessing.get_context("fork")


class SharedMemory(Communicator):
    """Processes on one machine: every collective is a gather through memory that they share."""

    def __init__(self, rank: int, posted: torch.Tensor, barrier: Any) -> None:
        self.rank, self.size, self.timeout = rank, len(posted), TIMEOUT
        self._posted, self._barrier = posted, barrier  # uint8 [ranks, bytes]

    def _gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes that all ranks give, where they lie until :meth:`barrier`."""
        own = own.reshape(-1).view(torch.uint8)
        self._posted[self.rank, : len(own)].copy_(own)
        self.barrier()
        return list(self._posted.unbind())

    def _all_reduce(self, what: str, buffer: torch.Tensor) -> None:
        flat = buffers.reduce_operand(what, buffer)
        given = [each[: flat.nbytes].view(flat.dtype) for each in self._gathered(flat)]
        total = torch.stack(given)
        total = total.amax(0) if what == "all_reduce_max_" else total.sum(0, dtype=flat.dtype)
        self.barrier()
        flat.copy_(total)

    def all_gather_(self, buffer: torch.Tensor, counts: Any = None) -> None:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        parts = [part.view(torch.uint8) for part in flat.split(chunks)]
        for rank, given in enumerate(self._gathered(parts[self.rank])):
            if rank != self.rank:
                parts[rank].copy_(given[: len(parts[rank])])
        self.barrier()

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Any = None, sent: Any = None
    ) -> Callable[[], None]:
        raise NotImplementedError  # nothing that is measured needs it

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        raise NotImplementedError

    def barrier(self) -> None:
        self._barrier.wait(TIMEOUT)


class SlowLink(RecordingCommunicator):
    """``comm`` over a link of so many bytes a second."""

    def __init__(self, comm: Communicator, bytes_a_second: float) -> None:
        super().__init__(comm)
        self._rate = bytes_a_second
        self._through, self._waits = 0.0, True

    @contextmanager
    def _count(self, kind: str, sizes: Callable[[], tuple[int, int]]) -> Iterator[None]:
        self.comm.barrier()  # nothing is carried before all ranks are there
        begin = time.perf_counter()
        with super()._count(kind, sizes):
            yield
        self._through = max(begin, self._through) + sizes()[1] / self._rate
        if self._waits:
            sleep_until(self._through)

    def start_all_gather_(self, buffer: torch.Tensor, counts: Any = None) -> Callable[[], None]:
        self._waits = False
        wait = super().start_all_gather_(buffer, counts)
        self._waits, through = True, self._through

        def wait_for_link() -> None:
            wait()
            sleep_until(through)

        return wait_for_link


def sleep_until(moment: float) -> None:
    """Return at ``moment`` of the performance counter."""
    time.sleep(max(0.0, moment - time.perf_counter()))


def run_in_processes(ranks: int, capacity: int, run: Callable[[Communicator], T]) -> list[T]:
    """Return what ``run`` returns on each rank, a process with one thread; it sends at most
    ``capacity`` bytes at once.
    """
    posted = torch.zeros(ranks, capacity, dtype=torch.uint8).share_memory_()
    barrier = _PROCESSES.Barrier(ranks)

    def play(rank: int, results: Any) -> None:
        torch.set_num_threads(1)
        results.send(run(SharedMemory(rank, posted, barrier)))

    pipes = [_PROCESSES.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        _PROCESSES.Process(target=play, args=(rank, results))
        for rank, (_, results) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, results in pipes:
        results.close()
    found = [pipe.recv() for pipe, _ in pipes]
    for process in processes:
        process.join()
    return found


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, as torch's allocator does on a GPU: fetching new pages
    from Linux for every buffer takes as long as a cast.
    """
    library, trim_threshold, mmap_max, arena_max = ctypes.CDLL(None), -1, -4, -8
    for option, value in ((trim_threshold, 2**31 - 1), (mmap_max, 0), (arena_max, 1)):
        assert library.mallopt(option, value) == 1
