"""What is torch.distributed's own: devices that the group's backends do not serve."""

import torch

from tests.comm.conftest import collectives
from tests.support.claims import assert_same_tensors
from tests.support.ranks import MPI_RANKS, on_gloo
from zerocast.comm import TorchDistributedCommunicator


@on_gloo(MPI_RANKS)
def test_devices_without_a_backend_are_staged(comm, monkeypatch):
    """A gloo group takes CPU and CUDA tensors as they are; staged ones give the same, in place."""
    assert not comm.stages(torch.device("cpu"))
    assert comm.stages(torch.device("meta"))
    expected = collectives(comm)
    monkeypatch.setattr(TorchDistributedCommunicator, "stages", lambda self, device: True)
    assert_same_tensors(collectives(comm), expected, "staged")
