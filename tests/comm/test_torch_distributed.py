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


@on_gloo(MPI_RANKS)
def test_devices_without_a_backend_are_staged(comm, monkeypatch):
    """A gloo group takes CPU and CUDA tensors as they are; staged ones give the same, in place."""
    assert not comm.stages(torch.device("cpu"))
    assert comm.stages(torch.device("meta"))
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
    monkeypatch.setattr(dist, "all_gather", all_gather)
    buffer, counts = torch.zeros(10), [1, 4, 2, 3]
    comm.all_gather_(buffer, counts)
    assert calls == [[part.data_ptr() for part in buffer.split(counts)]]


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
