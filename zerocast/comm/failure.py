"""Failure: how long ranks wait for each other, and what those that wait in vain are told.

Every collective ends: with its result, or with an error on every rank that is still there. A rank
that waits longer than its communicator's timeout gives up and says so to the others, who then give
up too. A rank that raises something in the middle of a cast or a step says what, by
:func:`announcing`. How ranks say it, each transport knows by itself; what they make of it is here.

NOT here: errors that all ranks agree on, after which the group goes on
(:mod:`zerocast.comm.agreement`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
"""The most seconds in which others can say where they are, before an error says it of them."""

WAITS, LOST, LATE, RAISED, MISMATCH, LEFT = "waits", "lost", "late", "raised", "mismatch", "left"
"""What a rank can say of itself."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a rank has told the others of itself.

    Attributes:
        kind: :data:`WAITS`, it has given up in a collective; :data:`LOST`,
            so has the transport, a connection being lost; :data:`LATE`, it came when others
            had; :data:`RAISED`, an exception ended what it did; :data:`MISMATCH`, it has seen two
            ranks call different collectives; :data:`LEFT`, its process ends.
        count: how many collectives of the group it has begun.
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
    """Return what a rank raises whose collective does not end.

    Args:
        call: the collective that this rank waits in.
        count: its place among the group's collectives.
        size: of the group.
        said: by rank what it has told, this rank's own words included.
        timeout: the communicator's.
        seen: what the transport says of it, if it does.
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


@contextmanager
def announcing(comms: Sequence[Communicator]) -> Iterator[None]:
    """Tell the ranks of ``comms`` of an exception that ends the context and that they cannot know
    of: any but a :class:`ZerocastError`, which they raise as well, unless it came out of
    :func:`alone`.
    """
    try:
        yield
    except BaseException as error:  # an interrupt, too: the others must not wait for this rank
        if not isinstance(error, ZerocastError) or error.is_alone:
            for comm in comms:
                comm.announce(error)
        raise


@contextmanager
def alone() -> Iterator[None]:
    """A context without collectives and without an :class:`Attempt`: what it raises, other ranks
    learn of by :func:`announcing` only.
    """
    try:
        yield
    except ZerocastError as error:
        error.is_alone = True
        raise
