"""Layers on several ranks: delayed scaling agrees on its scales, whatever each rank has seen."""

from functools import partial

import pytest
import torch

from tests.conftest import THREADS, stamp
from tests.support.claims import assert_same_tensors
from tests.support.layers import RECIPES, breaks
from tests.support.models import every_layer, recipe_state
from tests.support.ranks import MPI_RANKS, PROCESSES, run_ranks
from zerocast.nn.autocast import autocast, reduce_amaxes

DELAYED = RECIPES["delayed"]
STEPS = 3
EAGER = [*THREADS, *(stamp(kind, 3 + i) for i, kind in enumerate(PROCESSES))]
WAYS = [
    *(pytest.param(False, *on.values, marks=on.marks, id=on.id) for on in EAGER),
    pytest.param(True, ("in_process", 2), id="compiled"),
    pytest.param(
        True, ("torch_distributed", 2), id="compiled on gloo",
        marks=[pytest.mark.mpi(min_size=MPI_RANKS), pytest.mark.slow],
    ),
]  # fmt: skip


def data(rank: int, step: int) -> torch.Tensor:
    """Rows of different magnitudes on every rank; rank 1 has none in step 0."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    rows = 0 if (rank, step) == (1, 0) else 5
    return torch.randn(rows, 64, generator=generator) * (1 + rank)


@breaks
@pytest.mark.parametrize(("compiles", "ranks"), WAYS, indirect=["ranks"])
def test_all_ranks_remember_the_largest_amaxes_of_any(ranks, compiles):
    """Histories and scales are equal on all ranks, and those of one process that runs every rank's
    rows in one region, under the same weights; of a compiled model, too.
    """
    torch._dynamo.reset()

    def train(comm, alone=False):
        model = every_layer()
        is_compiled = compiles and not alone
        run = torch.compile(model, backend="aot_eager") if is_compiled else model
        for step in range(STEPS):
            with autocast(recipe=DELAYED, amax_reduction_group=comm):
                rows = range(ranks.size) if alone else [comm.rank]
                outputs = [run(data(rank, step)) for rank in rows]
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
