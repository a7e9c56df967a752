"""Copies of a ZeroOptimizer's weights are other memory, and a step looks at few tensors. What moves
is in tests/edges.
"""

import copy

import pytest
import torch

import zerocast
from tests.cast.test_scopes import instructions
from tests.kernels.test_graphs_and_threads import Idle
from tests.support.ranks import on_ranks
from tests.support.same_bytes import assert_same_bytes
from tests.support.subjects import Zero
from zerocast.backends.cuda import CudaBackend
from zerocast.comm import Communicator, SingleRank


@on_ranks("in_process", 2)
def test_copies_and_files_are_others(comm: Communicator) -> None:
    """``deepcopy`` and ``load_state_dict(assign=True)`` of another model move no weight."""
    subject, untouched = Zero(comm), Zero(comm)
    for _ in range(2):
        subject.train()
        untouched.train()
        other = copy.deepcopy(subject.model)
        other.load_state_dict(subject.model.state_dict(), assign=True)
        for layer in other:
            value = torch.ones(layer.weight.shape)
            layer.weight = torch.nn.Parameter(zerocast.quantize(value, "nvfp4"))
        subject.check()
    for mine, wanted in zip(subject.whole_masters(), untouched.whole_masters(), strict=True):
        assert_same_bytes(mine, wanted, "master")


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_all_gather": True}, {"overlap_cast": True}],
    ids=["plain", "overlap_all_gather", "overlap_cast"],
)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, zerocast.optim.FusedAdamW])
def test_a_step_looks_at_few_tensors(
    options: dict[str, object], optimizer: type[torch.optim.Optimizer]
) -> None:
    """What makes weights from masters takes as many instructions of Python for 12 weights as for 2;
    and so does what a step does before that, but for gradients and one look at each weight.
    """

    @zerocast.use_backend(CudaBackend(Idle()))
    def of(count: int) -> int:
        params = [torch.nn.Parameter(zerocast.empty((32, 32), "nvfp4")) for _ in range(count)]
        named = [(f"{i}", param) for i, param in enumerate(params)]
        made = zerocast.optim.ZeroOptimizer(named, optimizer, SingleRank(), lr=0.1, **options)
        for param in params:
            param.grad = torch.zeros(32, 32, dtype=torch.bfloat16)
        for _ in range(2):
            made.step()
            made.wait_for_all_gather()
        made.phases.before("partial_amax").run()
        phases = made.phases.since("partial_amax")

        def publish() -> None:
            phases.run()
            made.wait_for_all_gather()

        return instructions(publish)

    assert of(12) == of(2)
