"""Saving and loading: bit-exact on as many ranks, and on others from all ranks' state dicts."""

import copy
import io
import re
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD

import zerocast
from tests.optim.training import (
    FP8,
    NVFP4,
    Training,
    assert_same_lists,
    draw_gradients,
    make_params,
    set_gradients,
)
from tests.support.claims import message_of, one_message
from tests.support.ranks import run_ranks
from tests.support.same_bytes import assert_same_bytes
from tests.support.weights import through_a_file
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, UnsupportedError
from zerocast.optim import ZeroOptimizer


def train_and_save(comm: Communicator | None = None) -> Any:
    """The state dict of this rank after 4 steps, every rank with the same gradients."""
    training = Training(comm, lr=1e-2, weight_decay=0.1)
    training.train(*range(4), alike=True)
    return training.saved()


@pytest.mark.own_defaults("meta")
def test_loading_leaves_the_given_state_alone() -> None:
    """Further steps do not change the state dict that was loaded."""
    saved = train_and_save()
    kept = through_a_file(saved)
    training = Training()
    training.optimizer.load_state_dict(saved)
    training.train(0, 1)
    for i, entry in kept["state"].items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(saved["state"][i][name]), torch.as_tensor(value))


def test_a_weight_that_was_never_stepped_has_no_inner_state() -> None:
    """It is saved with its master alone and resumes like that."""
    params = make_params(FP8)
    optimizer = ZeroOptimizer(params, group=None)
    set_gradients(params, [torch.ones(p.shape) for p in params])
    params[1].grad = None
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"][1].keys() == {"master", "start"}
    assert "exp_avg" in saved["state"][0]
    other = ZeroOptimizer(make_params(FP8))
    other.load_state_dict(saved)
    assert other.state_dict()["state"][1].keys() == {"master", "start"}


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda saved, rank: saved[(rank + 1) % 3], "holds none from"),
        (lambda saved, rank: saved[:2], "or give every rank the sequence of all ranks"),
        (lambda saved, rank: {"state": {}}, "what ZeroOptimizer.state_dict"),
        (lambda saved, rank: [3], "got a int that is not one"),
        (lambda saved, rank: None, "got a NoneType that is not one"),
        (lambda saved, rank: [], "one state dict at least"),
        (
            lambda saved, rank: [s | {"param_groups": []} for s in saved],
            "same number of param groups: it was saved with 0, and this one has 1",
        ),
    ],
    ids=["another-ranks", "one-missing", "no-state", "no-dict", "none", "empty", "no-groups"],
)
def test_a_state_that_does_not_fit_is_refused_on_every_rank(spoil: Any, match: str) -> None:
    """The same error everywhere, and the optimizer stays as it was."""
    saved = run_in_process(3, train_and_save)

    def load(comm: Communicator) -> str:
        training = Training(comm)
        before = training.masters()
        load = training.optimizer.load_state_dict
        message = message_of(InputError, load, spoil(saved, comm.rank))
        assert training.optimizer.param_groups[0]["lr"] == 1e-3
        assert_same_lists(training.masters(), before, "after the refusal")
        return message

    assert re.search(match, one_message(run_in_process(3, load)))


def test_a_state_of_another_optimizer_or_other_weights_is_refused() -> None:
    """Both sides of the disagreement are in the message."""
    saved = train_and_save()
    with pytest.raises(InputError, match=r"same optimizer: it was saved with AdamW, .* has SGD"):
        ZeroOptimizer(make_params(NVFP4), SGD, lr=0.1).load_state_dict(saved)
    with pytest.raises(InputError, match=r"same weights: it was saved with .*1584"):
        ZeroOptimizer(make_params(NVFP4)[1:]).load_state_dict(saved)


@pytest.mark.mpi(min_size=4)
def test_what_one_rank_saved_for_all_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch.distributed.checkpoint takes equal names for copies and keeps one rank's tensors: to
    load them is refused on all ranks. Bytes under a name of each rank are loaded as they were.
    """

    def make(comm: Communicator) -> tuple[Any, ZeroOptimizer]:
        value = torch.linspace(-1, 1, 1024).view(32, 32)
        weight = torch.nn.Parameter(zerocast.quantize(value, NVFP4))
        return weight, ZeroOptimizer([weight], SGD, comm, lr=0.5, momentum=0.9)

    def run(comm: Communicator) -> None:
        path, own = comm.all_gather_object(str(tmp_path_factory.mktemp("state")))[0], io.BytesIO()
        weight, optimizer = make(comm)
        set_gradients([weight], draw_gradients([weight], 0))
        optimizer.step()
        torch.save(optimizer.state_dict(), own)
        dcp.save(
            {"live": optimizer.state_dict(), f"of {comm.rank}": own.getvalue()}, checkpoint_id=path
        )
        other, resumed = make(comm)
        loaded = {"live": resumed.state_dict(), f"of {comm.rank}": b""}
        dcp.load(loaded, checkpoint_id=path)
        with pytest.raises(InputError, match="the state dict that it saved itself"):
            resumed.load_state_dict(loaded["live"])
        resumed.load_state_dict(torch.load(io.BytesIO(loaded[f"of {comm.rank}"])))
        for mine, params in ((resumed, other), (optimizer, weight)):
            set_gradients([params], draw_gradients([params], 0, 1))
            mine.step()
        assert_same_bytes(resumed.gather_master(other), optimizer.gather_master(weight), "master")

    run_ranks("torch_distributed", 2, run)


@pytest.mark.parametrize(
    "ask",
    [
        copy.deepcopy,
        lambda optimizer: torch.save(optimizer, io.BytesIO()),
        lambda optimizer: get_optimizer_state_dict(torch.nn.Linear(4, 4), optimizer),
    ],
)
def test_what_would_keep_one_part_is_refused(ask: Any) -> None:
    """A copy without the ranks' buffers, and torch's checkpoints, which keep plain tensors of one
    rank.
    """
    optimizer = ZeroOptimizer([torch.nn.Parameter(torch.ones(4))])
    with pytest.raises(UnsupportedError, match=r"optimizer.state_dict\(\) returns"):
        ask(optimizer)
