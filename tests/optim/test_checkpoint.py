"""Saving and loading: bit-exact on as many ranks, and on others from all ranks' state dicts."""

import copy
import io
import re
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD

from tests.optim.training import (
    FP8,
    NVFP4,
    Training,
    assert_same_lists,
    make_params,
    named,
    set_gradients,
)
from tests.support.claims import message_of, one_message
from tests.support.ranks import run_ranks
from tests.support.weights import through_a_file
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, NonFiniteError, UnsupportedError
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
        (
            lambda saved, rank: saved[(rank + 1) % 3],
            "must load the state dict that it saved itself",
        ),
        (lambda saved, rank: saved[:2], "or the sequence of all ranks' state dicts, each once"),
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
    with pytest.raises(InputError, match=r"same optimizer: it was saved with .*AdamW, .*SGD"):
        ZeroOptimizer(named(make_params(NVFP4)), SGD, lr=0.1).load_state_dict(saved)
    with pytest.raises(InputError, match=r"same weights: it has 'layer.0', and this one has not"):
        ZeroOptimizer(named(make_params(NVFP4))[1:]).load_state_dict(saved)
    with pytest.raises(InputError, match=r"it has 'layer.0' where this one has 'layer.5'"):
        ZeroOptimizer(named(make_params(NVFP4))[::-1]).load_state_dict(saved)


def damaged(key: str, change: Any) -> Any:
    """Let ``change`` have the entry ``key`` of the first weight."""

    def damage(saved: Any) -> None:
        saved["state"][0][key] = change(saved["state"][0][key])

    return damage


def in_zero(**changes: Any) -> Any:
    """Let the state dict say something else of itself."""
    return lambda saved: saved["zero"].update(changes)


def option(name: str, value: Any) -> Any:
    """Let the first group have another option."""
    return lambda saved: saved["param_groups"][0].update({name: value})


def weight(what: str, value: Any) -> Any:
    """Let the first weight be described otherwise."""
    return lambda saved: saved["zero"]["weights"][0].update({what: value})


DAMAGES = {
    "format": (in_zero(format=99), "must be of format 1, got 99"),
    "numerics": (in_zero(numerics=99), "same version of the numerics: it was saved with 99"),
    "class": (in_zero(optimizer="mine.AdamW"), "same optimizer: it was saved with mine.AdamW"),
    "name": (weight("name", "other"), "same weights: this one has 'layer.0', and it has not"),
    "shape": (weight("shape", [48, 33]), r"same shape of layer.0: .*\[48, 33\], .*\[33, 48\]"),
    "recipe": (weight("recipe", {"class": "X"}), "same recipe of layer.0: it was saved with"),
    "dtype": (weight("dtype", "torch.float32"), "same dtype of layer.0"),
    "amax group": (weight("shares_amax", ["layer.0"]), "same shares_amax of layer.0"),
    "rank": (in_zero(rank=1), "got that of rank 1 of 1"),
    "ranks": (in_zero(world_size=2), "got that of rank 0 of 2"),
    "no exp_avg": (lambda s: s["state"][0].pop("exp_avg"), "layer.0 must have .*has no exp_avg"),
    "short": (damaged("exp_avg", lambda t: t[:-1]), r"exp_avg of layer.0 must be .*\[1584\]"),
    "int": (damaged("exp_avg", lambda t: t.int()), "exp_avg of layer.0 must be torch.float32"),
    "negative": (damaged("exp_avg_sq", lambda t: t - 1e9), "exp_avg_sq of layer.0 must not be"),
    "step": (damaged("step", lambda t: t - 9), "step of layer.0 must not be negative, got -5"),
    "nan": (
        damaged("exp_avg", lambda t: t * torch.nan),
        "exp_avg of layer.0 must be numbers, got nan",
    ),
    "master nan": (damaged("master", lambda t: t * torch.nan), "master of layer.0 must be finite"),
    "FP16": (damaged("master", lambda t: t.half()), "master of layer.0 must be torch.float32"),
    "2-D": (damaged("master", lambda t: t.view(33, -1)), "master of layer.0 must be"),
    "start": (damaged("start", lambda start: "x"), "start at an element, got .* from 'x'"),
    "lr": (option("lr", "x"), "AdamW refuses the saved options"),
    "no betas": (lambda s: s["param_groups"][0].pop("betas"), "must have 'betas'"),
}


@pytest.mark.parametrize(("damage", "match"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_refused_by_name(damage: Any, match: str) -> None:
    """Nothing has been changed then, and the error says what is wrong."""
    saved, training = train_and_save(), Training()
    before = training.masters()
    damage(saved)
    with pytest.raises((InputError, NonFiniteError), match=match):
        training.optimizer.load_state_dict(saved)
    assert_same_lists(training.masters(), before, "after the refusal")
    assert training.optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.mpi(min_size=4)
def test_what_one_rank_saved_for_all_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch.distributed.checkpoint takes equal names for copies and keeps one rank's tensors, so a
    state dict does not let itself be saved so.
    """

    def run(comm: Communicator) -> None:
        path = comm.all_gather_object(str(tmp_path_factory.mktemp("state")))[0]
        optimizer = ZeroOptimizer([torch.nn.Parameter(torch.ones(64))], SGD, comm, lr=0.5)
        for value in (optimizer.state_dict(), {"optimizer": optimizer}):
            with pytest.raises(CheckpointException, match=r"call zerocast.checkpoint.save"):
                dcp.save({"state": value} if "zero" in value else value, checkpoint_id=path)
        assert through_a_file(optimizer.state_dict())["zero"]["every_rank"] == {}
        assert copy.deepcopy(optimizer.state_dict())["zero"]["every_rank"] == {}

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
    with pytest.raises(UnsupportedError, match=r"zerocast.checkpoint.save|state_dict\(\) returns"):
        ask(optimizer)
