"""Peers: the states of a group's other ranks, each a process, as one process knows them.

All communicators of one group in a process share one object, because they share the order of its
collectives. A transport adds how ranks exchange their states.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from zerocast.comm.failure import (
    DISCONNECTED,
    GRACE,
    LATE,
    MISMATCH,
    RAISED,
    TIMED_OUT,
    RankState,
    described,
    grace,
    peer_error,
)
from zerocast.errors import PeerFailedError, RankMismatchError, ZerocastError

Begin: TypeAlias = Callable[[], Sequence[Any]]
"""Begins a collective, and returns the transport's requests of it."""

HEADER = 96
"""Bytes by which ranks compare what they call."""

MAXIMA = 8
"""The most numbers, int32, whose maxima travel with what ranks call."""

_NUMBERS = struct.calcsize("i") * (MAXIMA + 2)
"""Bytes of these and of the two that say whether ranks share a node."""


@dataclass(slots=True)
class Call:
    """A collective that this rank makes.

    Attributes:
        text: a description of the call, the same on every rank.
        count: its place among the group's collectives.
        timeout: seconds to wait for others.
        begun: when this rank called it.
        raised: the count that this rank reported with its last exception, if any: the same on all
            ranks that go on from it together.
        requests: the requests of all that is sent and received for it.
        failure_seen_at: when this rank learned that another makes no further collectives.
    """

    text: str
    count: int
    timeout: float
    begun: float
    raised: int | None = None
    requests: list[Any] = field(default_factory=list)
    failure_seen_at: float | None = None

    @property
    def header(self) -> bytes:
        """The bytes that other ranks compare with their own."""
        after = "" if self.raised is None else f", after an error in {self.raised}:"
        return f"{self.count}{after} {self.text}".encode()[:HEADER].ljust(HEADER)


def node() -> str:
    """Return what identifies this process's node: its host's name and, on Linux, the start of its
    kernel and its namespace of processes. It is read each time, because a process may be a copy of
    one elsewhere.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


class Peers(ABC):
    """The other ranks of one group, as one process sees them.

    Attributes:
        share_node: whether all ranks are known to be on one node, where each knows the others'
            processes by the same numbers. They exchange that with maxima at the latest, so all
            ranks know it at the same time.
        reads_memory: False once a rank is known to be unable to read the memory of another; the
            same on all ranks.
    """

    _polls_first: ClassVar[bool] = True
    """Whether a rank polls when it calls a collective, and not only while it waits."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._node = zlib.crc32(node().encode()) >> 1
        self.share_node, self.reads_memory = False, True
        self._count = 0
        self._states: dict[int, RankState] = {}
        self._failure: ZerocastError | None = None

    def announce(self, error: BaseException) -> None:
        """Notify the others of what keeps this rank from the next collective."""
        if self._failure is None:
            self._publish(RankState(RAISED, self._count, described(error)))

    # --- a transport's own ---

    @abstractmethod
    def maxima(self, call: str, numbers: Sequence[int], timeout: float) -> list[int]:
        """Return the largest of all ranks' numbers, int32, place by place, at most :data:`MAXIMA`;
        raise as a collective of the text ``call``.
        """

    @abstractmethod
    def _send(self, state: RankState) -> None:
        """Send ``state`` to all other ranks without waiting for them."""

    @abstractmethod
    def _poll(self) -> None:
        """Store in ``_states`` what other ranks have reported."""

    @abstractmethod
    def _keep(self, made: Call, memory: Any) -> None:
        """Keep the memory that an abandoned collective may still read and write."""

    @abstractmethod
    def _seen(self, error: BaseException) -> str | None:
        """Return the transport's message if ``error`` is one of its exceptions; else None."""

    # --- the course of a collective ---

    def _call(self, text: str, timeout: float) -> Call:
        """Begin to call a collective; raise where it cannot come to an end."""
        own = self._states.get(self._rank)
        raised = own.count if own is not None and own.kind == RAISED else None
        made = Call(text, self._count + 1, timeout, time.monotonic(), raised)
        if self._polls_first:
            self._poll()
        self._check_peers(made, LATE)
        return made

    def _check_peers(self, made: Call, kind: str = TIMED_OUT) -> None:
        """Raise if, by the states received, the collective cannot be expected to end; then this
        rank reports ``kind`` to the others.
        """
        if self._failure is not None:
            raise PeerFailedError(
                f"{made.text} cannot end after a failure of its group: {self._failure}"
            )
        stopped, now = self._stopped_after(), time.monotonic()
        if stopped is not None:
            # A rank that raised after it had begun this collective may still complete it.
            made.failure_seen_at = made.failure_seen_at or now
            if stopped < made.count or now - made.failure_seen_at > GRACE:
                raise self._fail(made, kind=kind)
        if now - made.begun > made.timeout - grace(made.timeout):
            raise self._fail(made)

    def _stopped_after(self) -> int | None:
        """Return the fewest collectives begun by a rank that makes no further ones; None if there
        is no such rank.
        """
        own = self._states.get(self._rank)
        here = own and (own.kind, own.count)
        return min(
            (
                state.count if state.kind == RAISED else 0
                for rank, state in self._states.items()
                # Ranks that all raise at the same place can continue from there together.
                if rank != self._rank and (state.kind, state.count) != here
            ),
            default=None,
        )

    def _numbers(self, given: Sequence[int]) -> list[int]:
        """Return the numbers whose maxima are exchanged: those given, and two of this node."""
        return [*given, self._node, -self._node]

    def _learn(self, largest: Sequence[int]) -> list[int]:
        """Record whether ranks share a node; return the maxima of the numbers given."""
        *found, last, first = largest
        self.share_node = last == -first
        return found

    @staticmethod
    def _message(made: Call, numbers: Sequence[int] = ()) -> bytearray:
        """Return the message of a call, of the same length for any numbers."""
        return bytearray(made.header + struct.pack(f"{len(numbers)}i", *numbers).ljust(_NUMBERS))

    @staticmethod
    def _numbers_in(message: bytearray, count: int) -> tuple[int, ...]:
        """Return the numbers of another rank's message."""
        return struct.unpack_from(f"{count}i", message, HEADER)

    def _check_message(self, made: Call, message: bytearray, rank: int) -> None:
        """Raise where another rank's message is not of this call."""
        theirs = message[:HEADER]
        if theirs == made.header:
            return
        called, own = (bytes(b).decode(errors="replace").strip() for b in (theirs, made.header))
        text = (
            f"every rank of a group must call the same collectives in the same order: rank {rank} "
            f"called as number {called}, where rank {self._rank} called as number {own}."
        )
        self._publish(RankState(MISMATCH, made.count, text))
        self._failure = RankMismatchError(text)
        raise self._failure

    @contextmanager
    def _failing(self, made: Call, memory: Any) -> Iterator[None]:
        """Mark the group as failed if the context raises an exception."""
        try:
            yield
        except BaseException as error:
            self._keep(made, memory)
            seen = self._seen(error)
            if seen is not None:
                raise self._fail(made, seen, kind=DISCONNECTED) from error
            self.announce(error)
            text = f"{made.text} was left by {described(error)}"
            self._failure = self._failure or PeerFailedError(text)
            raise

    def _fail(self, made: Call, seen: str = "", *, kind: str = TIMED_OUT) -> ZerocastError:
        """Stop waiting, and notify the others; return the error, once they have had time to report
        their states.
        """
        if self._failure is None:
            self._publish(RankState(kind, made.count, made.text))
            until = time.monotonic() + grace(made.timeout)
            while time.monotonic() < until and not self._is_explained():
                time.sleep(1e-3)
                self._poll()
            self._failure = peer_error(
                made.text, made.count, self._size, self._states, made.timeout, seen
            )
        return self._failure

    def _is_explained(self) -> bool:
        """Say whether no further state could explain better why a collective does not end."""
        others = [state.kind for rank, state in self._states.items() if rank != self._rank]
        return len(others) == self._size - 1 or RAISED in others or MISMATCH in others

    def _publish(self, state: RankState) -> None:
        """Report ``state`` to every other rank, unless it was reported last."""
        if state != self._states.get(self._rank):
            self._states[self._rank] = state
            self._send(state)
