"""Param groups, schedulers, and what an optimizer may be given."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.optim import SGD

import zerocast
from tests.conftest import Ranks, in_turn
from tests.optim.training import (
    NVFP4,
    Training,
    Whole,
    assert_cast_of,
    draw_gradients,
    make_params,
    named,
    set_gradients,
)
from tests.support.claims import assert_same_tensors, message_of, stored, told_all
from tests.support.ranks import on_ranks
from zerocast.comm import Communicator
from zerocast.errors import InputError, RankMismatchError, UnsupportedError
from zerocast.optim import ZeroOptimizer

# Params of make_params by group, out of storage order: groups mix kinds, kinds mix groups.
GROUPS = (
    {"places": [4, 0], "lr": 1e-2},
    {"places": [3, 1, 5], "weight_decay": 0.7, "betas": (0.5, 0.9)},
    {"places": [2], "lr": 3e-3, "eps": 1e-3},
)


def grouped(params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """``params`` in the groups of :data:`GROUPS`."""
    return [
        {name: value for name, value in group.items() if name != "places"}
        | {"params": [params[i] for i in group["places"]]}
        for group in GROUPS
    ]


schedulers = torch.optim.lr_scheduler
SCHEDULERS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any]]] = {
    "none": (lambda o: schedulers.LambdaLR(o, lambda s: 1.0),),
    "cosine": (lambda o: schedulers.CosineAnnealingLR(o, 7),),
    "lambda": (lambda o: schedulers.LambdaLR(o, [lambda s: 0.9**s, lambda s: 1.0, lambda s: s]),),
    "one-cycle": (lambda o: schedulers.OneCycleLR(o, [0.1, 0.2, 0.3], total_steps=12),),
}


@pytest.mark.parametrize(("make_scheduler", "ranks"), in_turn(SCHEDULERS), indirect=["ranks"])
def test_every_group_has_its_own_options_and_schedulers_change_them(
    ranks: Ranks, make_scheduler: Any
) -> None:
    """Groups that mix storage kinds, each with options of its own and the defaults for the rest. A
    scheduler made on the wrapper changes what the masters are stepped with; betas too.
    """

    def train(training: Training | Whole) -> None:
        scheduler = make_scheduler(training.optimizer)
        for step in range(10):
            training.train(step)
            scheduler.step()

    def on_rank(comm: Communicator) -> list[torch.nn.Parameter]:
        sharded = Training(comm, given=grouped, lr=2e-2, amsgrad=True)
        train(sharded)
        return sharded.params

    whole = Whole(ranks=ranks.size, given=grouped, lr=2e-2, amsgrad=True)
    train(whole)
    for params in ranks.run(on_rank):
        assert_cast_of(params, whole.masters)


def test_param_groups_show_the_inner_optimizers_options() -> None:
    """Options that were not given appear with the inner optimizer's defaults."""
    optimizer = ZeroOptimizer(make_params(NVFP4), SGD, lr=0.3)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.3, 0, False)
    assert optimizer.defaults["lr"] == 0.3


# --- which weights ---


def test_a_tied_weight_counts_once() -> None:
    """The same Parameter given twice is one weight, with the gradient that both uses left in it."""
    weight = torch.nn.Parameter(torch.zeros(6))
    optimizer = ZeroOptimizer([weight, weight], SGD, lr=1.0)
    (weight.sum() + 2 * weight.sum()).backward()
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((6,), -3.0))
    assert len(optimizer.state_dict()["state"]) == 1


@pytest.mark.parametrize("named", [False, True])
def test_frozen_weights_are_left_out_and_groups_keep_their_places(named: bool) -> None:
    """A weight that requires no gradient is neither stepped nor moved, nor has it a master; its
    group stays, and the others are stepped.
    """
    first, last = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    params, place = {"a": first, "b": frozen, "c": last}, frozen.data_ptr()
    groups = [
        {"params": [pair if named else pair[1]], "lr": lr}
        for pair, lr in zip(params.items(), (1.0, 2.0, 3.0), strict=True)
    ]
    optimizer = ZeroOptimizer(groups, SGD, lr=0.1)
    for param in params.values():
        param.grad = torch.ones(4)
    optimizer.step()
    assert frozen.data_ptr() == place
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0, 3.0]
    assert [param.tolist() for param in params.values()] == [[0.0] * 4, [1.0] * 4, [-2.0] * 4]
    with pytest.raises(InputError, match="trainable parameters, got another"):
        optimizer.gather_master(frozen)


@on_ranks("in_process", 2)
@pytest.mark.parametrize("mode", ["hash", "full"])
def test_verify_compares_frozen_parameters(comm: Communicator, mode: Any) -> None:
    """A frozen plain weight, or codes, that differ when the optimizer is made, or are written on
    one rank later, are named on every rank; without ``verify`` they are not looked at.
    """

    def weights() -> list[torch.nn.Parameter]:
        params = make_params(NVFP4)
        for frozen in (params[1], params[3]):
            frozen.requires_grad_(False)
        return params

    def make(params: list[torch.nn.Parameter], **options: Any) -> ZeroOptimizer:
        return ZeroOptimizer(named(params), SGD, comm, lr=0.5, **options)

    for place in (1, 3):
        params, untouched = weights(), weights()
        if comm.rank == 1:
            params[place].data.copy_(torch.full(params[place].shape, 7.0))
        held = {f"{i}": p.detach().clone() for i, p in enumerate(params)}
        message = told_all(comm, RankMismatchError, make, params, verify=mode)
        assert f"layer.{place}: " in message
        assert_same_tensors(stored({f"{i}": p for i, p in enumerate(params)}), stored(held))
        make(params).step()
        optimizer = make(untouched, verify=mode)
        optimizer.step()
        if comm.rank == 1:
            untouched[place].data.copy_(torch.full(params[place].shape, 7.0))
        for _ in range(2):
            assert f"layer.{place}: " in told_all(comm, RankMismatchError, optimizer.step)
        untouched[place].data.copy_(torch.full(params[place].shape, 7.0))
        optimizer.step()


def test_weights_are_views_of_the_buffers_that_are_gathered() -> None:
    """Codes and plain weights lie end to end in one buffer a storage kind, and stay there."""
    params = make_params(NVFP4)
    optimizer = ZeroOptimizer(params, group=None)
    codes = [p.rowwise_data for p in params if isinstance(p, zerocast.QuantizedTensor)]
    places = [c.data_ptr() for c in codes]
    assert places == [places[0], places[0] + 33 * 24, places[0] + 33 * 24 + 8]
    assert params[5].data_ptr() == params[3].data_ptr() + 2 * 37
    set_gradients(params, [torch.ones(p.shape) for p in params])
    optimizer.step()
    assert [c.data_ptr() for c in codes] == places


def test_plain_weights_have_storages_of_their_own() -> None:
    """Two of one storage would be taken for copies of each other: safetensors refuses them, and
    accelerate saves one.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = ZeroOptimizer(model.named_parameters(), SGD, lr=1.0)
    saved = safetensors.torch.load(safetensors.torch.save(model.state_dict()))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for name, param in model.named_parameters():
        assert param.untyped_storage().nbytes() == param.nbytes
        assert torch.equal(param, saved[name] - 1)


def test_an_optimizer_made_in_inference_mode_trains() -> None:
    """Its buffers are no inference tensors, which could not be written outside."""
    params = make_params(NVFP4)
    gradients = draw_gradients(params, 0)
    with torch.inference_mode():
        optimizer = ZeroOptimizer(params)
        set_gradients(params, gradients)
        optimizer.step()
    set_gradients(params, gradients)
    optimizer.step()


def test_loading_into_a_model_that_has_moved_is_refused() -> None:
    """The weights that it reads would not be those that are loaded; nothing has been changed."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    optimizer = ZeroOptimizer(model.named_parameters())
    state = copy.deepcopy(optimizer.state_dict())
    model.double().float()
    with pytest.raises(InputError, match="0.weight must stay in the buffer"):
        optimizer.load_state_dict(state)
    optimizer.gather_master(model[0].weight)  # still whole


# --- refusals ---


def test_nothing_is_written_when_the_optimizer_is_refused() -> None:
    """Weights keep value, memory and their high-precision start when another weight is refused."""
    layer = zerocast.nn.Linear(16, 16, recipe=NVFP4)
    codes, place = layer.weight.rowwise_data.clone(), layer.weight.rowwise_data.data_ptr()
    wrong = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.raises(InputError):
        ZeroOptimizer([layer.weight, wrong])
    assert layer.weight.rowwise_data.data_ptr() == place
    assert torch.equal(layer.weight.rowwise_data, codes)
    assert layer.weight.get_high_precision_init_val() is not None


def test_another_param_group_is_refused_once_made() -> None:
    """The buffers are laid out, so a group cannot be added; the message says what to do."""
    optimizer = ZeroOptimizer(make_params(NVFP4))
    with pytest.raises(UnsupportedError, match="make a new one with all groups"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("inner", [False, True])
@on_ranks("in_process", 2)
def test_a_scheduler_of_the_inner_optimizer_is_heard(comm: Communicator, inner: bool) -> None:
    """It trains like one of the wrapper, another option of which has a scheduler of its own; what
    is saved and loaded is the rate that it has set.
    """
    weight = torch.nn.Parameter(torch.ones(4, 8))
    optimizer = ZeroOptimizer([weight], SGD, comm, lr=0.5, momentum=0.5)
    scheduler = schedulers.ExponentialLR(optimizer.inner if inner else optimizer, 0.5)
    for step in range(3):
        optimizer.param_groups[0]["momentum"] = 0.25 * step
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        scheduler.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    for groups in (optimizer.inner.param_groups, optimizer.param_groups, state["param_groups"]):
        assert groups[0]["lr"] == 0.0625
    assert torch.equal(weight.detach(), torch.full_like(weight, 1 - 0.5 - 0.25 - 0.1875))


def test_a_learning_rate_that_is_a_tensor_is_not_shared_with_a_loaded_state() -> None:
    """Schedulers write it in place."""
    optimizer = ZeroOptimizer([torch.nn.Parameter(torch.ones(4))], SGD, lr=torch.tensor(0.5))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert state["param_groups"][0]["lr"].item() == 0.5
    assert optimizer.inner.param_groups[0]["lr"].item() == 0.25


@on_ranks("in_process", 2)
def test_a_parameter_that_is_unfrozen_later_is_not_left_out_silently(comm: Communicator) -> None:
    """Frozen it was no parameter of the optimizer; with a gradient on one rank all are told."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = ZeroOptimizer(model.named_parameters(), SGD, comm, lr=0.5)
    model[0].requires_grad_(True)
    optimizer.step()
    if comm.rank == 1:
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(InputError, match=r"0.weight has a gradient, and did not require one"):
        optimizer.step()


@on_ranks("in_process", 2)
def test_two_models_need_names_of_their_own(comm: Communicator) -> None:
    """Under one name a checkpoint would load one weight's masters into both, and an export have one
    of them: refused on every rank, in one group or two, before a weight is touched.
    """
    models = [torch.nn.Linear(16, 16, bias=False) for _ in range(2)]
    for model in models:
        zerocast.nn.convert(model, NVFP4, weights="quantized")
    pairs = [list(model.named_parameters()) for model in models]
    groups: list[dict[str, Any]] = [{"params": each} for each in pairs]
    memory = [model.weight.rowwise_data.data_ptr() for model in models]
    for given in ([*pairs[0], *pairs[1]], groups):
        message = message_of(InputError, lambda each=given: ZeroOptimizer(each, group=comm))
        assert "params must give each weight a unique name, got ['weight']" in message
    assert memory == [m.weight.rowwise_data.data_ptr() for m in models]
    models[1].weight.requires_grad_(False)  # is left out, and so is its name
    ZeroOptimizer([*pairs[0], *pairs[1]], group=comm)
