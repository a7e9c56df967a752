"""Averages of masters: in FP32, sharded, saved with the rest, cast into the weights on demand."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.optim import SGD

import zerocast
from tests.optim.training import (
    FP8,
    NVFP4,
    Training,
    Whole,
    assert_cast_of,
    assert_same_lists,
    make_params,
    start_values,
)
from tests.support.ranks import on_ranks
from tests.support.recipes import each
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, RankMismatchError, UnsupportedError
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import Recipe

DECAY, LR = 0.75, 0.125


def training(comm: Communicator | None = None, recipe: Recipe = NVFP4, **options: Any) -> Training:
    """By SGD."""
    return Training(comm, recipe, SGD, **({"lr": LR} | options))


def expected(count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Masters and their averages after ``count`` steps of whole tensors."""
    whole = Whole(NVFP4, SGD, lr=LR)
    averages = start_values(whole.params)
    for step in range(count):
        for master, average in zip(whole.train(step), averages, strict=True):
            average.lerp_(master.detach(), 1 - DECAY)
    return whole.masters, averages


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 3), (3, 2), (2, 2)])
def test_averages_have_the_same_bits_for_every_cut_and_resume(
    saved_on: int, loaded_on: int
) -> None:
    """3 steps, save, load on another number of ranks, 2 steps: the averages of 5 steps of whole
    tensors, bit for bit, whether the average is asked for before loading or afterwards.
    """

    def save(comm: Communicator) -> Any:
        t = training(comm)
        t.optimizer.ema(DECAY)
        t.train(*range(3), alike=True)
        return t.saved()

    saved = run_in_process(saved_on, save)

    def resume(comm: Communicator) -> list[torch.Tensor]:
        t = training(comm, seed=99)
        if loaded_on == 3:
            t.optimizer.ema(DECAY)
        t.optimizer.load_state_dict(saved)
        return [t.optimizer.ema(DECAY).gather(p) for p in t.train(3, 4, alike=True)]

    _, averages = expected(5)
    for gathered in run_in_process(loaded_on, resume):
        assert_same_lists(gathered, averages, "average")


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks("in_process", 3)
def test_averages_in_the_weights_are_their_cast_and_leave_no_trace(
    comm: Communicator, overlap: bool
) -> None:
    """Within the context weights are the unsharded cast of the averages; afterwards of the masters,
    and the next step is that of an optimizer that never showed them.
    """
    t = training(comm, overlap_all_gather=overlap)
    average = t.optimizer.ema(DECAY)
    params = t.train(0, 1, alike=True)
    masters, averages = expected(2)
    with average.in_weights():
        assert_cast_of(params, averages)
        for call in (t.optimizer.step, average.in_weights().__enter__):
            with pytest.raises(InputError, match="leave the context of in_weights"):
                call()
    assert_cast_of(params, masters)
    assert_cast_of(t.train(2, alike=True), expected(3)[0])


@each("delayed", "nvfp4-drawn", "mxfp8")
@on_ranks("in_process", 2)
def test_showing_averages_moves_nothing_that_recipes_remember(
    comm: Communicator, recipe: Recipe
) -> None:
    """Codes, scales and state are those of a run that never showed them, then and a step later."""
    plain, shown = training(comm, recipe), training(comm, recipe)
    average = shown.optimizer.ema(DECAY)
    for t in (plain, shown):
        t.train(*range(3), alike=True)
    with average.in_weights():
        pass
    assert_same_lists(shown.params, plain.params, "once shown")
    assert_same_lists(shown.train(3, alike=True), plain.train(3, alike=True), "a step later")


@pytest.mark.parametrize(
    "write",
    [lambda params: params[0].detach().zero_(), lambda params: params[3].data.fill_(5)],
    ids=["codes", "plain, uncounted"],
)
def test_weights_that_are_written_while_averages_are_in_them_are_not_lost_silently(
    write: Callable[[list[torch.nn.Parameter]], object],
) -> None:
    """Leaving the context says that they are the masters' cast again; the averages stay."""
    t = training(recipe=FP8)
    average, params = t.optimizer.ema(DECAY), t.train(0)
    masters, averages = t.masters(), [average.gather(p) for p in params]
    shown = average.in_weights()
    with pytest.raises(InputError, match="weights were written while they held"), shown:
        write(params)
    assert_cast_of(params, masters)
    with average.in_weights():
        assert_cast_of(params, averages)
    assert_same_lists(t.masters(), masters, "masters")


@on_ranks("in_process", 3)
def test_a_failure_on_one_rank_while_averages_are_in_the_weights_leaves_all_ranks_in_step(
    comm: Communicator,
) -> None:
    """An evaluation that fails on one rank: it is raised there, and the masters' cast is back on
    all.
    """
    t = training(comm)
    average = t.optimizer.ema(DECAY)
    t.train(0, 1, alike=True)
    fails = pytest.raises(ZeroDivisionError) if comm.rank == 1 else nullcontext()
    with fails, average.in_weights():
        assert comm.rank != 1 or 1 / 0
    assert_cast_of(t.train(2, alike=True), expected(3)[0])


@on_ranks("in_process", 2)
def test_a_decay_that_is_none_or_differs_between_ranks_is_refused_on_all(
    comm: Communicator,
) -> None:
    """From 0 up to, not including, 1."""
    optimizer = ZeroOptimizer(make_params(FP8), group=comm)
    for wrong in (1.0, -0.1, float("nan"), "0.9", True):
        with pytest.raises(InputError, match="decay must be a number from 0"):
            optimizer.ema(wrong if comm.rank else 0.9)
    with pytest.raises(RankMismatchError, match="the same decay"):
        optimizer.ema(0.9 + comm.rank / 100)
    optimizer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree"])
@pytest.mark.parametrize("size", [1, 3])
def test_schedule_free_optimizers_evaluate_their_average_and_go_on(size: int, name: str) -> None:
    """eval() puts the average into the weights, train() takes it out: masters are, on every number
    of ranks, what the class makes of whole tensors; a step in between is refused.
    """
    optimizer_class = getattr(pytest.importorskip("schedulefree"), name)

    def train(comm: Communicator) -> None:
        t = Training(comm, NVFP4, optimizer_class, lr=0.01)
        whole = Whole(NVFP4, optimizer_class, lr=0.01)
        whole.optimizer.train()
        t.train(*range(3), alike=True)
        whole.train(*range(3))
        for optimizer in (t.optimizer, whole.optimizer):
            optimizer.eval()
        assert_same_lists(t.masters(), whole.masters, "evaluated")
        assert_cast_of(t.params, whole.masters)
        other = Training(comm, NVFP4, optimizer_class, lr=0.01)
        other.optimizer.load_state_dict(t.saved())
        for optimizer in (t.optimizer, other.optimizer):
            with pytest.raises(InputError, match=r"call optimizer.train\(\) before"):
                optimizer.step()
        for optimizer in (t.optimizer, whole.optimizer):
            optimizer.train()
        t.train(3, 4, alike=True)
        assert_same_lists(t.masters(), whole.train(3, 4), "trained")

    run_in_process(size, train)


def test_train_and_eval_change_nothing_for_other_optimizers() -> None:
    """Frameworks call them where they are there."""
    t = training(recipe=FP8)
    t.optimizer.eval()
    t.train(0)
    t.optimizer.train()


class ModelEmaV3(torch.nn.Module):
    """A module of timm's name that keeps a copy of a model; timm itself is not needed to tell."""

    __module__ = "timm.utils.model_ema"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)


@pytest.mark.parametrize("average", [torch.optim.swa_utils.AveragedModel, ModelEmaV3])
def test_averaged_models_refuse_quantized_weights_and_name_ema(average: Any) -> None:
    """They would round their average at every update; of plain and of master weights they make
    one.
    """
    models = [torch.nn.Sequential(torch.nn.Linear(32, 32)) for _ in range(3)]
    plain, quantized, master = models
    zerocast.nn.convert(quantized, FP8, weights="quantized")
    zerocast.nn.convert(master, FP8, weights="master")
    average(plain)
    average(master)
    match = rf"{average.__name__} .*0.weight.*ZeroOptimizer.ema"
    with pytest.raises(UnsupportedError, match=match):
        average(quantized)
    torch.nn.Sequential(quantized)
