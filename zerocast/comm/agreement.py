"""Agreeing: what only some ranks can see is made known to all before anybody acts on it.

An error that one rank raises alone leaves the others waiting in their next collective. So what may
fail on one rank only is caught there, and handed to :func:`raise_together`, which every rank calls.
"""

from __future__ import annotations

import hashlib

import torch

from zerocast.comm.communicator import Communicator
from zerocast.errors import InputError, ZerocastError

_ERROR_VOTE = 2**31 - 1


def raise_together(comm: Communicator, error: ZerocastError | None) -> None:
    """Collective: raise on every rank of ``comm`` if any has an ``error``, else on none.

    While nobody has one it costs an all-reduce of one int32.

    Raises:
        ZerocastError: on all ranks the lowest failing rank's type, with one message that says which
            ranks said what. On a group of one rank the error as it is.
    """
    agree(comm, 0, error)


def agree(comm: Communicator, vote: int, error: ZerocastError | None = None) -> int:
    """Collective: the highest ``vote`` of all ranks, unless one has an ``error``.

    The same single all-reduce as :func:`raise_together`, which is this with nothing to decide.

    Args:
        vote: 0 or more and below 2**31 - 1. Number the alternatives so that the highest one that
            any rank asks for must win.
        error: what went wrong on this rank, if anything; outvotes everything.

    Raises:
        ZerocastError: as :func:`raise_together`.
    """
    if not 0 <= vote < _ERROR_VOTE:
        raise InputError(f"agree takes a vote from 0 to {_ERROR_VOTE - 1}, got {vote}.")
    if comm.size == 1:
        if error is not None:
            raise error
        return vote
    cast = vote if error is None else _ERROR_VOTE
    ballot = torch.tensor([cast], dtype=torch.int32, device="cpu")
    comm.all_reduce_max_(ballot)
    highest = int(ballot)
    if highest == _ERROR_VOTE:
        raise _common_error(comm, error) from error
    return highest


def lines_that_differ(comm: Communicator, lines: list[str]) -> list[list[str]] | None:
    """Every rank's ``lines``, where any two ranks' differ; None where all are the same. Collective.

    Only digests are exchanged as long as they agree.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return None
    return comm.all_gather_object(lines)


def _common_error(comm: Communicator, error: ZerocastError | None) -> ZerocastError:
    said = comm.all_gather_object(None if error is None else (type(error), str(error)))
    ranks_of: dict[str, list[int]] = {}
    for rank, report in enumerate(said):
        if report is not None:
            ranks_of.setdefault(report[1], []).append(rank)
    kind: type[ZerocastError] = next(report[0] for report in said if report is not None)
    return kind(
        "\n".join(f"on {_name(ranks, comm.size)}: {message}" for message, ranks in ranks_of.items())
    )


def _name(ranks: list[int], size: int) -> str:
    if len(ranks) == size:
        return "every rank"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
