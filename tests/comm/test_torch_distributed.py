"""What is torch.distributed's own: devices that the group's backends do not serve."""

import pytest
import torch

from tests.comm.conftest import collectives
from tests.support.claims import assert_same_tensors
from tests.support.ranks import MPI_RANKS, run_ranks
from zerocast.comm import TorchDistributedCommunicator


@pytest.mark.mpi(min_size=MPI_RANKS)
def test_devices_without_a_backend_are_staged(monkeypatch):
    """A gloo group takes CPU and CUDA tensors as they are; staged ones give the same, in place."""

    def body(comm):
        assert not comm.stages(torch.device("cpu"))
        assert comm.stages(torch.device("meta"))
        expected = collectives(comm)
        with monkeypatch.context() as patch:
            patch.setattr(TorchDistributedCommunicator, "stages", lambda self, device: True)
            assert_same_tensors(collectives(comm), expected, "staged")

    run_ranks("torch_distributed", MPI_RANKS, body)
