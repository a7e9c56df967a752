"""What is torch.distributed's own: devices that the group's backends do not serve."""

import pytest
import torch

from tests.support.ranks import MPI_RANKS, run_ranks
from zerocast.comm import TorchDistributedCommunicator


@pytest.mark.mpi(min_size=MPI_RANKS)
def test_devices_without_a_backend_are_staged(monkeypatch):
    """A gloo group takes CPU and CUDA tensors as they are; staged ones give the same, in place."""

    def body(comm):
        assert not comm.stages(torch.device("cpu"))
        assert comm.stages(torch.device("meta"))
        monkeypatch.setattr(TorchDistributedCommunicator, "stages", lambda self, device: True)
        total = torch.tensor([comm.rank], dtype=torch.int32)
        comm.all_reduce_max_(total)
        parts = torch.zeros(5, dtype=torch.uint8)
        counts = [2, 0, 1, 2]
        parts.split(counts)[comm.rank].fill_(comm.rank + 1)
        comm.all_gather_(parts, counts)
        sums = torch.arange(2.0 * comm.size)
        output = sums[2 * comm.rank : 2 * comm.rank + 2]
        comm.reduce_scatter_sum(output, sums)
        comm.broadcast_(total, 1)
        return total.tolist(), parts.tolist(), output.tolist()

    expected = [([3], [1, 1, 3, 4, 4], [8.0 * r, 8.0 * r + 4]) for r in range(MPI_RANKS)]
    assert run_ranks("torch_distributed", MPI_RANKS, body) == expected
