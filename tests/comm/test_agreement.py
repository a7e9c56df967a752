"""Agreement: an error of one rank is an error of all, and nobody waits for ever."""

import pytest

from tests.support.ranks import on_ranks
from zerocast.comm import Attempt, RecordingCommunicator, agree, raise_together, run_in_process
from zerocast.errors import InputError, NonFiniteError, RankMismatchError, ZerocastError


def told(comm, mine) -> tuple[str, str]:
    """The type and message that this rank raises where it has the error ``mine``, which is the
    cause; the group is as usable as before.
    """
    with pytest.raises(ZerocastError) as caught:
        raise_together(comm, mine)
    assert (caught.value if comm.size == 1 else caught.value.__cause__) is mine
    comm.barrier()
    return type(caught.value).__name__, str(caught.value)


@on_ranks()
def test_nobody_raises_where_nobody_has_an_error(comm):
    """raise_together returns on every rank, and the ranks go on in step."""
    raise_together(comm, None)
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))


@on_ranks()
def test_an_error_of_one_rank_is_raised_on_all(comm):
    """Same type, same message that names the rank, on every rank; its own error is the cause."""
    last = comm.size - 1
    mine = NonFiniteError("weight 3 is NaN") if comm.rank == last else None
    prefix = f"on rank {last}: " if comm.size > 1 else ""
    assert told(comm, mine) == ("NonFiniteError", f"{prefix}weight 3 is NaN")


@on_ranks()
def test_different_errors_are_all_told(comm):
    """The lowest failing rank's type; each message once, on its own line, with its ranks."""
    if comm.size < 3:
        return  # there are no three ranks that differ
    same = ", ".join(str(r) for r in range(comm.size) if r != 2)
    expected = f"on ranks {same}: K must be 16\non rank 2: other order"
    mine = RankMismatchError("other order") if comm.rank == 2 else InputError("K must be 16")
    assert told(comm, mine) == ("InputError", expected)


@on_ranks()
def test_the_same_error_everywhere_is_said_once(comm):
    """Where all ranks say the same, the message says so instead of listing them."""
    prefix = "on every rank: " if comm.size > 1 else ""
    said = told(comm, InputError("start is negative"))
    assert said == ("InputError", f"{prefix}start is negative")


@on_ranks()
def test_agree_says_whether_all_answers_are_the_same(comm):
    """One rank that answers otherwise is seen by all, and an error outvotes every answer."""
    for answer in (0, 1, 2**31 - 2):
        assert agree(comm, answer)
        other = abs(answer - 1) if comm.rank == comm.size - 1 else answer
        assert agree(comm, other) == (comm.size == 1)
        with pytest.raises(InputError, match="no"):
            agree(comm, answer, InputError("no") if comm.rank == 0 else None)


@pytest.mark.parametrize("answer", [-1, 2**31 - 1])
def test_an_answer_out_of_range_is_refused(answer):
    """The number that means "error" is no answer, nor is a negative one."""
    text = f"agree takes an answer from 0 to 2147483646, got {answer}"
    with pytest.raises(InputError, match=text):
        run_in_process(1, lambda comm: agree(comm, answer))


def test_agreeing_costs_one_all_reduce_of_four_bytes():
    """While nobody has an error, raise_together is one int32 all-reduce and nothing else."""

    def body(comm):
        recording = RecordingCommunicator(comm)
        raise_together(recording, None)
        return {kind: (t.calls, t.payload_bytes) for (_, kind), t in recording.traffic.items()}

    assert run_in_process(3, body) == [{"all_reduce": (1, 4)}] * 3


@on_ranks()
def test_any_exception_of_one_rank_is_an_error_of_all(comm):
    """What an Attempt held back is raised on every rank as a ZerocastError; where it was raised
    first, it is in the chain of causes.
    """
    last = comm.size - 1
    prefix = f"on rank {last}: " if comm.size > 1 else ""
    for foreign, kind in (
        (KeyError("rowwise"), InputError),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"), InputError),
        (MemoryError("no more"), ZerocastError),
        (RuntimeError("torch says no"), ZerocastError),
    ):
        attempt = Attempt()
        with attempt:
            if comm.rank == last:
                raise foreign
        said = f"{prefix}{type(foreign).__name__}: {foreign}"
        assert told(comm, attempt.error) == (kind.__name__, said)
        if comm.rank == last:
            assert attempt.error.__cause__ is foreign


def test_an_attempt_lets_an_interrupt_through():
    """Ctrl-C leaves the block at once; a block that ends well leaves no error."""
    attempt = Attempt()
    with pytest.raises(KeyboardInterrupt), attempt:
        raise KeyboardInterrupt
    with attempt:
        pass
    assert attempt.error is None


class Mine(InputError):
    """One that cannot be made of one text."""

    def __init__(self, place, text):
        super().__init__(f"{place}: {text}")


@on_ranks()
def test_an_error_of_the_callers_own_type_is_told_by_its_base(comm):
    """A subclass that other ranks may not have, or cannot make of one text, arrives as its base."""
    said = told(comm, Mine("here", "no") if comm.rank == 0 else None)
    assert said == (
        ("InputError", "on rank 0: here: no") if comm.size > 1 else ("Mine", "here: no")
    )
