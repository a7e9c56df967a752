"""Limits how long ranks wait for each other, and makes the errors of ranks that time out.

Every collective ends: with its result, or with an error on every rank that still runs. A rank that
waits longer than its communicator's timeout stops waiting and notifies the others, which then stop,
too. A rank that raises an exception in the middle of a cast or a step notifies them by
:class:`announcing`. Each transport has its own channel for these states; the errors that follow
from them are made here.

NOT here: errors that all ranks agree on, after which the group goes on
(:mod:`zerocast.comm.agreement`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass

from zerocast.comm.communicator import Communicator
from zerocast.errors import (
    InputError,
    PeerFailedError,
    PeerTimeoutError,
    RankMismatchError,
    ZerocastError,
)

DEFAULT_TIMEOUT = 600.0
"""Seconds, as NCCL's groups wait: for the slowest rank's checkpoint, or its first compilation."""

GRACE = 1.0
"""The most seconds in which others can report their states, before an error is raised."""

TIMED_OUT, DISCONNECTED, LATE = "timed out", "disconnected", "late"
RAISED, MISMATCH, EXITED = "raised", "mismatch", "exited"
"""The states that a rank can report to the others."""


@dataclass(frozen=True, slots=True)
class RankState:
    """The state that a rank has reported to the others.

    Attributes:
        kind: :data:`TIMED_OUT`, it has waited too long in a collective; :data:`DISCONNECTED`, the
            transport has ended its collective, because a connection is lost; :data:`LATE`, it
            called a collective after others had timed out; :data:`RAISED`, an exception ended its
            work; :data:`MISMATCH`, it has seen two ranks call different collectives;
            :data:`EXITED`, its process ends.
        count: the number of collectives of the group that it has begun.
        text: the collective, or the message.
    """

    kind: str
    count: int
    text: str


def check_timeout(timeout: object) -> float:
    """Return the seconds that a user gave. :class:`InputError` for anything but a positive number;
    ``math.inf`` waits for ever.
    """
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or math.isnan(timeout) or timeout <= 0:  # type: ignore[arg-type,operator]
        raise InputError(
            f"timeout must be a positive number of seconds, or math.inf, got {timeout!r}."
        )
    return float(timeout)  # type: ignore[arg-type]


def described(error: BaseException) -> str:
    """Return the text by which other ranks learn of an exception."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def grace(timeout: float) -> float:
    """Return the seconds at the end of a ``timeout`` in which ranks say where they are."""
    return min(GRACE, timeout / 4)


def peer_error(
    call: str,
    count: int,
    size: int,
    states: Mapping[int, RankState],
    timeout: float,
    seen: str = "",
) -> ZerocastError:
    """Return the error of a rank whose collective does not end.

    Args:
        call: the collective that this rank waits in.
        count: its place among the group's collectives.
        size: the size of the group.
        states: the states that ranks have reported, by rank, this rank's included.
        timeout: the communicator's.
        seen: the transport's own message, if there is one.
    """
    mismatch = next((each.text for each in states.values() if each.kind == MISMATCH), None)
    if mismatch is not None:
        return RankMismatchError(mismatch)
    why = {rank: each for rank, each in states.items() if each.kind in (RAISED, EXITED)}
    alike: dict[str, list[int]] = {}
    for rank in why or range(size):
        alike.setdefault(_in_words(states.get(rank), call, count), []).append(rank)
    listed = "; ".join(f"{name(ranks)} {text}" for text, ranks in alike.items())
    broken = bool(why or seen) or any(each.kind == DISCONNECTED for each in states.values())
    within = "" if broken else f" within the communicator's timeout of {timeout:g} s"
    because = f" ({seen})" if seen else ""
    kind = PeerFailedError if broken else PeerTimeoutError
    return kind(
        f"{call}, collective {count} of a group of {size}, did not end{within}{because}: {listed}. "
        "Make a new group, new plans and new optimizers, and continue from the last checkpoint."
    )


def _in_words(state: RankState | None, call: str, count: int) -> str:
    if state is None:
        return "neither called it nor answered"
    if state.kind == LATE:
        return "called it later"
    if state.kind in (TIMED_OUT, DISCONNECTED):
        same = (state.count, state.text) == (count, call)
        return "waited in it" if same else f"waited in {state.text}, collective {state.count}"
    return f"raised {state.text}" if state.kind == RAISED else "has ended"


def name(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0, 2, 3``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class announcing:
    """Notifies the ranks of ``comms`` of an exception that ends the context, unless they raise it,
    too: a :class:`ZerocastError` that did not come out of :class:`alone`.
    """

    def __init__(self, comms: Sequence[Communicator]) -> None:
        self._comms = comms

    def __enter__(self) -> None:
        """Begin what other ranks are notified of."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # An interrupt, too: the others must not wait for this rank.
        if error is not None and (not isinstance(error, ZerocastError) or error.is_alone):
            for comm in self._comms:
                comm.announce(error)


class alone(ContextDecorator):
    """Marks errors of the context as this rank's alone, which others learn of by
    :class:`announcing` only. The context has no collectives and no :class:`Attempt`.
    """

    def __enter__(self) -> None:
        """Begin what this rank does alone."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ZerocastError):
            error.is_alone = True
