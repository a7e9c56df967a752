"""A world of ranks in which one thing happens at a time, in an order that a seed decides.

Each rank is a thread, and one of them runs. In a collective it hands over to the scheduler, which
draws who goes on. A collective is carried out once all ranks have begun it, early or as late as
somebody waits for it; a rank that is ended never comes, and when nobody can go on any more, the
time is up for those that wait. So a seed stands for one schedule with one fault, and gives the same
run again.

What ranks do is noted: their collectives by the functions of zerocast that make them, and what else
is told of. A fault is planted at one of these events.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from zerocast.comm import Communicator, buffers
from zerocast.comm.communicator import Parts, Wait
from zerocast.comm.failure import RAISED, WAITS, Said, peer_error, told

Brought: TypeAlias = Sequence[tuple[Any, ...]]
"""By rank its tensors, and what says how they are cut."""

LOCAL = threading.local()
"""By thread the world and the rank that it runs."""

HELPERS = ("raise_in_all", "agree_in_all")
"""Functions outside of zerocast.comm that make collectives for their callers."""


class Killed(BaseException):
    """Ends a rank, which says nothing to the others."""


class Differ(AssertionError):
    """Ranks that are in different collectives: on a real transport bytes that go astray."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        rank: with which rank.
        place: at the earliest at which of its events.
        kind: what; what else than "dies" is, those decide who note such an event.
        at: what the event's name matches.
    """

    rank: int
    place: int
    kind: str
    at: str = ".*"


@dataclass(eq=False)
class Call:
    """One collective, as it is begun by rank after rank.

    Attributes:
        signature: what all ranks must call.
        carry: moves the bytes of all ranks.
        brought: by rank what it is called with.
        done: whether the bytes have been moved.
    """

    signature: tuple[Any, ...]
    carry: Callable[[Brought], None]
    brought: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    done: bool = False


class World:
    """The ranks and their scheduler.

    Args:
        size: the number of ranks.
        draw: decides what is left open.
        fault: what goes wrong, once.
        announces: whether the transport tells the others of a rank's error.

    Attributes:
        calls: the collectives, in the order in which they are begun.
        begun: by rank how many it has begun.
        said: by rank what the others know of why it does not go on. Once somebody has said
            something, no collective is carried out any more that some rank has not begun yet.
        events: rank, name and fault of each.
    """

    def __init__(self, size: int, draw: random.Random, fault: Fault, *, announces: bool) -> None:
        self.size, self.draw, self.announces = size, draw, announces
        self.calls: list[Call] = []
        self.begun = [0] * size
        self.said: dict[int, Said] = {}
        self.events: list[tuple[int, str, str]] = []
        self._fault, self._seen = fault, [0] * size
        self._waits_for: dict[int, int] = {}
        self._outcomes: dict[int, Any] = {}
        self._goes = [threading.Event() for _ in range(size)]

    def run(self, body: Callable[[Communicator], Any]) -> list[Any]:
        """What ``body`` returns or raises, by rank."""
        threads = [
            threading.Thread(target=self._play, args=(body, rank), daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        self._go_on()
        for thread in threads:
            thread.join()
        return [self._outcomes[rank] for rank in range(self.size)]

    def note(self, rank: int, name: str) -> str:
        """Note what a rank does now; return what goes wrong with it."""
        place, fault, kind = self._seen[rank], self._fault, ""
        self._seen[rank] += 1
        if fault.rank == rank and place >= fault.place and re.fullmatch(fault.at, name):
            kind, self._fault = fault.kind, replace(fault, rank=-1)
        self.events.append((rank, name, kind))
        if kind == "dies":
            raise Killed
        return kind

    def begin(self, rank: int, call: Call, *brought: Any) -> Wait:
        """Begin the rank's next collective."""
        number = self.begun[rank]
        self._raise_if_broken(call, number)
        if self.note(rank, f"{_caller()}: {call.signature[0]}"):
            raise OSError("planted")
        if number == len(self.calls):
            self.calls.append(call)
        first = self.calls[number]
        if first.signature != call.signature:
            raise Differ(f"rank {rank} calls {call.signature}, another one {first.signature}")
        first.brought[rank] = brought
        self.begun[rank] += 1
        if len(first.brought) == self.size and self.draw.random() < 0.5:
            self._carry(first)
        self._hand_over(rank)
        return lambda: self._wait(rank, number)

    def _wait(self, rank: int, number: int) -> None:
        """Return when the collective is carried out. What waits in no rank's own thread is an
        optimizer that is collected, which nobody has any more.
        """
        call = self.calls[number]
        while not call.done and getattr(LOCAL, "rank", None) == (self, rank):
            if len(call.brought) == self.size:
                self._carry(call)
            else:
                self._waits_for[rank] = number
                self._hand_over(rank)
                del self._waits_for[rank]
                if not call.done and len(call.brought) < self.size:
                    self._raise_if_broken(call, number)

    def _carry(self, call: Call) -> None:
        for earlier in self.calls[: self.calls.index(call) + 1]:  # they are in order
            if not earlier.done:
                earlier.carry([earlier.brought[rank] for rank in range(self.size)])
                earlier.done = True

    def _raise_if_broken(self, call: Call, number: int) -> None:
        if self.said:
            raise peer_error(call.signature[0], number, self.size, self.said, Simulated.timeout)

    def _go_on(self) -> None:
        """Let a rank go on. Where all wait for one that does not come, their time is up."""
        living = [rank for rank in range(self.size) if rank not in self._outcomes]
        ready = [rank for rank in living if self._is_ready(rank)]
        for rank, number in self._waits_for.items() if not ready else ():
            self.said[rank] = Said(WAITS, number, self.calls[number].signature[0])
        if living:
            self._goes[self.draw.choice(ready or living)].set()

    def _is_ready(self, rank: int) -> bool:
        call = self.calls[self._waits_for[rank]] if rank in self._waits_for else None
        return not call or bool(self.said) or call.done or len(call.brought) == self.size

    def _hand_over(self, rank: int) -> None:
        self._go_on()
        self._goes[rank].wait()
        self._goes[rank].clear()

    def _play(self, body: Callable[[Communicator], Any], rank: int) -> None:
        LOCAL.rank = self, rank
        self._goes[rank].wait()
        self._goes[rank].clear()
        try:
            self._outcomes[rank] = body(Simulated(self, rank))
        except BaseException as error:
            self._outcomes[rank] = error
        self._go_on()


def _caller() -> str:
    """The function of zerocast that makes the collective which is begun just now."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module, name = frame.f_globals["__name__"].split("."), frame.f_code.co_name
        if module[0] == "zerocast" and module[1] != "comm" and name not in HELPERS:
            return f"{module[-1]}.{name}"
        frame = frame.f_back
    return "the caller"


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

        def carry(brought: Brought) -> None:
            parts = [each.split(chunks)[r].clone() for r, (each,) in enumerate(brought)]
            for (whole,) in brought:
                torch.cat(parts, out=whole)

        return self.world.begin(self.rank, Call(("all_gather_", *chunks), carry), flat)

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Parts = None, sent: Parts = None
    ) -> Wait:
        operands = buffers.exchange_operands(output, buffer, received, sent, self.size)

        def carry(brought: Brought) -> None:
            parts = [flat.split(gives) for _, flat, _, gives in brought]
            arriving = [torch.cat(arrived) for arrived in zip(*parts, strict=True)]
            for r, (out, _, takes, _) in enumerate(brought):
                assert [len(each[r]) for each in parts] == list(takes)
                out.copy_(arriving[r])

        return self.world.begin(self.rank, Call(("all_to_all",), carry), *operands)

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        flat = buffers.broadcast_operand(buffer, root, self.size)

        def carry(brought: Brought) -> None:
            for (other,) in brought:
                other.copy_(brought[root][0])

        self.world.begin(self.rank, Call(("broadcast_", root, flat.numel()), carry), flat)()

    def barrier(self) -> None:
        raise NotImplementedError

    def announce(self, error: BaseException) -> None:
        if self.world.announces and not isinstance(error, Killed):
            count = self.world.begun[self.rank]
            self.world.said.setdefault(self.rank, Said(RAISED, count, told(error)))

    def _reduce(
        self, what: str, combine: Callable[..., torch.Tensor], buffer: torch.Tensor
    ) -> None:
        flat = buffers.reduce_operand(what, buffer)

        def carry(brought: Brought) -> None:
            total = functools.reduce(combine, [each for (each,) in brought])
            for (each,) in brought:
                each.copy_(total)

        self.world.begin(self.rank, Call((what, flat.dtype, flat.numel()), carry), flat)()
