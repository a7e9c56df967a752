"""Threads as ranks: results and errors come home, and nothing ever hangs."""

import re
import threading
import time
import traceback
from contextvars import ContextVar

import pytest
import torch

from tests.support.claims import message_of, one_message
from tests.support.settings import two_threads
from zerocast.comm import PeerFailedError, raise_together, run_in_process
from zerocast.errors import InputError, RankMismatchError


def ints(*values: int) -> torch.Tensor:
    """int32 of ``values``."""
    return torch.tensor(values, dtype=torch.int32)


def test_results_come_in_rank_order():
    """Rank r's result is at place r, also when rank 0 is the last to return."""

    def body(comm):
        time.sleep(0.02 * (comm.size - comm.rank))
        return comm.rank, comm.size, threading.current_thread().name

    assert run_in_process(3, body) == [(r, 3, f"rank {r}") for r in range(3)]


def test_many_ranks_are_fast():
    """257 ranks, more than any tensor has elements, run a cast's worth of collectives."""

    def body(comm):
        amax = ints(comm.rank, -comm.rank)
        comm.all_reduce_max_(amax)
        codes = torch.zeros(100, dtype=torch.uint8)
        codes[comm.rank : comm.rank + 1] = comm.rank % 100 + 1
        comm.all_gather_(codes, [1] * 100 + [0] * 157)
        gradient = torch.empty(1)
        comm.reduce_scatter_sum(gradient, torch.arange(257.0))
        raise_together(comm, None)
        return amax.tolist(), codes.tolist(), gradient.item()

    start = time.perf_counter()
    results = run_in_process(257, body)
    assert time.perf_counter() - start < 30, "257 ranks took more than 30 s; 1 s is usual"
    for rank, result in enumerate(results):
        assert result == ([256, 0], list(range(1, 101)), 257.0 * rank), f"rank {rank}"


@pytest.mark.parametrize("numel", [5, 200_000])
def test_sums_are_taken_in_rank_order(numel):
    """(x0 + x1) + x2 ..., to the bit, whether one rank adds everything or each adds a range."""
    addends = torch.randn(
        5, numel, generator=torch.Generator().manual_seed(0)
    ) * 1e3 ** torch.arange(5.0).view(5, 1)
    expected = addends[0].clone()
    for addend in addends[1:]:
        expected += addend

    def body(comm):
        total = addends[comm.rank].clone()
        comm.all_reduce_sum_(total)
        part = torch.empty(numel // 5)
        comm.reduce_scatter_sum(part, addends[comm.rank].clone())
        return torch.equal(total, expected), torch.equal(part, expected.view(5, -1)[comm.rank])

    assert run_in_process(5, body) == [(True, True)] * 5


def test_the_callers_context_is_copied():
    """Each rank sees the caller's context variables; what it sets stays its own."""
    variable = ContextVar("variable", default="default")
    variable.set("caller")

    def body(comm):
        seen = variable.get()
        variable.set(f"rank {comm.rank}")
        comm.barrier()
        return seen, variable.get()

    assert run_in_process(2, body) == [("caller", "rank 0"), ("caller", "rank 1")]
    assert variable.get() == "caller"


def test_ranks_compute_with_one_thread_each():
    """Torch uses one thread in every rank, and as many as before in the caller afterwards."""
    with two_threads():
        assert run_in_process(3, lambda comm: torch.get_num_threads()) == [1, 1, 1]
        assert torch.get_num_threads() == 2


def test_runs_side_by_side_keep_the_number_of_threads():
    """Runs that overlap, from several threads, leave torch's number of threads as it was."""
    gate = threading.Barrier(2)

    def in_threads(*calls):
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with two_threads():
        in_threads(*[lambda: run_in_process(1, lambda comm: gate.wait())] * 2)
        assert torch.get_num_threads() == 2
        seen = []
        in_threads(lambda: seen.append(torch.get_num_threads()))
        assert seen == [2]


def test_gathered_objects_are_copies():
    """A rank that changes what it sent, or what it got, changes nothing that the sender holds."""

    def body(comm):
        mine = [comm.rank]
        gathered = comm.all_gather_object(mine)
        comm.barrier()
        gathered[comm.rank].append("changed")
        return mine

    assert run_in_process(2, body) == [[0], [1]]


# --- errors come home ---


def test_the_lowest_failing_ranks_error_is_raised_with_its_traceback():
    """Ranks 1 and 2 fail by themselves, 0 and 3 are released: rank 1's own exception arrives."""
    errors = {1: KeyError("one"), 2: OSError("two")}

    def fail_here(comm):
        raise errors[comm.rank]

    def body(comm):
        comm.barrier()
        if comm.rank in errors:
            fail_here(comm)
        comm.barrier()

    with pytest.raises(KeyError) as caught:
        run_in_process(4, body)
    assert caught.value is errors[1]
    assert any(
        frame.name == "fail_here" for frame in traceback.extract_tb(caught.value.__traceback__)
    )


def test_a_traceback_shows_the_different_errors_of_all_ranks():
    """Errors of further ranks hang behind the first, each once; released ranks have none."""
    together = threading.Barrier(4)

    def body(comm):
        together.wait()
        if comm.rank == 0:
            comm.barrier()
        try:
            raise LookupError(f"cause {comm.rank}")
        except LookupError as error:
            raise ValueError("same" if comm.rank == 3 else f"rank {comm.rank}") from error

    with pytest.raises(ValueError, match="rank 1") as caught:
        run_in_process(4, body)
    shown = "".join(traceback.format_exception(caught.value))
    lines = ["rank 1", "rank 2", "same"]
    assert [shown.count(f"ValueError: {line}\n") for line in lines] == [1, 1, 1]
    assert shown.count("LookupError: cause") == 3
    assert "PeerFailedError" not in shown


def test_a_released_rank_is_told_who_failed():
    """A rank that waits for a failed one gets PeerFailedError, now and in later collectives."""
    told = []

    def body(comm):
        if comm.rank == 1:
            raise OSError("disk full")
        for _ in range(2):
            with pytest.raises(PeerFailedError) as caught:
                comm.barrier()
            told.append(str(caught.value))

    with pytest.raises(OSError, match="disk full"):
        run_in_process(3, body)
    assert told == ["rank 1 raised OSError: disk full"] * 4


def test_even_a_rank_that_exits_releases_the_others():
    """SystemExit in a rank is raised in the caller like any error."""

    def body(comm):
        if comm.rank == 0:
            raise SystemExit(3)
        comm.barrier()

    with pytest.raises(SystemExit):
        run_in_process(2, body)


# --- collectives that do not fit together ---

MISMATCHES = {
    "another collective": (
        lambda c: c.barrier() if c.rank == 2 else c.all_reduce_max_(ints(1)),
        r"rank 0 called all_reduce_max_ on torch.int32 \[1\], rank 2 called barrier",
    ),
    "another shape": (
        lambda c: c.all_reduce_max_(torch.zeros(2 + c.rank // 2, dtype=torch.int32)),
        r"rank 0 called .* on torch.int32 \[2\], rank 2 called .* on torch.int32 \[3\]",
    ),
    "another dtype": (
        lambda c: c.all_reduce_sum_(torch.zeros(2, dtype=[torch.int32, torch.int64][c.rank > 0])),
        r"rank 0 called .* on torch.int32 \[2\], rank 1 called .* on torch.int64 \[2\]",
    ),
    "other counts": (
        lambda c: c.all_gather_(torch.zeros(3), [1, c.rank, 2 - c.rank]),
        r"with counts \(1, 0, 2\), rank 1 called .* with counts \(1, 1, 1\)",
    ),
    "other parts": (
        lambda c: c.start_all_to_all(
            torch.zeros(4), torch.zeros(4), [2, 1, 1], [1, c.rank, 3 - c.rank]
        ),
        "rank 0 sends 4 bytes to rank 0, which receives 8",
    ),
    "another root": (
        lambda c: c.broadcast_(torch.zeros(1), root=c.rank),
        r"with root 0, rank 1 called broadcast_ on torch.float32 \[1\] with root 1",
    ),
    "another part": (
        lambda c: c.reduce_scatter_sum(torch.zeros(1 + c.rank), torch.zeros(3 + 3 * c.rank)),
        r"rank 0 called reduce_scatter_sum on torch.float32 \[3\], rank 1 called .* \[6\]",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_a_mismatch_is_told_on_every_rank(what):
    """Every rank raises the same message, which shows both sides, and the group can go on."""
    call, message = MISMATCHES[what]

    def body(comm):
        said = message_of(RankMismatchError, call, comm)
        comm.barrier()
        return said

    assert re.search(message, one_message(run_in_process(3, body)))


def test_a_rank_that_returns_early_is_missed():
    """Ranks that wait for one that has returned are told so, instead of waiting for ever."""
    message = (
        "no rank can continue: rank 0 has returned; rank 1 waits in barrier; rank 2 waits in barr"
    )
    with pytest.raises(RankMismatchError, match=message):
        run_in_process(3, lambda comm: comm.barrier() if comm.rank else None)


def test_ranks_that_wait_for_each_other_in_two_groups_are_told():
    """Rank 0 waits in a sub-group for rank 1, which waits in the whole group for rank 0."""

    def body(comm):
        group = comm.split(0)
        (comm if comm.rank else group).all_reduce_max_(ints(comm.rank))

    message = (
        r"rank 0 waits in all_reduce_max_ on torch.int32 \[1\]; rank 1 waits in all_reduce_max_"
    )
    with pytest.raises(RankMismatchError, match=message):
        run_in_process(2, body)


def test_a_failing_rank_releases_sub_groups_too():
    """Rank 2 fails while 0 and 1 wait in a group of their own, and for each other's next call."""

    def body(comm):
        group = comm.split(comm.rank // 2)
        if comm.rank == 2:
            raise OSError("gone")
        for _ in range(1000):
            group.barrier()
        comm.barrier()

    with pytest.raises(OSError, match="gone"):
        run_in_process(3, body)


def test_a_gather_of_large_parts_moves_bits():
    """Ranks copy large parts from each other, without a shared result: unequal ones, and none."""
    counts = [100_000, 0, 70_001]
    whole = torch.arange(sum(counts), dtype=torch.int64)

    def gather(comm):
        buffer = torch.full_like(whole, -1)
        start = sum(counts[: comm.rank])
        buffer[start : start + counts[comm.rank]] = whole[start : start + counts[comm.rank]]
        comm.all_gather_(buffer, counts)
        return torch.equal(buffer, whole)

    assert run_in_process(3, gather) == [True] * 3


# --- what it refuses ---


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "3", None])
def test_wrong_world_sizes_and_functions(wrong):
    """run_in_process refuses what is no number of ranks, and what is no function."""
    with pytest.raises(InputError, match=f"takes a world_size of 1 or more, got {wrong!r}"):
        run_in_process(wrong, lambda comm: None)
    with pytest.raises(InputError, match="function"):
        run_in_process(1, wrong)


def test_a_color_that_is_no_int():
    """split refuses it before the ranks meet."""
    with pytest.raises(InputError, match="split takes an int"):
        run_in_process(2, lambda comm: comm.split([comm.rank]))
