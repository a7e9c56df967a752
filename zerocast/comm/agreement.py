"""Lets ranks agree: they exchange what only some of them know, before any rank acts on it.

An error that one rank raises alone leaves the others waiting in their next collective. So code that
may fail on one rank only runs inside :func:`raising_together`, which all ranks enter::

    with raising_together(comm):
        ...                                   # no collective in here

Where one collective is to agree on errors and on something else, the code runs inside an
:class:`Attempt`, whose error is given to a function such as :func:`agree`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from zerocast.comm.communicator import Communicator
from zerocast.comm.failure import name
from zerocast.errors import InputError, RankMismatchError, ZerocastError
from zerocast.versions import common_versions

_ERROR_VOTE = 2**31 - 1
_DIGEST_WORDS = 5
"""Words of 30 bits by which texts are compared; no word equals the vote of an error."""


_WRONG_ARGUMENT = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""The exceptions that Python and torch raise for an argument that was not checked."""


class Attempt:
    """Keeps an exception of its ``with`` block until ranks exchange their errors.

    Exceptions that end a program (``KeyboardInterrupt``, ``SystemExit``) are not kept.

    Attributes:
        error: None, or the :class:`ZerocastError` that the block raised. Any other exception is the
            cause of a new one, an :class:`InputError` if Python raises it for a wrong argument.
    """

    def __init__(self) -> None:
        self.error: ZerocastError | None = None

    def __enter__(self) -> None:
        """Begin the code that may fail."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if isinstance(error, ZerocastError):
            self.error = error
        else:
            known = InputError if isinstance(error, _WRONG_ARGUMENT) else ZerocastError
            self.error = known(f"{type(error).__name__}: {error}")
            self.error.__cause__ = error
        return True


def raise_together(comm: Communicator, error: ZerocastError | None, flag: bool = False) -> bool:
    """Collective: raise on every rank of ``comm`` if any has an ``error``, else on none; return
    whether any passed ``flag=True``.

    While no rank has an error it costs an all-reduce of one int32.

    Raises:
        ZerocastError: on all ranks, of the lowest failing rank's type, with one message that lists
            the errors by rank. On a group of one rank the error as it is.
    """
    return _highest(comm, [int(flag)], error) != [0]


@contextmanager
def raising_together(comm: Communicator) -> Iterator[None]:
    """Raise at the end of the context on every rank of ``comm`` what the context raised on any, as
    :func:`raise_together` does. Collective.
    """
    attempt = Attempt()
    with attempt:
        yield
    raise_together(comm, attempt.error)


def agree(comm: Communicator, answer: int, error: ZerocastError | None = None) -> bool:
    """Collective: return whether all ranks give the same ``answer``; raise if one has an ``error``.

    As :func:`raise_together`, with one int32 more in its single all-reduce.

    Args:
        answer: 0 or more and below 2**31 - 1.
        error: what went wrong on this rank, if anything.

    Raises:
        ZerocastError: as :func:`raise_together`.
    """
    if not 0 <= answer < _ERROR_VOTE:
        raise InputError(f"agree takes an answer from 0 to {_ERROR_VOTE - 1}, got {answer}.")
    return _all_same(comm, [answer], error)


def lines_that_differ(
    comm: Communicator, lines: Sequence[str], error: ZerocastError | None = None
) -> list[list[str]] | None:
    """Collective: return every rank's ``lines`` if any two ranks' differ; None if all are the same.

    Digests are compared, so it costs one small all-reduce as long as they agree. The versions that
    ranks run are compared with them, so every plan, optimizer and checkpoint compares these, too.

    Args:
        lines: short texts; ignored where there is an ``error``.
        error: what went wrong on this rank, if anything.

    Raises:
        ZerocastError: as :func:`raise_together`.
        RankMismatchError: on every rank, where two run different versions; all are named.
    """
    lines = [common_versions(), *lines]
    digest = hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).digest()
    words = [int.from_bytes(digest[4 * i : 4 * i + 4], "big") >> 2 for i in range(_DIGEST_WORDS)]
    if _all_same(comm, words, error):
        return None
    everyone = comm.all_gather_object(lines)
    _check_versions([versions for versions, *_ in everyone])
    return [own for _, *own in everyone]


def check_same(
    comm: Communicator, lines: Sequence[str], required: str, error: ZerocastError | None = None
) -> None:
    """Raise on every rank where two ranks' ``lines`` differ. Collective, as
    :func:`lines_that_differ`.

    Args:
        lines: short texts; ignored where there is an ``error``.
        required: what every rank must do, for the message.
        error: what went wrong on this rank, if anything.

    Raises:
        ZerocastError: as :func:`raise_together`.
        RankMismatchError: naming both sides of the first difference.
    """
    everyone = lines_that_differ(comm, lines, error) or []
    for rank, theirs in enumerate(everyone):
        for first, other in zip_longest(everyone[0], theirs, fillvalue="nothing more"):
            if first != other:
                raise RankMismatchError(
                    f"{required}: rank 0 has '{first}' where rank {rank} has '{other}'."
                )


def _check_versions(versions: Sequence[str]) -> None:
    """Raise unless all ranks have the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(versions):
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) > 1:
        found = "; ".join(f"{text} on {name(ranks)}" for text, ranks in ranks_of.items())
        raise RankMismatchError(
            f"every rank must run the same versions, got {found}; install the same on all hosts."
        )


def _all_same(comm: Communicator, answers: Sequence[int], error: ZerocastError | None) -> bool:
    """Say whether all ranks give the same answers, in one all-reduce."""
    largest = _ERROR_VOTE - 1
    votes = _highest(comm, [*answers, *(largest - answer for answer in answers)], error)
    highest, mirrored_lowest = votes[: len(answers)], votes[len(answers) :]
    return highest == [largest - lowest for lowest in mirrored_lowest]


def _highest(comm: Communicator, votes: list[int], error: ZerocastError | None) -> list[int]:
    """Return the highest of all ranks' votes, place by place; an error on any rank is raised on
    all.
    """
    if comm.size == 1:
        if error is not None:
            raise error
        return votes
    mine = votes if error is None else [_ERROR_VOTE] * len(votes)
    highest = comm.maxima(mine)
    if highest[0] == _ERROR_VOTE:
        raise _common_error(comm, error) from error
    return highest


def _common_error(comm: Communicator, error: ZerocastError | None) -> ZerocastError:
    reports = comm.all_gather_object(None if error is None else (_known_type(error), str(error)))
    ranks_of: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report is not None:
            ranks_of.setdefault(report[1], []).append(rank)
    kind: type[ZerocastError] = next(report[0] for report in reports if report is not None)
    return kind(
        "\n".join(f"on {_name(ranks, comm.size)}: {message}" for message, ranks in ranks_of.items())
    )


def _known_type(error: ZerocastError) -> type[ZerocastError]:
    """Return the nearest type that every rank has and can make from one text: not a caller's
    subclass.
    """
    return next(kind for kind in type(error).__mro__ if kind.__module__.startswith("zerocast."))


def _name(ranks: list[int], size: int) -> str:
    return "every rank" if len(ranks) == size else name(ranks)
