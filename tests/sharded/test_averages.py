"""An average of masters under FSDP2, as the docstring of zerocast.sharded writes it down."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.sharded.sharded import adamw, bank, batch, feed, reshard, whole_masters
from tests.support.claims import assert_same_tensors
from tests.support.ranks import run_ranks, shared_folder
from zerocast.sharded import MasterWeight

pytestmark = pytest.mark.mpi(min_size=4)
ROWS, DECAY = (37, 1), 0.75


def masters(model):
    """By name, plain DTensors; what recipes remember is no master."""
    names = dict(model.named_parameters())
    return {name: value for name, value in model.state_dict().items() if name in names}


def test_an_average_of_masters_is_the_same_for_every_cut_and_resumes():
    """2 steps, saved by torch.distributed.checkpoint, loaded on another number of ranks, 1 step; in
    the weights it is gathered as its own cast, and the masters come back to the bit.
    """

    def train(comm):
        path = shared_folder(comm)
        model = bank(rows=ROWS)
        optimizer = adamw(model.parameters())
        average = {name: value.clone() for name, value in masters(model).items()}
        for number in range(3):
            feed(model.parameters(), number)
            optimizer.step()
            for name, value in masters(model).items():
                average[name].lerp_(value, 1 - DECAY)
            if number == 1:
                dcp.save({"average": average}, checkpoint_id=path)
                for value in average.values():
                    value.zero_()
                dcp.load({"average": average}, checkpoint_id=path)
        assert not any(isinstance(v.to_local(), MasterWeight) for v in average.values())

        before = whole_masters(model)
        kept = {name: value.clone() for name, value in masters(model).items()}
        model.load_state_dict(average, strict=False)
        with torch.no_grad():
            shown = model(batch())
        reshard(model)
        model.load_state_dict(kept, strict=False)
        assert_same_tensors(whole_masters(model), before, "once they came back")
        averages = {name: value.full_tensor() for name, value in average.items()}
        return averages | {"output of the averages": shown}

    (alone,) = run_ranks("torch_distributed", 1, train)
    for found in run_ranks("torch_distributed", 3, train):
        assert_same_tensors(found, alone, "on 3 ranks")
