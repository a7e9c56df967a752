"""Communicators on which a mistake about a gather that is under way shows."""

import random
import time
from collections.abc import Callable, Sequence

import torch

from zerocast.comm import Communicator, RecordingCommunicator

SPOILT = 0x55


class GathersLate(RecordingCommunicator):
    """Begins no gather before it is waited for, and spoils what has not arrived until then. Fails
    where a buffer is written, or gathered again, before the wait. Parts are equal.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._under_way: set[int] = set()

    def start_all_gather_(
        self, buffer: torch.Tensor, counts: Sequence[int] | None = None
    ) -> Callable[[], None]:
        if counts is not None:  # of scales, which are waited for at once
            return self.comm.start_all_gather_(buffer, counts)
        assert buffer.data_ptr() not in self._under_way, "gathered again before the wait"
        self._under_way.add(buffer.data_ptr())
        entries = buffer.view(torch.uint8)
        own = entries.view(self.size, -1)[self.rank].clone()
        entries.fill_(SPOILT)
        entries.view(self.size, -1)[self.rank] = own
        begun = entries.clone()

        def wait() -> None:
            assert torch.equal(entries, begun), "written before the wait"
            self.all_gather_(buffer)
            self._under_way.remove(buffer.data_ptr())

        return wait


class GathersShuffled(GathersLate):
    """Its gathers arrive together, at the wait for the first of them, in an order that ``seed``
    gives, the same on all ranks.
    """

    def __init__(self, comm: Communicator, seed: int) -> None:
        super().__init__(comm)
        self._random = random.Random(seed)
        self._arrivals: list[Callable[[], None]] = []

    def start_all_gather_(
        self, buffer: torch.Tensor, counts: Sequence[int] | None = None
    ) -> Callable[[], None]:
        self._arrivals.append(super().start_all_gather_(buffer, counts))
        return self._arrive

    def _arrive(self) -> None:
        self._random.shuffle(self._arrivals)
        while self._arrivals:
            self._arrivals.pop()()


class GathersSlowly(RecordingCommunicator):
    """One wire, on which each gather that was begun takes ``seconds`` after those before it."""

    def __init__(self, comm: Communicator, seconds: float) -> None:
        super().__init__(comm)
        self._seconds, self._free_at = seconds, 0.0

    def start_all_gather_(
        self, buffer: torch.Tensor, counts: Sequence[int] | None = None
    ) -> Callable[[], None]:
        self._free_at = max(self._free_at, time.perf_counter()) + self._seconds
        arrives_at, wait = self._free_at, super().start_all_gather_(buffer, counts)

        def slow() -> None:
            time.sleep(max(0.0, arrives_at - time.perf_counter()))
            wait()

        return slow


class TakesAway(RecordingCommunicator):
    """As one rank sees it that owns nothing: a gather spoils its whole buffer until it is waited
    for. Fails where the buffer is written before.

    Attributes:
        waits: the gathers that were waited for.
        before_wait: called at the beginning of each wait.
    """

    def __init__(self, comm: Communicator) -> None:
        assert comm.size == 1
        super().__init__(comm)
        self.waits = 0
        self.before_wait: Callable[[], None] = lambda: None

    def start_all_gather_(
        self, buffer: torch.Tensor, counts: Sequence[int] | None = None
    ) -> Callable[[], None]:
        whole = buffer.clone()
        buffer.view(torch.uint8).fill_(SPOILT)

        def wait() -> None:
            self.before_wait()
            assert bool((buffer.view(torch.uint8) == SPOILT).all()), "written before the wait"
            buffer.copy_(whole)
            self.waits += 1

        return wait


class ExchangesLate(RecordingCommunicator):
    """Begins no all-to-all before it is waited for, and spoils its buffer until then. Fails where
    the buffer is written, or more than ``most`` are under way, before the wait.

    Attributes:
        under_way: how many have begun and have not been waited for.
    """

    def __init__(self, comm: Communicator, most: int = 2) -> None:
        super().__init__(comm)
        self.under_way, self._most = 0, most

    def start_all_to_all(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
    ) -> Callable[[], None]:
        start, own = super().start_all_to_all, buffer.clone()
        output.view(torch.uint8).fill_(SPOILT)
        self.under_way += 1
        assert self.under_way <= self._most, "more under way than there are buffers"

        def wait() -> None:
            assert bool((output.view(torch.uint8) == SPOILT).all()), "written before the wait"
            start(output, own, received, sent)()
            self.under_way -= 1

        return wait
