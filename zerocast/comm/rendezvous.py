"""ThreadWorld and ThreadGroup: let threads that act as ranks wait for each other without a
deadlock.

A :class:`ThreadWorld` is all threads of one run, a :class:`ThreadGroup` some of them, which
exchange objects repeatedly, each time in a *rendezvous*. It takes place when the last member has
called: that thread combines all contributions, then all go on.

The world records which ranks wait and which have returned. When no rank is running, no rendezvous
that lacks a member can take place any more, so a deadlock is found at once and not by a timeout:
every waiting rank raises an error that says which ranks wait for what. The timeout is for ranks
that run and do not call.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from zerocast.comm.failure import described, name
from zerocast.errors import PeerFailedError, PeerTimeoutError, RankMismatchError, ZerocastError


class ThreadWorld:
    """All ranks of one run.

    Attributes:
        size: the number of ranks that started.
        timeout: the seconds that a rank waits for others.
        released: the ranks that raised :class:`PeerFailedError`.
        broken_at: when no further rendezvous could take place, by ``time.monotonic``.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = min(timeout, threading.TIMEOUT_MAX)
        self.released: set[int] = set()
        self.condition = threading.Condition()  # one for all groups: it guards every field here
        self.waiting: dict[int, object] = {}  # rank -> what it waits in
        self._returned: set[int] = set()
        self._raised: dict[int, str] = {}
        self._broken: tuple[type[ZerocastError], str] | None = None
        self.broken_at = math.inf

    def leave(self, rank: int) -> None:
        """Note that ``rank`` has returned and takes part in no further rendezvous."""
        with self.condition:
            self._returned.add(rank)
            self.look_for_deadlock()

    def announce(self, rank: int, error: BaseException) -> None:
        """Note that ``rank`` has raised ``error``, for the message of ranks that wait for it."""
        with self.condition:
            self._raised[rank] = described(error)

    def fail(self, who: str, error: BaseException) -> None:
        """Note that ``who`` has raised ``error``: ranks that wait, now or later, raise an error."""
        with self.condition:
            self._break(PeerFailedError, f"{who} raised {type(error).__name__}: {error}")

    def give_up(self, members: Sequence[int], what: object) -> None:
        """Break the world because ``members`` have not all come to ``what`` in time."""
        states: dict[str, list[int]] = {}
        for rank in members:
            here = self.waiting.get(rank)
            state = "waited in it" if str(here) == str(what) else f"waited in {here}"
            if here is None:
                state = "has returned" if rank in self._returned else "did not call it"
                state = f"raised {self._raised[rank]}" if rank in self._raised else state
            states.setdefault(state, []).append(rank)
        text = "; ".join(f"{name(ranks)} {state}" for state, ranks in states.items())
        self._break(
            PeerTimeoutError,
            f"{what} did not end within the communicator's timeout of {self.timeout:g} s: {text}.",
        )

    def look_for_deadlock(self) -> None:
        """Break the world if every rank waits or has returned, and at least one waits."""
        if not self.waiting or len(self.waiting) + len(self._returned) < self.size:
            return
        states = {rank: f"waits in {what}" for rank, what in self.waiting.items()}
        states |= dict.fromkeys(self._returned, "has returned")
        why = {r: text for r, text in self._raised.items() if r in self._returned}
        if why:
            listed = "; ".join(f"rank {rank} raised {text}" for rank, text in why.items())
            self._break(PeerFailedError, f"no rank can continue: {listed}.")
            return
        text = "; ".join(f"rank {rank} {states[rank]}" for rank in sorted(states)[:8])
        more = f"; and {self.size - 8} more" if self.size > 8 else ""
        self._break(
            RankMismatchError,
            "every rank of a group must call the same collectives in the same order, but no rank "
            f"can continue: {text}{more}.",
        )

    def check(self, rank: int) -> None:
        """Raise on ``rank`` what has broken the world, if anything has."""
        if self._broken is not None:
            kind, message = self._broken
            if kind is PeerFailedError:
                self.released.add(rank)
            raise kind(message)

    def _break(self, kind: type[ZerocastError], message: str) -> None:
        if self._broken is None:
            self._broken, self.broken_at = (kind, message), time.monotonic()
        self.condition.notify_all()


class ThreadGroup:
    """A group of a world's ranks.

    Args:
        world: the world that the ranks belong to.
        members: their ranks in the world; a member's place in this list is its rank in the group.
    """

    def __init__(self, world: ThreadWorld, members: Sequence[int]) -> None:
        self.world = world
        self.members = members
        self._brought: list[Any] = [None] * len(members)
        self._arrived = 0
        self._held = 0  # rendezvous so far
        self._outcome: Any = None

    def rendezvous(
        self, place: int, what: object, brings: Any, begin: Callable[[list[Any]], Any]
    ) -> Any:
        """Wait for all members; return what ``begin`` made of their contributions.

        Args:
            place: this member's place in the group.
            what: the call; its ``str`` follows "rank 3 waits in" in a message.
            brings: its contribution.
            begin: called once, by the last to arrive, with all contributions by place. It must not
                raise, and should be quick: all ranks of the world wait meanwhile.

        Raises:
            PeerFailedError: where another rank raised.
            PeerTimeoutError: where not all have come within the world's timeout.
            RankMismatchError: where it cannot take place because ranks wait for each other.
        """
        rank, world = self.members[place], self.world
        with world.condition:
            world.check(rank)
            self._brought[place] = brings
            self._arrived += 1
            if self._arrived == len(self.members):
                outcome = self._outcome = begin(self._brought)
                self._brought = [None] * len(self.members)
                self._arrived = 0
                self._held += 1
                for member in self.members:
                    world.waiting.pop(member, None)
                world.condition.notify_all()
                return outcome
            awaited = self._held
            world.waiting[rank] = what
            world.look_for_deadlock()
            deadline = time.monotonic() + world.timeout
            while self._held == awaited:
                world.check(rank)
                if not world.condition.wait(deadline - time.monotonic()) and self._held == awaited:
                    world.give_up(self.members, what)
            # Not yet replaced: the next rendezvous needs this rank too.
            return self._outcome


def one_error(errors: dict[int, BaseException], released: set[int]) -> BaseException:
    """Return the lowest rank's own error, with different ones of other ranks as its context."""
    own = [errors[rank] for rank in sorted(errors) if rank not in released]
    own = own or [errors[min(errors)]]  # the rank that raised first may be stuck
    chain, texts = _chain(own[0]), {repr(own[0])}
    for error in own[1:]:
        if repr(error) not in texts:
            texts.add(repr(error))
            chain[-1].__context__, chain[-1].__suppress_context__ = error, False
            chain = _chain(own[0])
    return own[0]


def _chain(error: BaseException) -> list[BaseException]:
    """Return ``error`` and what a traceback prints with it, the innermost last."""
    chain = [error]
    while True:
        last = chain[-1]
        before = last.__context__ if last.__cause__ is None else last.__cause__
        if before is None or before in chain:
            return chain
        chain.append(before)
