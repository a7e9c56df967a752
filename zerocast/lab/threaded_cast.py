"""Casts a weight from shards, with threads of this process as ranks."""

from collections.abc import Callable, Sequence

import torch

from zerocast import CastPlan, QuantizedTensor
from zerocast.comm import Communicator, run_in_process


def cast_on_threads(
    make: Callable[[], QuantizedTensor], master: torch.Tensor, cuts: Sequence[int]
) -> list[QuantizedTensor]:
    """Cast and gather one weight; return the weight of each rank.

    Args:
        make: makes the weight; called on each rank.
        master: the whole master.
        cuts: the flat indices where the shards of ranks begin, and where the last ends.
    """

    def on_rank(comm: Communicator) -> QuantizedTensor:
        start, end = cuts[comm.rank : comm.rank + 2]
        weight = make()
        plan = CastPlan([weight], [master.view(-1)[start:end]], [start], comm)
        plan.cast()
        plan.all_gather()
        return weight

    return run_in_process(len(cuts) - 1, on_rank)
