"""What is torch.distributed's own: devices that the group's backends do not serve."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.comm.conftest import collectives
from tests.support.claims import assert_same_tensors
from tests.support.ranks import MPI_RANKS, on_gloo
from zerocast.comm import TorchDistributedCommunicator
from zerocast.comm.torch_peers import TorchPeers
from zerocast.errors import ZerocastError


@on_gloo(MPI_RANKS)
def test_devices_without_a_backend_are_staged(comm, monkeypatch):
    """A gloo group takes CPU and CUDA tensors as they are; staged ones give the same, in place."""
    assert not comm.stages(torch.device("cpu"))
    assert comm.stages(torch.device("meta"))
    assert not comm.captures(torch.device("cuda"))  # it takes them, and copies them to the host
    expected = collectives(comm)
    monkeypatch.setattr(TorchDistributedCommunicator, "stages", lambda self, device: True)
    assert_same_tensors(collectives(comm), expected, "staged")


@on_gloo(MPI_RANKS)
def test_unequal_parts_are_one_call_under_nccl(comm, monkeypatch):
    """NCCL gets one gather of all parts in rank order, in place, where gloo gets broadcasts."""
    calls = []

    def all_gather(parts, own, group, async_op):
        calls.append([part.data_ptr() for part in parts])
        assert own.data_ptr() == parts[comm.rank].data_ptr()
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setitem(comm._backends, "cpu", "nccl")
    assert comm.captures(torch.device("cpu"))
    monkeypatch.setattr(dist, "all_gather", all_gather)
    buffer, counts = torch.zeros(10), [1, 4, 2, 3]
    comm.all_gather_(buffer, counts)
    assert calls == [[part.data_ptr() for part in buffer.split(counts)]]


@on_gloo(MPI_RANKS)
def test_maxima_of_a_few_numbers_take_no_collective_of_their_own(comm, monkeypatch):
    """Eight of them travel with what ranks call; nine are reduced, and so are sums."""
    reduced = []
    all_reduce = dist.all_reduce

    def counted(flat, *args, **kwargs):
        reduced.append(len(flat))
        return all_reduce(flat, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", counted)
    for numel in (1, 8, 9):
        numbers = torch.arange(numel, dtype=torch.int32) * (1 - 2 * comm.rank)
        comm.all_reduce_max_(numbers)
        assert numbers.tolist() == list(range(numel))
    comm.all_reduce_sum_(torch.ones(2))
    assert reduced == [9, 2]


@on_gloo(2)
def test_ranks_go_on_after_an_error_together_or_not_at_all(comm):
    """What they send before each collective says it, whether or not they have read the store."""
    comm = TorchDistributedCommunicator(dist.new_group())
    comm.barrier()
    comm.announce(OSError("planted"))
    comm.barrier()
    if comm.rank == 1:
        comm.announce(OSError("planted again"))
    said = "after an error in 2: barrier" if comm.rank else "after an error in 2|planted again"
    with pytest.raises(ZerocastError, match=said):
        comm.barrier()


@on_gloo(2)
def test_a_collective_that_ends_just_behind_a_slice_of_waiting_has_ended(comm):
    """gloo says that time is up, and by the time it is asked the collective is over: its own end
    counts, good or bad.
    """
    peers = TorchPeers.of(comm.process_group)
    made = peers._call("all_reduce_max_", 5.0)

    def work(end):
        def wait(timeout=None):
            if timeout is not None:
                raise RuntimeError("Operation timed out!")
            return end()

        return SimpleNamespace(wait=wait, is_completed=lambda: True)

    def fail():
        raise RuntimeError("Connection closed by peer")

    peers._until(made, work(lambda: True))
    with pytest.raises(RuntimeError, match="closed by peer"):
        peers._until(made, work(fail))
