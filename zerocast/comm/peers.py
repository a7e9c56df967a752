"""Peers: what a process knows of the other ranks of a group that are processes, too.

All communicators of one group in a process share it, for they share the order of its collectives.
A transport adds how ranks hear of each other.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zerocast.comm.failure import (
    GRACE,
    LATE,
    LOST,
    MISMATCH,
    RAISED,
    WAITS,
    Said,
    grace,
    peer_error,
    told,
)
from zerocast.errors import PeerFailedError, RankMismatchError, ZerocastError

Begin: TypeAlias = Callable[[], Sequence[Any]]
"""Begins a collective, and returns the transport's requests of it."""

HEADER = 96
"""Bytes by which ranks compare what they call."""


@dataclass(slots=True)
class Call:
    """A collective that this rank makes.

    Attributes:
        text: what it is, the same on every rank.
        count: its place among the group's collectives.
        timeout: seconds to wait for others.
        begun: when this rank called it.
        requests: of all that is sent and received for it.
        heard_at: when this rank heard that another goes no further.
    """

    text: str
    count: int
    timeout: float
    begun: float
    requests: list[Any] = field(default_factory=list)
    heard_at: float | None = None

    @property
    def header(self) -> bytes:
        """What other ranks are sent of it."""
        return f"{self.count} {self.text}".encode()[:HEADER].ljust(HEADER)


class Peers(ABC):
    """The other ranks of one group, as one process sees them."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._count = 0
        self._said: dict[int, Said] = {}
        self._failure: ZerocastError | None = None

    def announce(self, error: BaseException) -> None:
        """Tell the others what keeps this rank from coming to the next collective."""
        if self._failure is None:
            self._tell(Said(RAISED, self._count, told(error)))

    # --- a transport's own ---

    @abstractmethod
    def _send(self, words: Said) -> None:
        """Bring ``words`` to all others without waiting for them."""

    @abstractmethod
    def _listen(self) -> None:
        """Take into ``_said`` what others have told."""

    @abstractmethod
    def _keep(self, made: Call, memory: Any) -> None:
        """Keep what a collective that is given up may still read and write."""

    @abstractmethod
    def _seen(self, error: BaseException) -> str | None:
        """Return what the transport says by ``error``; None for an exception that is not of it."""

    # --- the course of a collective ---

    def _call(self, text: str, timeout: float) -> Call:
        """Begin to call a collective; raise where it cannot come to an end."""
        made = Call(text, self._count + 1, timeout, time.monotonic())
        self._look(made, LATE)
        return made

    def _look(self, made: Call, kind: str = WAITS) -> None:
        """Raise where no end of a collective can be expected any more, saying ``kind`` of it."""
        if self._failure is not None:
            raise PeerFailedError(
                f"{made.text} cannot end after a failure of its group: {self._failure}"
            )
        self._listen()
        lost, now = self._lost(), time.monotonic()
        if lost is not None:
            # Who had begun this collective, and raised after it, may yet bring it to its end.
            made.heard_at = made.heard_at or now
            if lost < made.count or now - made.heard_at > GRACE:
                raise self._fail(made, kind=kind)
        if now - made.begun > made.timeout - grace(made.timeout):
            raise self._fail(made)

    def _lost(self) -> int | None:
        """Return the fewest collectives that a rank has begun which has said that it goes no
        further; None where none has.
        """
        own = self._said.get(self._rank)
        here = own and (own.kind, own.count)
        return min(
            (
                words.count if words.kind == RAISED else 0
                for rank, words in self._said.items()
                # Ranks that all raise at the same place can go on from there together.
                if rank != self._rank and (words.kind, words.count) != here
            ),
            default=None,
        )

    def _check_header(self, made: Call, theirs: bytes | bytearray, rank: int) -> None:
        """Raise where the header of another rank is not this rank's."""
        if theirs == made.header:
            return
        called, own = (bytes(b).decode(errors="replace").strip() for b in (theirs, made.header))
        text = (
            f"every rank of a group must call the same collectives in the same order: rank {rank} "
            f"called as number {called}, where rank {self._rank} called as number {own}."
        )
        self._tell(Said(MISMATCH, made.count, text))
        self._failure = RankMismatchError(text)
        raise self._failure

    @contextmanager
    def _failing(self, made: Call, memory: Any) -> Iterator[None]:
        """Let the group fail with whatever the context raises."""
        try:
            yield
        except BaseException as error:
            self._keep(made, memory)
            seen = self._seen(error)
            if seen is not None:
                raise self._fail(made, seen, kind=LOST) from error
            self.announce(error)
            text = f"{made.text} was left by {told(error)}"
            self._failure = self._failure or PeerFailedError(text)
            raise

    def _fail(self, made: Call, seen: str = "", *, kind: str = WAITS) -> ZerocastError:
        """Give up, and tell it; return the error, once others have had time to say what they do."""
        if self._failure is None:
            self._tell(Said(kind, made.count, made.text))
            until = time.monotonic() + grace(made.timeout)
            while time.monotonic() < until and not self._is_explained():
                time.sleep(1e-3)
                self._listen()
            self._failure = peer_error(
                made.text, made.count, self._size, self._said, made.timeout, seen
            )
        return self._failure

    def _is_explained(self) -> bool:
        """Say whether no rank's words could add to why a collective does not end."""
        others = [words.kind for rank, words in self._said.items() if rank != self._rank]
        return len(others) == self._size - 1 or RAISED in others or MISMATCH in others

    def _tell(self, words: Said) -> None:
        """Tell every other rank."""
        if words != self._said.get(self._rank):
            self._said[self._rank] = words
            self._send(words)
