"""Every collective ends: with its result, or with an error on all ranks that are still there."""

import math
import re
import threading
import time

import pytest
import torch

from tests.support.claims import message_of
from zerocast.comm import PeerTimeoutError, run_in_process
from zerocast.comm.failure import (
    DISCONNECTED,
    EXITED,
    LATE,
    MISMATCH,
    RAISED,
    TIMED_OUT,
    RankState,
    peer_error,
)
from zerocast.errors import InputError, PeerFailedError, RankMismatchError


def test_threads_give_up_after_the_timeout():
    """A rank that runs and does not come: all others raise within the timeout, and name it."""
    over, told = threading.Event(), {}

    def body(comm):
        assert comm.timeout == 0.5
        amax = torch.zeros(3, dtype=torch.int32)
        comm.all_reduce_max_(amax)
        if comm.rank == 1:
            over.wait()
        start = time.perf_counter()
        try:
            comm.all_reduce_max_(amax)
        except PeerTimeoutError as error:
            told[comm.rank] = str(error), time.perf_counter() - start
            raise

    try:
        message = message_of(PeerTimeoutError, run_in_process, 3, body, timeout=0.5)
    finally:
        over.set()
    assert message == (
        "all_reduce_max_ on torch.int32 [3] did not end within the communicator's timeout of "
        "0.5 s: ranks 0, 2 waited in it; rank 1 did not call it."
    )
    assert told[0][0] == told[2][0] == message
    waited = sorted(told[rank][1] for rank in (0, 2))  # who came second waits with the first
    assert waited[0] < 5, waited
    assert 0.5 <= waited[1] < 5, waited


def test_a_thread_that_never_returns_is_left_behind():
    """Where the others swallowed the error, the caller is told who still runs."""
    over = threading.Event()

    def body(comm):
        if comm.rank == 1:
            over.wait()
            return
        with pytest.raises(PeerTimeoutError):
            comm.barrier()

    try:
        message = message_of(PeerTimeoutError, run_in_process, 3, body, timeout=0.2)
    finally:
        over.set()
    assert message == "rank 1 of 3 did not return within 0.2 s after other ranks had failed."


@pytest.mark.parametrize("timeout", [0, -1, math.nan, "10", None, True])
def test_a_timeout_is_a_positive_number(timeout):
    """Anything else is refused; math.inf waits for ever."""
    with pytest.raises(InputError, match=re.escape(f"math.inf, got {timeout!r}.")):
        run_in_process(1, lambda comm: None, timeout=timeout)
    assert run_in_process(2, lambda comm: comm.barrier(), timeout=math.inf) == [None, None]


CALL, OTHER = "all_gather_ of 8 bytes", "all_reduce_max_ on torch.int32 [3]"
SAID = {
    "a rank that does not answer": (
        {0: RankState(TIMED_OUT, 7, CALL), 2: RankState(TIMED_OUT, 7, CALL)},
        PeerTimeoutError,
        " within the communicator's timeout of 9 s: ranks 0, 2 waited in it; rank 1 neither called "
        "it nor answered.",
    ),
    "a rank in another collective": (
        {
            0: RankState(TIMED_OUT, 7, CALL),
            1: RankState(TIMED_OUT, 6, OTHER),
            2: RankState(LATE, 7, CALL),
        },
        PeerTimeoutError,
        f" within the communicator's timeout of 9 s: rank 0 waited in it; rank 1 waited in {OTHER},"
        " collective 6; rank 2 called it later.",
    ),
    "a rank that raised": (
        {0: RankState(TIMED_OUT, 7, CALL), 1: RankState(RAISED, 6, "OSError: disk full")},
        PeerFailedError,
        ": rank 1 raised OSError: disk full.",
    ),
    "a process that ended": (
        {0: RankState(DISCONNECTED, 7, CALL), 1: RankState(EXITED, 6, "")},
        PeerFailedError,
        ": rank 1 has ended.",
    ),
    "a lost connection": (
        {0: RankState(DISCONNECTED, 7, CALL)},
        PeerFailedError,
        ": rank 0 waited in it; ranks 1, 2 neither called it nor answered.",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_what_ranks_have_said_makes_one_message(case):
    """It names the collective, and the ranks by what they said; a reason hides the waiting."""
    said, kind, expected = SAID[case]
    error = peer_error(CALL, 7, 3, said, 9)
    assert type(error) is kind
    assert str(error).startswith(f"{CALL}, collective 7 of a group of 3, did not end{expected}")


def test_different_collectives_are_a_mismatch_on_all_ranks():
    """A rank that saw two ranks call different ones gives all the same text."""
    error = peer_error(CALL, 7, 3, {1: RankState(MISMATCH, 7, "rank 1 called a, rank 2 b")}, 9)
    assert type(error) is RankMismatchError
    assert str(error) == "rank 1 called a, rank 2 b"
