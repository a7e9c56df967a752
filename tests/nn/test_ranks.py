"""Layers on several ranks: delayed scaling agrees on its scales, whatever each rank has seen."""

from functools import partial

import torch

from tests.support.claims import assert_same_tensors
from tests.support.layers import RECIPES
from tests.support.models import every_layer, recipe_state
from tests.support.ranks import run_ranks
from zerocast.nn.autocast import autocast, reduce_amaxes

DELAYED = RECIPES["delayed"]
STEPS = 3


def data(rank: int, step: int) -> torch.Tensor:
    """Rows of different magnitudes on every rank; rank 1 has none in step 0."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    rows = 0 if (rank, step) == (1, 0) else 5
    return torch.randn(rows, 64, generator=generator) * (1 + rank)


def test_all_ranks_remember_the_largest_amaxes_of_any(ranks):
    """Histories and scales are equal on all ranks, and those of one process that runs every rank's
    rows in one region, under the same weights.
    """

    def train(comm, alone=False):
        model = every_layer()
        for step in range(STEPS):
            with autocast(recipe=DELAYED, amax_reduction_group=comm):
                rows = range(ranks.size) if alone else [comm.rank]
                outputs = [model(data(rank, step)) for rank in rows]
            for y in outputs:
                y.sum().backward()
            reduce_amaxes(comm)
        return recipe_state(model)

    results = ranks.run(train)
    # On as many threads as the ranks have: with others a product may be rounded otherwise.
    kind = "single_rank" if ranks.kind == "single_rank" else "in_process"
    expected = run_ranks(kind, 1, partial(train, alone=True))[0]
    for rank, result in enumerate(results):
        assert_same_tensors(result, expected, f"on rank {rank}")
