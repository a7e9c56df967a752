"""A world of ranks in which one thing happens at a time, in an order that a seed decides.

Each rank is a thread, and one of them runs. In a collective it hands over to the scheduler, which
draws who goes on. A collective is carried out once all ranks have begun it, early or as late as
somebody waits for it; a rank that is ended never comes, and when nobody can go on any more, the
time is up for those that wait. So a seed stands for one schedule with one fault, and gives the same
run again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerocast.comm import Communicator, buffers
from zerocast.comm.communicator import Parts, Wait
from zerocast.comm.failure import RAISED, WAITS, Said, peer_error, told


class Killed(BaseException):
    """Ends a rank, which says nothing to the others."""


class Differ(AssertionError):
    """Ranks that are in different collectives: on a real transport bytes that go astray."""


@dataclass
class Call:
    """One collective, as it is begun by rank after rank.

    Attributes:
        signature: what all ranks must call.
        brought: by rank its tensors.
        carry: moves the bytes of all ranks.
        done: whether it has.
    """

    signature: tuple[Any, ...]
    carry: Callable[[dict[int, tuple[torch.Tensor, ...]]], None]
    brought: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    done: bool = False


class World:
    """The ranks and their scheduler.

    Args:
        size: the number of ranks.
        draw: decides what is left open.
        announces: whether the transport tells the others of a rank's error.

    Attributes:
        calls: the collectives, in the order in which they are begun.
        begun: by rank how many it has begun.
        said: by rank what the others know of why it does not go on. Once somebody has said
            something, no collective is carried out any more that some rank has not begun yet.
        fault: called with a rank and the number of the collective that it is about to begin.
    """

    def __init__(self, size: int, draw: random.Random, *, announces: bool) -> None:
        self.size, self.draw, self.announces = size, draw, announces
        self.calls: list[Call] = []
        self.begun = [0] * size
        self.said: dict[int, Said] = {}
        self.fault: Callable[[int, int], None] = lambda rank, number: None
        self.outcomes: list[Any] = [None] * size
        self._waits_for: dict[int, int] = {}
        self._ended: set[int] = set()
        self._goes = [threading.Event() for _ in range(size)]
        self._rests = threading.Event()

    def run(self, body: Callable[[Communicator], Any]) -> list[Any]:
        """What ``body`` returns or raises, by rank."""
        threads = [
            threading.Thread(target=self._play, args=(body, rank), daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        while len(self._ended) < self.size:
            self._goes[self._next()].set()
            self._rests.wait()
            self._rests.clear()
        for thread in threads:
            thread.join()
        return self.outcomes

    def begin(self, rank: int, call: Call, *tensors: torch.Tensor) -> int:
        """Begin the rank's next collective; return its number."""
        number = self.begun[rank]
        self.fault(rank, number)
        self._raise_if_broken(call, number)
        if number == len(self.calls):
            self.calls.append(call)
        first = self.calls[number]
        if first.signature != call.signature:
            raise Differ(f"rank {rank} calls {call.signature}, another one {first.signature}")
        first.brought[rank] = tensors
        self.begun[rank] += 1
        if len(first.brought) == self.size and self.draw.random() < 0.5:
            self._carry(first)
        self._hand_over(rank)
        return number

    def wait(self, rank: int, number: int) -> None:
        """Return when the collective is carried out."""
        call = self.calls[number]
        while not call.done:
            if len(call.brought) == self.size:
                self._carry(call)
            else:
                self._waits_for[rank] = number
                self._hand_over(rank)
                del self._waits_for[rank]
                if not call.done and len(call.brought) < self.size:
                    self._raise_if_broken(call, number)

    def _carry(self, call: Call) -> None:
        for earlier in self.calls:  # they are in order
            if not earlier.done:
                earlier.carry(earlier.brought)
                earlier.done = True
            if earlier is call:
                return

    def _raise_if_broken(self, call: Call, number: int) -> None:
        if self.said:
            raise peer_error(call.signature[0], number, self.size, self.said, Simulated.timeout)

    def _next(self) -> int:
        """Who goes on. Where all wait for a rank that does not come, their time is up."""
        living = [rank for rank in range(self.size) if rank not in self._ended]
        ready = [rank for rank in living if self._is_ready(rank)]
        if not ready:
            for rank, number in self._waits_for.items():
                self.said[rank] = Said(WAITS, number, self.calls[number].signature[0])
        return self.draw.choice(ready or living)

    def _is_ready(self, rank: int) -> bool:
        number = self._waits_for.get(rank)
        if number is None or self.said:
            return True
        return self.calls[number].done or len(self.calls[number].brought) == self.size

    def _hand_over(self, rank: int) -> None:
        self._rests.set()
        self._goes[rank].wait()
        self._goes[rank].clear()

    def _play(self, body: Callable[[Communicator], Any], rank: int) -> None:
        self._goes[rank].wait()
        self._goes[rank].clear()
        try:
            self.outcomes[rank] = body(Simulated(self, rank))
        except BaseException as error:
            self.outcomes[rank] = error
        self._ended.add(rank)
        self._rests.set()


class Simulated(Communicator):
    """One rank of a :class:`World`."""

    timeout = 1.0

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def all_reduce_max_(self, buffer: torch.Tensor) -> None:
        self._reduce("all_reduce_max_", torch.maximum, buffer)

    def all_reduce_sum_(self, buffer: torch.Tensor) -> None:
        self._reduce("all_reduce_sum_", torch.add, buffer)

    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        self.start_all_gather_(buffer, counts)()

    def start_all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> Wait:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)

        def carry(brought: dict[int, tuple[torch.Tensor, ...]]) -> None:
            parts = [brought[r][0].split(chunks)[r].clone() for r in range(self.size)]
            for (whole,) in brought.values():
                torch.cat(parts, out=whole)

        return self._start(("all_gather_", *chunks), carry, flat)

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Parts = None, sent: Parts = None
    ) -> Wait:
        out, flat, takes, gives = buffers.exchange_operands(
            output, buffer, received, sent, self.size
        )
        sizes = torch.tensor([takes, gives], dtype=torch.int64, device="cpu")

        def carry(brought: dict[int, tuple[torch.Tensor, ...]]) -> None:
            parts = {r: flat.split(sizes[1].tolist()) for r, (_, flat, sizes) in brought.items()}
            arriving = {r: torch.cat([parts[s][r] for s in range(self.size)]) for r in brought}
            for rank, (out, _, sizes) in brought.items():
                assert len(arriving[rank]) == int(sizes[0].sum())
                out.copy_(arriving[rank])

        return self._start(("all_to_all",), carry, out, flat, sizes)

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        flat = buffers.broadcast_operand(buffer, root, self.size)

        def carry(brought: dict[int, tuple[torch.Tensor, ...]]) -> None:
            for (other,) in brought.values():
                other.copy_(brought[root][0])

        self._start(("broadcast_", root, flat.numel()), carry, flat)()

    def barrier(self) -> None:
        self._start(("barrier",), lambda brought: None)()

    def announce(self, error: BaseException) -> None:
        if self.world.announces and not isinstance(error, Killed):
            count = self.world.begun[self.rank]
            self.world.said.setdefault(self.rank, Said(RAISED, count, told(error)))

    def _reduce(
        self, what: str, combine: Callable[..., torch.Tensor], buffer: torch.Tensor
    ) -> None:
        flat = buffers.reduce_operand(what, buffer)

        def carry(brought: dict[int, tuple[torch.Tensor, ...]]) -> None:
            total = brought[0][0].clone()
            for rank in range(1, self.size):
                combine(total, brought[rank][0], out=total)
            for (each,) in brought.values():
                each.copy_(total)

        self._start((what, flat.dtype, flat.numel()), carry, flat)()

    def _start(
        self,
        signature: tuple[Any, ...],
        carry: Callable[[dict[int, tuple[torch.Tensor, ...]]], None],
        *tensors: torch.Tensor,
    ) -> Wait:
        number = self.world.begin(self.rank, Call(signature, carry), *tensors)
        return lambda: self.world.wait(self.rank, number)
