"""RecordingCommunicator: the counts are the ring algorithm's, worked by hand."""

import pytest
import torch

from tests.comm.conftest import collectives
from tests.support.claims import assert_same_tensors
from tests.support.ranks import on_ranks
from zerocast.comm import RecordingCommunicator, SingleRank, Traffic, run_in_process
from zerocast.errors import InputError


def numbers(traffic: Traffic) -> tuple[int, int, int]:
    """What does not depend on time."""
    return traffic.calls, traffic.payload_bytes, traffic.sent_bytes


@on_ranks()
def test_it_passes_everything_on(comm):
    """Results are those of the communicator inside, for every collective."""
    recording = RecordingCommunicator(comm)
    assert (recording.rank, recording.size) == (comm.rank, comm.size)
    assert not recording.stages(torch.device("cpu"))
    assert_same_tensors(collectives(recording), collectives(comm), "recorded")


@on_ranks("in_process", 4)
def test_bytes_sent_follow_the_ring(comm):
    """4 ranks, 48 bytes: all-reduce 2 * 3/4 * 48 = 72, reduce-scatter 36, all-gather 48 - part; and
    an all-to-all sends what is not this rank's own, 36 and 12.
    """
    recording = RecordingCommunicator(comm)
    recording.all_reduce_max_(torch.zeros(12, dtype=torch.int32))
    recording.all_reduce_sum_(torch.zeros(12))
    recording.reduce_scatter_sum(torch.zeros(3), torch.zeros(12))
    recording.all_gather_(torch.zeros(48, dtype=torch.uint8), [8, 40, 0, 0])
    recording.start_all_gather_(torch.zeros(12))()
    recording.start_all_to_all(torch.zeros(12), torch.zeros(12))()
    sent = [3 * (r == (comm.rank + 1) % 4) + (r == comm.rank) for r in range(4)]
    received = [3 * (r == (comm.rank - 1) % 4) + (r == comm.rank) for r in range(4)]
    recording.start_all_to_all(torch.zeros(4), torch.zeros(4), received, sent)()
    recording.broadcast_(torch.zeros(12), root=1)
    recording.barrier()
    uneven = (48 - 40, 48 - 0, 48 - 0, 48 - 8)[comm.rank]
    assert {kind: numbers(traffic) for (_, kind), traffic in recording.traffic.items()} == {
        "all_reduce": (2, 96, 2 * 72),
        "reduce_scatter": (1, 48, 36),
        "all_gather": (2, 96, uneven + 36),
        "all_to_all": (2, 48 + 16, 36 + 12),
        "broadcast": (1, 48, 0 if comm.rank == 0 else 48),  # 1 -> 2 -> 3 -> 0
        "barrier": (1, 0, 0),
    }


def test_labels_tell_the_phases_of_a_step_apart():
    """Calls are counted under the innermost label; totals add up by kind, by label and in all."""

    def body(comm):
        recording = RecordingCommunicator(comm)
        four = torch.zeros(4, dtype=torch.int32)
        recording.all_reduce_max_(four)
        with recording.label("step"):
            recording.all_gather_(four)
            with recording.label("amax"):
                recording.all_reduce_max_(four)
            recording.all_gather_(four)
        by_key = {key: traffic.calls for key, traffic in recording.traffic.items()}
        kind, label = recording.total(kind="all_reduce"), recording.total(label="step")
        everything = recording.total()
        assert everything.seconds == sum(t.seconds for t in recording.traffic.values()) > 0
        recording.reset()
        return by_key, numbers(kind), numbers(label), everything.calls, recording.total()

    by_key = {("", "all_reduce"): 1, ("step", "all_gather"): 2, ("amax", "all_reduce"): 1}
    expected = (by_key, (2, 32, 32), (2, 32, 16), 4, Traffic())
    assert run_in_process(2, body) == [expected] * 2


@on_ranks("in_process", 3)
def test_objects_count_their_pickled_size(comm):
    """A larger object is a larger payload, sent to each of the other two ranks once."""
    recording = RecordingCommunicator(comm)
    recording.all_gather_object("x" * 1000)
    calls, payload, sent = numbers(recording.total(kind="all_gather_object"))
    assert calls == 1
    assert 1000 < payload < 1100
    assert sent == 2 * payload


def test_one_rank_sends_nothing():
    """With D = 1 every formula is 0."""
    recording = RecordingCommunicator(SingleRank())
    recording.all_reduce_sum_(torch.zeros(3))
    recording.all_gather_(torch.zeros(3))
    recording.reduce_scatter_sum(torch.zeros(3), torch.zeros(3))
    recording.broadcast_(torch.zeros(3))
    recording.start_all_to_all(torch.zeros(3), torch.zeros(3))()
    recording.all_gather_object(3)
    assert recording.total().sent_bytes == 0
    assert recording.total().calls == 6


def test_a_call_that_fails_is_not_counted():
    """What was refused was not sent."""
    recording = RecordingCommunicator(SingleRank())
    with pytest.raises(InputError):
        recording.all_reduce_max_(torch.zeros(3))
    assert recording.traffic == {}
