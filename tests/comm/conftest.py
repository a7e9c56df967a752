"""Communicators on every small number of ranks."""

import pytest
import torch

from tests.conftest import Ranks, stamp
from zerocast.comm import Communicator

# Each kind of processes alone, with all, and with a number between.
SIZES = {"single_rank": (1,), "in_process": range(1, 6), "mpi": (1, 3, 4),
         "torch_distributed": (1, 2, 4)}  # fmt: skip


@pytest.fixture(params=[stamp(kind, size) for kind in SIZES for size in SIZES[kind]])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """SingleRank, threads on 1 to 5 ranks, every other kind on some of 1 to 4."""
    return Ranks(*request.param)


def collectives(comm: Communicator) -> dict[str, torch.Tensor]:
    """One result of every collective that moves tensors, from data that differ on every rank."""
    generator = torch.Generator().manual_seed(comm.rank)
    ints = torch.randint(-99, 99, (23,), generator=generator, dtype=torch.int32)
    sums = ints.double()
    gradient, part = torch.arange(11.0 * comm.size) * (comm.rank + 1), torch.empty(11)
    again = gradient.clone()  # what is reduced is not kept
    counts = [(3 * r * r + 2) % 7 for r in range(comm.size)]
    uneven, equal = torch.zeros(sum(counts)).bfloat16(), torch.zeros(6 * comm.size).bfloat16()
    uneven.split(counts)[comm.rank].fill_(comm.rank + 1)
    equal.split(6)[comm.rank].fill_(comm.rank + 1)
    started = equal.clone()
    spread = torch.arange(3 * comm.size) + 100 * comm.rank
    lengths = [(r + comm.rank) % 3 for r in range(comm.size)]  # what two ranks send each other
    given = torch.full((sum(lengths),), comm.rank + 1.0).bfloat16()
    swapped = torch.zeros_like(given)
    sent = torch.randn(13, generator=generator)
    comm.all_reduce_max_(ints)
    comm.all_reduce_sum_(sums)
    comm.reduce_scatter_sum(part, gradient)
    place = again[11 * comm.rank : 11 * comm.rank + 11]
    comm.reduce_scatter_sum(place, again)
    comm.all_gather_(uneven, counts)
    comm.all_gather_(equal)
    comm.broadcast_(sent, comm.size - 1)
    comm.start_all_gather_(started)()
    comm.start_all_to_all(spread, spread)()
    comm.start_all_to_all(swapped, given, lengths, lengths)()
    comm.barrier()
    return {
        "max": ints, "sum": sums, "reduce_scatter": part, "in place": place.clone(),
        "uneven": uneven, "equal": equal, "broadcast": sent, "started": started,
        "all to all in place": spread, "all to all": swapped,
        "objects": torch.tensor(comm.all_gather_object(comm.rank)),
    }  # fmt: skip
