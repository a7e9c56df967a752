"""Limits how long ranks wait for each other, and makes the errors of ranks that have waited in
vain.

Every collective ends: with its result, or with an error on every rank that is still there. A rank
that waits longer than its communicator's timeout gives up and tells the others, which then give up,
too. A rank that raises an exception in the middle of a cast or a step tells them by
:class:`announcing`. Each transport sends these states in its own way; the errors that follow from
them are made here.

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
"""The most seconds in which others can tell their states, before an error is raised."""

WAITS, LOST, LATE, RAISED, MISMATCH, LEFT = "waits", "lost", "late", "raised", "mismatch", "left"
"""The states that a rank can tell the others."""


@dataclass(frozen=True, slots=True)
class Said:
    """The state that a rank has told the others.

    Attributes:
        kind: :data:`WAITS`, it has given up in a collective; :data:`LOST`, so has the transport,
            because a connection is lost; :data:`LATE`, it called a collective after others had
            given up; :data:`RAISED`, an exception ended its work; :data:`MISMATCH`, it has seen two
            ranks call different collectives; :data:`LEFT`, its process ends.
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


def told(error: BaseException) -> str:
    """Return what other ranks are told of an exception."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def grace(timeout: float) -> float:
    """Return the seconds at the end of a ``timeout`` in which ranks say where they are."""
    return min(GRACE, timeout / 4)


def peer_error(
    call: str, count: int, size: int, said: Mapping[int, Said], timeout: float, seen: str = ""
) -> ZerocastError:
    """Return the error of a rank whose collective does not end.

    Args:
        call: the collective that this rank waits in.
        count: its place among the group's collectives.
        size: the size of the group.
        said: the states that ranks have told, by rank, this rank's included.
        timeout: the communicator's.
        seen: the transport's own message, if there is one.
    """
    mismatch = next((words.text for words in said.values() if words.kind == MISMATCH), None)
    if mismatch is not None:
        return RankMismatchError(mismatch)
    why = {rank: words for rank, words in said.items() if words.kind in (RAISED, LEFT)}
    states: dict[str, list[int]] = {}
    for rank in why or range(size):
        states.setdefault(_state(said.get(rank), call, count), []).append(rank)
    listed = "; ".join(f"{name(ranks)} {state}" for state, ranks in states.items())
    broken = bool(why or seen) or any(words.kind == LOST for words in said.values())
    within = "" if broken else f" within the communicator's timeout of {timeout:g} s"
    because = f" ({seen})" if seen else ""
    kind = PeerFailedError if broken else PeerTimeoutError
    return kind(
        f"{call}, collective {count} of a group of {size}, did not end{within}{because}: {listed}. "
        "Make a new group, and plans and optimizers with it, and go on from the last checkpoint."
    )


def _state(said: Said | None, call: str, count: int) -> str:
    if said is None:
        return "neither came nor answered"
    if said.kind == LATE:
        return "came later"
    if said.kind in (WAITS, LOST):
        same = (said.count, said.text) == (count, call)
        return "waited in it" if same else f"waited in {said.text}, collective {said.count}"
    return f"raised {said.text}" if said.kind == RAISED else "has ended"


def name(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0, 2, 3``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class announcing:
    """Tells the ranks of ``comms`` of an exception that ends the context, unless they raise it,
    too: a :class:`ZerocastError` that did not come out of :class:`alone`.
    """

    def __init__(self, comms: Sequence[Communicator]) -> None:
        self._comms = comms

    def __enter__(self) -> None:
        """Begin what ranks are told of."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # An interrupt, too: the others must not wait for this rank.
        if error is not None and (not isinstance(error, ZerocastError) or error.is_alone):
            for comm in self._comms:
                comm.announce(error)


class alone(ContextDecorator):
    """Marks errors of the context as this rank's alone, which it tells others by
    :class:`announcing` only. The context has no collectives and no :class:`Attempt`.
    """

    def __enter__(self) -> None:
        """Begin what this rank does alone."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ZerocastError):
            error.is_alone = True
