"""Agreement: an error of one rank is an error of all, and nobody waits for ever."""

import pytest

from zerocast.comm import Attempt, RecordingCommunicator, agree, raise_together, run_in_process
from zerocast.errors import InputError, NonFiniteError, RankMismatchError, ZerocastError


def told(ranks, error_of) -> tuple[str, str]:
    """The type and message that every rank raises where rank r has the error ``error_of(r)``; what
    it has itself is the cause, and the group is as usable as before.
    """

    def body(comm):
        mine = error_of(comm.rank)
        with pytest.raises(ZerocastError) as caught:
            raise_together(comm, mine)
        assert (caught.value if comm.size == 1 else caught.value.__cause__) is mine
        comm.barrier()
        return type(caught.value).__name__, str(caught.value)

    (said,) = set(ranks.run(body))
    return said


def test_nobody_raises_where_nobody_has_an_error(ranks):
    """raise_together returns on every rank, and the ranks go on in step."""

    def body(comm):
        raise_together(comm, None)
        return comm.all_gather_object(comm.rank)

    assert ranks.run(body) == [list(range(ranks.size))] * ranks.size


def test_an_error_of_one_rank_is_raised_on_all(ranks):
    """Same type, same message that names the rank, on every rank; its own error is the cause."""
    last = ranks.size - 1
    error = NonFiniteError("weight 3 is NaN")
    prefix = f"on rank {last}: " if ranks.size > 1 else ""
    said = told(ranks, lambda rank: error if rank == last else None)
    assert said == ("NonFiniteError", f"{prefix}weight 3 is NaN")


def test_different_errors_are_all_told(ranks):
    """The lowest failing rank's type; each message once, on its own line, with its ranks."""
    if ranks.size < 3:
        pytest.skip("three ranks that differ")
    errors = {1: InputError("K must be 16"), 2: RankMismatchError("other order")}
    same = ", ".join(str(r) for r in range(ranks.size) if r != 2)
    expected = f"on ranks {same}: K must be 16\non rank 2: other order"
    said = told(ranks, lambda rank: errors.get(rank, InputError("K must be 16")))
    assert said == ("InputError", expected)


def test_the_same_error_everywhere_is_said_once(ranks):
    """Where all ranks say the same, the message says so instead of listing them."""
    prefix = "on every rank: " if ranks.size > 1 else ""
    said = told(ranks, lambda rank: InputError("start is negative"))
    assert said == ("InputError", f"{prefix}start is negative")


@pytest.mark.parametrize("answer", [0, 1, 2**31 - 2])
def test_agree_says_whether_all_answers_are_the_same(ranks, answer):
    """One rank that answers otherwise is seen by all, and an error outvotes every answer."""
    last = ranks.size - 1

    def body(comm):
        same = agree(comm, answer)
        one_differs = agree(comm, abs(answer - 1) if comm.rank == last else answer)
        with pytest.raises(InputError, match="no"):
            agree(comm, answer, InputError("no") if comm.rank == 0 else None)
        return same, one_differs

    assert ranks.run(body) == [(True, ranks.size == 1)] * ranks.size


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


@pytest.mark.parametrize(
    ("foreign", "kind"),
    [
        (KeyError("rowwise"), InputError),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"), InputError),
        (MemoryError("no more"), ZerocastError),
        (RuntimeError("torch says no"), ZerocastError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_exception_of_one_rank_is_an_error_of_all(ranks, foreign, kind):
    """What an Attempt held back is raised on every rank as a ZerocastError; where it was raised
    first, it is in the chain of causes.
    """
    last = ranks.size - 1

    def body(comm):
        attempt = Attempt()
        with attempt:
            if comm.rank == last:
                raise foreign
        with pytest.raises(ZerocastError) as caught:
            raise_together(comm, attempt.error)
        if comm.rank == last:
            wrapped = caught.value if comm.size == 1 else caught.value.__cause__
            assert wrapped.__cause__ is foreign
        comm.barrier()
        return type(caught.value), str(caught.value)

    prefix = f"on rank {last}: " if ranks.size > 1 else ""
    said = f"{prefix}{type(foreign).__name__}: {foreign}"
    assert ranks.run(body) == [(kind, said)] * ranks.size


def test_an_attempt_lets_an_interrupt_through():
    """Ctrl-C leaves the block at once; a block that ends well leaves no error."""
    attempt = Attempt()
    with pytest.raises(KeyboardInterrupt), attempt:
        raise KeyboardInterrupt
    with attempt:
        pass
    assert attempt.error is None


def test_an_error_of_the_callers_own_type_is_told_by_its_base(ranks):
    """A subclass that other ranks may not have, or cannot make of one text, arrives as its base."""

    class Mine(InputError):
        def __init__(self, place, text):
            super().__init__(f"{place}: {text}")

    said = told(ranks, lambda rank: Mine("here", "no") if rank == 0 else None)
    assert said == (
        ("InputError", "on rank 0: here: no") if ranks.size > 1 else ("Mine", "here: no")
    )
