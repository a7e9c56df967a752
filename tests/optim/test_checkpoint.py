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
    draw_gradients,
    make_params,
    named,
    set_gradients,
)
from tests.support.claims import message_of, one_message
from tests.support.ranks import run_ranks
from tests.support.recipes import RECIPES
from tests.support.weights import through_a_file
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, UnsupportedError, ZerocastError
from zerocast.optim import ZeroOptimizer
from zerocast.optim.zero_training import digest_of


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
    for name, value in kept["state"].items():
        assert torch.equal(saved["state"][name], value), name


def test_a_weight_that_was_never_stepped_has_no_inner_state() -> None:
    """It is saved with its master alone and resumes like that."""
    params = make_params(FP8)
    optimizer = ZeroOptimizer(named(params), group=None)
    set_gradients(params, [torch.ones(p.shape) for p in params])
    params[1].grad = None
    optimizer.step()
    saved = optimizer.state_dict()
    assert [name for name in saved["state"] if "layer.1" in name] == ["master.layer.1"]
    assert "state.layer.0.exp_avg" in saved["state"]
    other = ZeroOptimizer(named(make_params(FP8)))
    other.load_state_dict(saved)
    assert other.state_dict()["state"].keys() == saved["state"].keys()


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
    with pytest.raises(InputError, match=r"same class: it was saved with .*AdamW, .*SGD"):
        ZeroOptimizer(named(make_params(NVFP4)), SGD, lr=0.1).load_state_dict(saved)
    with pytest.raises(InputError, match=r"same weights: it has 'layer.0', and this one does not"):
        ZeroOptimizer(named(make_params(NVFP4))[1:]).load_state_dict(saved)


def test_weights_are_found_by_name() -> None:
    """An optimizer that lists the same weights in another order continues, too."""
    saved, forwards, backwards = train_and_save(), Training(lr=1e-2), make_params(NVFP4, seed=1)
    optimizer = ZeroOptimizer(named(backwards)[::-1], lr=1e-2)
    forwards.optimizer.load_state_dict(saved)
    optimizer.load_state_dict(saved)
    set_gradients(backwards, draw_gradients(backwards, 4))
    optimizer.step()
    assert_same_lists(backwards, forwards.train(4), "after a step more")


AVERAGED = 0.75


def averaged(comm: Communicator, recipe: str = "delayed", *, seed: int = 0) -> Training:
    """A training that averages its masters, too."""
    training = Training(comm, RECIPES[recipe], seed=seed)
    training.optimizer.ema(AVERAGED)
    return training


def everything(training: Training) -> dict[str, Any]:
    """All that loading changes, on this rank, in copies."""
    state = through_a_file(training.optimizer.state_dict())
    return {"weights": [p.detach().clone() for p in training.params], "state": state}


@pytest.fixture(scope="module")
def saved_states() -> list[Any]:
    """Of two ranks after 2 steps; not to be changed."""

    def body(comm: Communicator) -> Any:
        training = averaged(comm)
        training.train(0, 1)
        return training.saved()

    return run_in_process(2, body)


def first(saved: Any) -> str:
    """The first weight of which the rank has elements."""
    return next(name for name in saved["state"] if "master." in name).removeprefix("master.")


def change(saved: Any, name: str, new: Any) -> None:
    """Let a tensor of the first weight be another, or be missing."""
    name = f"{name.partition('.')[0]}.{first(saved)}{name[len(name.partition('.')[0]) :]}"
    if new is None:
        del saved["state"][name]
    else:
        saved["state"][name] = new(saved["state"][name])


def damaged(name: str, new: Any) -> Any:
    """Let ``new`` have the tensor of that weight."""
    return lambda saved: change(saved, name, new)


def boxes(new: Any) -> Any:
    """Let its master be of other boxes."""

    def edit(saved: Any) -> None:
        pieces, name = saved["zero"]["pieces"], f"master.{first(saved)}"
        pieces[name] = pieces[name][0], new(pieces[name][1])
        saved["zero"]["digest"] = digest_of(saved["zero"])

    return edit


def holds(**changes: Any) -> Any:
    """Let the state dict hold something else."""
    return lambda saved: saved.update(changes)


def honest(edit: Any) -> Any:
    """Edit what the state dict says of itself, under a digest that is right."""

    def change(saved: Any) -> None:
        zero = saved["zero"]
        edit(zero)
        zero["digest"] = digest_of(zero)

    return change


def in_zero(**changes: Any) -> Any:
    """Let it say something else."""
    return honest(lambda zero: zero.update(changes))


def kinds(edit: Any) -> Any:
    """Edit what it says of the state of the first weight."""
    return lambda saved: edit(saved["zero"]["kinds"][first(saved)])


def option(name: str, value: Any) -> Any:
    """Let the first group have another option."""
    return lambda saved: saved["param_groups"][0].update({name: value})


def weight(what: str, value: Any) -> Any:
    """Let the first weight be described otherwise."""
    return honest(lambda zero: zero["weights"][0].update({what: value}))


def recipe(what: str, value: Any) -> Any:
    """Let the first weight be said to have had another recipe."""
    return honest(lambda zero: zero["weights"][0]["recipe"].update({what: value}))


def remembered(new: Any) -> Any:
    """Let the first weight's recipe remember another scale."""
    key = "recipe.layer.0.scale"
    return lambda saved: saved["state"].update({key: new(saved["state"][key])})


DAMAGES = {
    "format": (in_zero(format=99), "must be of format 2, got 99"),
    "numerics": (in_zero(numerics=99), "same version of the numerics: it was saved with 99"),
    "class": (in_zero(optimizer="mine.AdamW"), "same class: it was saved with mine.AdamW"),
    "name": (weight("name", "other"), "same weights: this one has 'layer.0', and it does not"),
    "shape": (weight("shape", [48, 33]), r"same shape of layer.0: .*\[48, 33\], .*\[33, 48\]"),
    "recipe": (weight("recipe", {"class": "X"}), "same recipe of layer.0: it was saved with"),
    "margin": (recipe("margin", 3), "same recipe of layer.0: it was saved with {'margin': 3}"),
    "number format": (recipe("fp8_format", "e5m2"), "same recipe of layer.0: .*e5m2"),
    "dtype": (weight("dtype", "torch.float32"), "same dtype of layer.0"),
    "amax group": (weight("shares_amax", ["layer.0"]), "same shares_amax of layer.0"),
    "rank": (in_zero(rank=0), "rank 1 of 2 must load the state dict .* got that of rank 0 of 2"),
    "ranks": (in_zero(world_size=4), "got that of rank 1 of 4"),
    "no weights": (lambda saved: saved["zero"].pop("weights"), "entry zero of a state dict"),
    "no pieces": (honest(lambda zero: zero.pop("pieces")), "KeyError: 'pieces'"),
    "no zero": (holds(zero=None), "NoneType"),
    "no state": (holds(state=None), "NoneType"),
    "no kinds": (lambda saved: saved["zero"].update(kinds=None), "NoneType"),
    "no recipe state": (
        lambda saved: saved["state"].pop("recipe.layer.0.scale"),
        "must have recipe.layer.0.scale, and has none",
    ),
    "no param groups": (holds(param_groups=None), "NoneType"),
    "foreign tensor": (lambda saved: saved["state"].update(x=torch.ones(1)), "KeyError: 'x'"),
    "due": (in_zero(due=[7]), r"due of a state must be a list of names of weights, got \[7\]"),
    "due text": (in_zero(due=""), "due of a state must be a list of names of weights, got ''"),
    "steps": (in_zero(steps=-4), "steps of a state must be a number of steps, from 0 to .* got -4"),
    "too many steps": (in_zero(steps=2**63), "from 0 to 2147483644, got 9223372036854775808"),
    "no steps": (in_zero(steps=None), "must be a number of steps, .* got None"),
    "shape of a count": (
        damaged("state.step", lambda step: step.expand(3)),
        r"state.layer.\d.step in .* must be a plain tensor of 1 elements, got 3 elements",
    ),
    "another step": (in_zero(steps=3), "a state of the same step: rank 0 has 'steps 2' where rank"),
    "steps alone": (lambda s: s["zero"].update(steps=3), "entry zero of a state dict must"),
    "averages alone": (lambda s: s["zero"].update(averages=[0.5]), "entry zero of a state dict"),
    "groups": (in_zero(groups=2), "number of param groups: it was saved with 2"),
    "another key": (holds(x=1), "needs what ZeroOptimizer.state_dict.. returned"),
    "another key of zero": (lambda s: s["zero"].update(x=1), "entry zero of a state dict must"),
    "a longer master": (
        damaged("master", lambda t: torch.cat([t, t[:5]])),
        r"master.layer.\d in a state dict must be a plain tensor of \d+ elements, got \d+ elem",
    ),
    "lr nan": (option("lr", float("nan")), "lr of the saved options must be numbers, got nan"),
    "betas nan": (option("betas", (0.9, float("nan"))), "betas of the saved options must be"),
    "mode": (in_zero(mode="x"), "mode of a state must be 'train' or 'eval', got 'x'"),
    "averages": (in_zero(averages=[2.0]), "decay must be a number from 0 up to.* got 2.0"),
    "no averages": (in_zero(averages=None), "averages of a state must be a list of decays"),
    "no average": (
        damaged("state.ema(0.75)", None),
        r"must have state.layer.\d.ema\(0.75\), and has none",
    ),
    "an average less": (
        lambda s: (kinds(lambda k: k.pop("ema(0.75)"))(s), damaged("state.ema(0.75)", None)(s)),
        r"must have the averages \['ema\(0.75\)'\], got \[\]",
    ),
    "short average": (
        damaged("state.ema(0.75)", lambda t: t[:-1]),
        r"state.layer.\d.ema\(0.75\) in a state dict must be a plain tensor of",
    ),
    "no exp_avg": (
        damaged("state.exp_avg", None),
        r"must have state.layer.\d.exp_avg, and has none",
    ),
    "an exp_avg less": (
        lambda s: (kinds(lambda k: k.pop("exp_avg"))(s), damaged("state.exp_avg", None)(s)),
        r"layer.\d must have .*has no exp_avg",
    ),
    "exp_avg none": (
        damaged("state.exp_avg", lambda t: None),
        r"state.layer.\d.exp_avg in .* must be a plain tensor of .* got a NoneType",
    ),
    "exp_avg a number": (
        lambda s: (
            kinds(lambda k: k.update(exp_avg={"value": "x"}))(s),
            damaged("state.exp_avg", None)(s),
        ),
        r"exp_avg of layer.\d must be a tensor, got a str",
    ),
    "short": (
        damaged("state.exp_avg", lambda t: t[:-1]),
        r"state.layer.\d.exp_avg in a state dict must be a plain tensor of",
    ),
    "int": (damaged("state.exp_avg", lambda t: t.int()), r"exp_avg of layer.\d must be torch.flo"),
    "negative": (
        damaged("state.exp_avg_sq", lambda t: t - 1e9),
        r"exp_avg_sq of layer.\d must not be",
    ),
    "step": (damaged("state.step", lambda t: t - 9), r"step of layer.\d must not be neg.* got -7"),
    "nan": (
        damaged("state.exp_avg", lambda t: t * torch.nan),
        r"exp_avg of layer.\d must be numbers",
    ),
    "no master": (damaged("master", None), r"must have master.layer.\d, and has none"),
    "master nan": (
        damaged("master", lambda t: t * torch.nan),
        r"master of layer.\d must be finite",
    ),
    "FP16": (damaged("master", lambda t: t.half()), r"master of layer.\d must be torch.float32"),
    "int64": (damaged("master", lambda t: t.long()), r"master of layer.\d must be torch.float32"),
    "no boxes": (boxes(lambda each: []), "must be a plain tensor of 0 elements, got"),
    "boxes of text": (boxes(lambda each: ["x", *each[1:]]), "TypeError"),
    "a box before the first element": (
        boxes(lambda each: [(tuple(o - 5 for o in each[0][0]), each[0][1]), *each[1:]]),
        r"this rank needs elements of master.layer.\d which the given state lacks",
    ),
    "scale nan": (
        remembered(lambda t: t * torch.nan),
        "layer.0 must be .* scale that is not finite",
    ),
    "scale 0": (
        remembered(lambda t: t * 0),
        "layer.0 must be .* scale that is not finite and above",
    ),
    "scale int": (remembered(lambda t: t.int()), "the state of layer.0 is .*scale torch.float32"),
    "lr": (option("lr", "x"), "AdamW refuses the saved options"),
    "another lr": (option("lr", 0.5), r"rank 0 has 'param_groups\[0\] with .*0.5"),
    "no betas": (lambda s: s["param_groups"][0].pop("betas"), "must have 'betas'"),
}


@pytest.mark.parametrize(("damage", "match"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_refused_by_name(
    saved_states: list[Any], damage: Any, match: str
) -> None:
    """Damage on one rank is named on all, and nothing has been changed on any."""

    def body(comm: Communicator) -> str:
        training, given = averaged(comm, seed=1), copy.deepcopy(saved_states[comm.rank])
        before = everything(training)
        if comm.rank == 1:
            damage(given)
        message = message_of(ZerocastError, training.optimizer.load_state_dict, given)
        after = everything(training)
        assert_same_lists(after["weights"], before["weights"], "weights after the refusal")
        assert torch.equal(serialized(after["state"]), serialized(before["state"]))
        return message

    message = one_message(run_in_process(2, body))
    assert re.search(match, message), message


def serialized(state: Any) -> torch.Tensor:
    """A state dict in bytes."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


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
        with pytest.raises(CheckpointException, match=r"call zerocast.checkpoint.save"):
            dcp.async_save(optimizer.state_dict(), checkpoint_id=path).result()  # of copies

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
