"""Layers on several ranks: delayed scaling agrees on its scales, whatever each rank has seen."""

from typing import Any

import torch

from tests.conftest import Ranks
from tests.support.layers import RECIPES
from tests.support.same_bytes import assert_same_bytes
from zerocast import nn
from zerocast.comm import Communicator, run_in_process
from zerocast.nn.autocast import autocast, reduce_amaxes

DELAYED = RECIPES["delayed"]
STEPS = 3


def data(rank: int, step: int) -> torch.Tensor:
    """Rows of different magnitudes on every rank; rank 1 has none in step 0."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    rows = 0 if (rank, step) == (1, 0) else 5
    return torch.randn(rows, 32, generator=generator) * (1 + rank)


def layer() -> nn.LayerNormMLP:
    """The same on every rank: in-process ranks share torch's random state, so it is not used."""
    made = nn.LayerNormMLP(32, 64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return made


def states(model: nn.LayerNormMLP) -> dict[str, torch.Tensor]:
    """Everything that its recipe remembers."""
    assert model._states is not None
    return {
        f"{state.mode}, {name}": tensor
        for state in model._states
        for name, tensor in state.state_dict().items()
    }


def test_all_ranks_remember_the_largest_amaxes_of_any(ranks: Ranks) -> None:
    """Histories and scales are equal on all ranks, and those of one process that runs every rank's
    rows in one region, under the same weights.
    """

    def train(comm: Communicator) -> dict[str, torch.Tensor]:
        model = layer()
        for step in range(STEPS):
            with autocast(recipe=DELAYED, amax_reduction_group=comm):
                y = model(data(comm.rank, step))
            y.sum().backward()
            reduce_amaxes(comm)
        return states(model)

    def train_alone(comm: Communicator) -> dict[str, torch.Tensor]:
        model = layer()
        for step in range(STEPS):
            with autocast(recipe=DELAYED, amax_reduction_group=comm):
                outputs = [model(data(rank, step)) for rank in range(ranks.size)]
            for y in outputs:
                y.sum().backward()
            reduce_amaxes(comm)
        return states(model)

    results: list[Any] = ranks.run(train)
    # In a rank, too: ranks multiply on one thread each, and more would round otherwise.
    expected = run_in_process(1, train_alone)[0]
    for rank, result in enumerate(results):
        for name, tensor in expected.items():
            assert_same_bytes(result[name], tensor, f"rank {rank}: {name}")
