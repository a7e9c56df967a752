"""An average of masters under FSDP2, as the docstring of zerocast.sharded writes it down."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.sharded.sharded import adamw, bank, batch, feed, reshard
from tests.support.ranks import run_ranks
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes
from zerocast.sharded import MasterWeight

pytestmark = pytest.mark.mpi(min_size=4)
ROWS, DECAY = (37, 1), 0.75


def masters(model):
    """By name, plain DTensors; what recipes remember is no master."""
    names = dict(model.named_parameters())
    return {name: value for name, value in model.state_dict().items() if name in names}


def step(model, optimizer, number):
    """One step with the same gradients for every number of ranks."""
    feed(model.parameters(), number)
    optimizer.step()


def test_an_average_of_masters_is_the_same_for_every_cut_and_resumes(tmp_path_factory):
    """2 steps, saved by torch.distributed.checkpoint, loaded on another number of ranks, 1 step; in
    the weights it is gathered as its own cast, and the masters come back to the bit.
    """

    def train(comm):
        path = comm.all_gather_object(str(tmp_path_factory.mktemp("average")))[0]
        model = bank(RECIPES["nvfp4"], ROWS)
        optimizer = adamw(model.parameters())
        average = {name: value.clone() for name, value in masters(model).items()}
        for number in range(3):
            step(model, optimizer, number)
            for name, value in masters(model).items():
                average[name].lerp_(value, 1 - DECAY)
            if number == 1:
                dcp.save({"average": average}, checkpoint_id=path)
                for value in average.values():
                    value.zero_()
                dcp.load({"average": average}, checkpoint_id=path)
        assert not any(isinstance(v.to_local(), MasterWeight) for v in average.values())

        before = {name: value.full_tensor() for name, value in masters(model).items()}
        kept = {name: value.clone() for name, value in masters(model).items()}
        model.load_state_dict(average, strict=False)
        with torch.no_grad():
            shown = model(batch())
        reshard(model)
        model.load_state_dict(kept, strict=False)
        for name, value in masters(model).items():
            assert_same_bytes(value.full_tensor(), before[name], name)
        return shown, [value.full_tensor() for value in average.values()]

    results = [run_ranks("torch_distributed", size, train) for size in (1, 3)]
    shown, averages = results[0][0]
    for other, theirs in results[1]:
        assert_same_bytes(other, shown, "output of the averages")
        for mine, value in zip(averages, theirs, strict=True):
            assert_same_bytes(value, mine, "average")
