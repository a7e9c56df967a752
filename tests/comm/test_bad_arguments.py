"""Wrong arguments of communicators are refused by name, with an error of zerocast on every rank."""

import threading

import pytest
import torch

from tests.support.settings import two_threads
from zerocast.comm import (
    RecordingCommunicator,
    SingleRank,
    TorchDistributedCommunicator,
    as_communicator,
    run_in_process,
)
from zerocast.errors import InputError, ZerocastError

WRONG = [None, 1.5, "text", [], object(), torch.ones(4).to_sparse(), torch.zeros(4, 4).t()]
CALLS = {
    "all_reduce_max_": lambda comm, x: comm.all_reduce_max_(x),
    "all_reduce_sum_": lambda comm, x: comm.all_reduce_sum_(x),
    "all_gather_": lambda comm, x: comm.all_gather_(x),
    "start_all_gather_": lambda comm, x: comm.start_all_gather_(x)(),
    "counts": lambda comm, x: comm.all_gather_(torch.zeros(6), x if x is not None else 5),
    "reduce_scatter_sum": lambda comm, x: comm.reduce_scatter_sum(x, x),
    "start_all_to_all": lambda comm, x: comm.start_all_to_all(x, x)(),
    "received": lambda comm, x: comm.start_all_to_all(
        torch.zeros(6), torch.zeros(6), x if x is not None else 5
    ),
    "broadcast_": lambda comm, x: comm.broadcast_(x),
    "root": lambda comm, x: comm.broadcast_(torch.zeros(2), x),
    "all_gather_object": lambda comm, x: comm.all_gather_object(threading.Lock()),
    "recorded": lambda comm, x: RecordingCommunicator(comm).all_gather_(x),
    "recorded sum": lambda comm, x: RecordingCommunicator(comm).all_reduce_sum_(x),
    "recorded exchange": lambda comm, x: RecordingCommunicator(comm).start_all_to_all(x, x),
    "recorded scatter": lambda comm, x: RecordingCommunicator(comm).reduce_scatter_sum(x, x),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_wrong_arguments_of_collectives(call, world_size):
    """Whatever the last rank gives: it is refused, and the others are released."""

    def body(comm, wrong):
        if comm.rank == world_size - 1:
            with pytest.raises(ZerocastError):
                CALLS[call](comm, wrong)
            with pytest.raises(ZerocastError):
                CALLS[call](SingleRank(), wrong)
            raise InputError("as it was")
        comm.barrier()

    for wrong in WRONG:
        with pytest.raises(InputError, match="as it was"):
            run_in_process(world_size, lambda comm, wrong=wrong: body(comm, wrong))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "3", None])
def test_wrong_world_sizes_and_functions(wrong):
    """run_in_process refuses what is no number of ranks, and what is no function."""
    with pytest.raises(InputError, match=f"takes a world_size of 1 or more, got {wrong!r}"):
        run_in_process(wrong, lambda comm: None)
    with pytest.raises(InputError, match="function"):
        run_in_process(1, wrong)


@pytest.mark.parametrize("wrong", [0, "world", [], torch.zeros(1), SingleRank])
def test_wrong_groups(wrong):
    """What is no group is refused by name, wherever a group is taken."""
    for make in (as_communicator, RecordingCommunicator, TorchDistributedCommunicator):
        with pytest.raises(InputError, match="got "):
            make(wrong)


def test_a_color_that_is_no_int():
    """split refuses it before the ranks meet."""
    with pytest.raises(InputError, match="split takes an int"):
        run_in_process(2, lambda comm: comm.split([comm.rank]))


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
