"""What a rank holds: its part of masters and state, and no more."""

import pytest
import torch

import zerocast
from zerocast.comm import Communicator, run_in_process
from zerocast.optim import ZeroOptimizer


@pytest.mark.parametrize("world_size", [1, 3, 4, 8])
def test_masters_and_adamw_state_take_12_bytes_an_element_over_ranks(world_size: int) -> None:
    """At most 1.02 x 12 N / D bytes on every rank: FP32 master and two moments of its own part. The
    memory behind every tensor is counted, not the views.
    """

    def measure(comm: Communicator) -> tuple[int, int]:
        layers = torch.nn.Sequential(*(torch.nn.Linear(256, 200) for _ in range(4)))
        zerocast.nn.convert(layers, zerocast.NVFP4BlockScaling())
        layers.bfloat16()
        optimizer = ZeroOptimizer(layers.parameters(), group=comm)
        for parameter in layers.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        inner = optimizer.inner
        tensors = [p for group in inner.param_groups for p in group["params"]]
        tensors += [v for state in inner.state.values() for v in state.values()]
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(memory.values()), sum(p.numel() for p in layers.parameters())

    for held, elements in run_in_process(world_size, measure):
        assert held <= 1.02 * 12 * elements / world_size, (held, elements)


def test_gradient_buffers_are_bounded() -> None:
    """All gradients of a small model meet in one buffer; a larger model's take two of them in
    turn. The result stands apart.
    """

    def measure(comm: Communicator) -> list[int]:
        from zerocast.optim.gradients import GradientReducer

        optimizer = ZeroOptimizer([torch.nn.Parameter(torch.ones(1 << 12))], group=comm)
        sizes = []
        for limit in (1 << 24, 1 << 10):
            reducer = GradientReducer(optimizer._shards, buffer_bytes=limit)
            buffers = [reducer.reduced, *(r.buffer for r in reducer._rounds)]
            memory = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in buffers}
            sizes.append(sum(memory.values()))
        return sizes

    shards, tail = 4 * (1 << 12) // 4, 5 * 8 + 8  # of each rank: notes and a flag, in whole words
    whole, rounds = shards + 4 * (shards + tail), shards + 2 * (1 << 10) + 4 * tail
    assert run_in_process(4, measure) == [[whole, rounds]] * 4
