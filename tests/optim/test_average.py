"""Averages of masters: in FP32, sharded, saved with the rest, cast into the weights on demand."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import zerocast
from tests.optim.training import (
    FP8,
    NVFP4,
    assert_cast_of,
    draw_gradients,
    make_params,
    mean_gradients,
    set_gradients,
    start_values,
    through_a_file,
)
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, RankMismatchError, UnsupportedError
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import Recipe

STOCHASTIC = zerocast.NVFP4BlockScaling(
    fp4_quant_fwd_weight=zerocast.QParams(stochastic_rounding=True, fp4_2d_quantization=True)
)
DECAY, LR = 0.75, 0.125


def steps(params: list[Any], optimizer: ZeroOptimizer, which: range) -> None:
    """With the same gradients on every rank."""
    for step in which:
        set_gradients(params, draw_gradients([p.shape for p in params], step, 0))
        optimizer.step()


def expected(count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Masters and their averages after ``count`` steps of whole tensors."""
    masters = start_values(make_params(NVFP4))
    averages = [master.clone() for master in masters]
    for step in range(count):
        gradients = mean_gradients([m.shape for m in masters], step, 1)
        for master, average, gradient in zip(masters, averages, gradients, strict=True):
            master.add_(gradient, alpha=-LR)
            average.lerp_(master, 1 - DECAY)
    return masters, averages


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 3), (3, 2), (2, 2)])
def test_averages_have_the_same_bits_for_every_cut_and_resume(
    saved_on: int, loaded_on: int
) -> None:
    """3 steps, save, load on another number of ranks, 2 steps: the averages of 5 steps of whole
    tensors, bit for bit, whether the average is asked for before loading or afterwards.
    """

    def save(comm: Communicator) -> Any:
        params = make_params(NVFP4)
        optimizer = ZeroOptimizer(params, torch.optim.SGD, comm, lr=LR)
        optimizer.ema(DECAY)
        steps(params, optimizer, range(3))
        return through_a_file(optimizer.state_dict())

    saved = run_in_process(saved_on, save)

    def resume(comm: Communicator) -> list[torch.Tensor]:
        params = make_params(NVFP4, seed=99)
        optimizer = ZeroOptimizer(params, torch.optim.SGD, comm, lr=LR)
        if loaded_on == 3:
            optimizer.ema(DECAY)
        optimizer.load_state_dict(saved)
        steps(params, optimizer, range(3, 5))
        return [optimizer.ema(DECAY).gather(p) for p in params]

    _, averages = expected(5)
    for gathered in run_in_process(loaded_on, resume):
        for mine, whole in zip(gathered, averages, strict=True):
            assert_same_bytes(mine, whole, "average")


@pytest.mark.parametrize("overlap", [False, True])
def test_averages_in_the_weights_are_their_cast_and_leave_no_trace(overlap: bool) -> None:
    """Within the context weights are the unsharded cast of the averages; afterwards of the masters,
    and the next step is that of an optimizer that never showed them.
    """

    def train(comm: Communicator) -> None:
        params = make_params(NVFP4)
        optimizer = ZeroOptimizer(params, torch.optim.SGD, comm, overlap_all_gather=overlap, lr=LR)
        average = optimizer.ema(DECAY)
        steps(params, optimizer, range(2))
        masters, averages = expected(2)
        with average.in_weights():
            assert_cast_of(params, averages)
            with pytest.raises(InputError, match="leave the context of in_weights"):
                optimizer.step()
            with pytest.raises(InputError, match="leave the context of in_weights"):
                average.in_weights().__enter__()
        assert_cast_of(params, masters)
        steps(params, optimizer, range(2, 3))
        assert_cast_of(params, expected(3)[0])

    run_in_process(3, train)


@pytest.mark.parametrize(
    "recipe",
    [
        zerocast.DelayedScaling(amax_history_len=3),
        STOCHASTIC,
        zerocast.MXFP8BlockScaling(),
    ],
    ids=["delayed", "stochastic", "mxfp8"],
)
def test_showing_averages_moves_nothing_that_recipes_remember(recipe: Recipe) -> None:
    """Codes, scales and state are those of a run that never showed them, then and a step later."""

    def train(comm: Communicator) -> Any:
        found = []
        for show in (False, True):
            params = make_params(recipe)
            optimizer = ZeroOptimizer(params, torch.optim.SGD, comm, lr=LR)
            average = optimizer.ema(DECAY)
            steps(params, optimizer, range(3))
            if show:
                with average.in_weights():
                    pass
            found.append([p.detach().clone() for p in params])
            steps(params, optimizer, range(3, 4))
            found.append(params)
        return found

    for plain, plain_next, shown, shown_next in run_in_process(2, train):
        for a, b in ((plain, shown), (plain_next, shown_next)):
            for mine, other in zip(a, b, strict=True):
                if isinstance(mine, zerocast.QuantizedTensor):
                    assert_same_storage(other, mine, "shown")
                else:
                    assert_same_bytes(other.detach(), mine.detach(), "shown")


def test_weights_that_are_written_while_averages_are_in_them_are_not_lost_silently() -> None:
    """Leaving the context says that they are the masters' cast again."""
    params = make_params(FP8)
    optimizer = ZeroOptimizer(params, torch.optim.SGD, lr=LR)
    masters = [optimizer.gather_master(p) for p in params]
    shown = optimizer.ema(DECAY).in_weights()
    with pytest.raises(InputError, match="weights were written while averages"), shown:
        params[0].detach().copy_(torch.zeros(params[0].shape))
    assert_cast_of(params, masters)


def test_a_failure_on_one_rank_while_averages_are_in_the_weights_leaves_all_ranks_in_step() -> None:
    """An evaluation that fails on one rank: it is raised there, and the masters' cast is back on
    all.
    """

    def train(comm: Communicator) -> None:
        params = make_params(NVFP4)
        optimizer = ZeroOptimizer(params, torch.optim.SGD, comm, lr=LR)
        average = optimizer.ema(DECAY)
        steps(params, optimizer, range(2))
        fails = pytest.raises(ZeroDivisionError) if comm.rank == 1 else nullcontext()
        with fails, average.in_weights():
            assert comm.rank != 1 or 1 / 0
        steps(params, optimizer, range(2, 3))
        assert_cast_of(params, expected(3)[0])

    run_in_process(3, train)


def test_a_decay_that_is_none_or_differs_between_ranks_is_refused_on_all() -> None:
    """From 0 up to, not including, 1."""

    def make(comm: Communicator) -> None:
        optimizer = ZeroOptimizer(make_params(FP8), group=comm)
        for wrong in (1.0, -0.1, float("nan"), "0.9", True):
            with pytest.raises(InputError, match="decay must be a number from 0"):
                optimizer.ema(wrong if comm.rank else 0.9)
        with pytest.raises(RankMismatchError, match="the same decay"):
            optimizer.ema(0.9 + comm.rank / 100)
        optimizer.step()

    run_in_process(2, make)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree"])
def test_schedule_free_optimizers_evaluate_their_average_and_go_on(name: str) -> None:
    """eval() puts the average into the weights, train() takes it out: masters are, on every number
    of ranks, what the class makes of whole tensors; a step in between is refused.
    """
    schedulefree = pytest.importorskip("schedulefree")
    optimizer_class = getattr(schedulefree, name)

    def train(comm: Communicator) -> Any:
        params = make_params(NVFP4)
        optimizer = ZeroOptimizer(params, optimizer_class, comm, lr=0.01)
        steps(params, optimizer, range(3))
        optimizer.eval()
        evaluated = [optimizer.gather_master(p) for p in params]
        assert_cast_of(params, evaluated)
        with pytest.raises(InputError, match=r"call optimizer.train\(\) before"):
            optimizer.step()
        saved = through_a_file(optimizer.state_dict())
        other = ZeroOptimizer(make_params(NVFP4), optimizer_class, comm, lr=0.01)
        other.load_state_dict(saved)
        with pytest.raises(InputError, match=r"call optimizer.train\(\) before"):
            other.step()
        optimizer.train()
        steps(params, optimizer, range(3, 5))
        return evaluated, [optimizer.gather_master(p) for p in params]

    masters = start_values(make_params(NVFP4))
    whole = optimizer_class(masters, lr=0.01)
    whole.train()
    found = []
    for step in range(5):
        if step == 3:
            whole.eval()
            found.append([master.clone() for master in masters])
            whole.train()
        for master, gradient in zip(
            masters, mean_gradients([m.shape for m in masters], step, 1), strict=True
        ):
            master.grad = gradient
        whole.step()
    found.append(masters)
    for size in (1, 3):
        for rank in run_in_process(size, train):
            for mine, expected in zip(rank, found, strict=True):
                for a, b in zip(mine, expected, strict=True):
                    assert_same_bytes(a, b, "master")


def test_train_and_eval_change_nothing_for_other_optimizers() -> None:
    """Frameworks call them where they are there."""
    params = make_params(FP8)
    optimizer = ZeroOptimizer(params, torch.optim.SGD, lr=LR)
    optimizer.eval()
    steps(params, optimizer, range(1))
    optimizer.train()


def test_averaged_model_refuses_quantized_weights_and_names_ema() -> None:
    """It would round its average at every update; of plain and of master weights it makes one."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    torch.optim.swa_utils.AveragedModel(model)
    zerocast.nn.convert(model, FP8, weights="quantized")
    with pytest.raises(UnsupportedError, match=r"AveragedModel .*0.weight.*ZeroOptimizer.ema"):
        torch.optim.swa_utils.AveragedModel(model)
    torch.nn.Sequential(model)
    master = torch.nn.Sequential(torch.nn.Linear(32, 32))
    zerocast.nn.convert(master, FP8, weights="master")
    torch.optim.swa_utils.AveragedModel(master)


def test_timms_averages_refuse_quantized_weights() -> None:
    """A module of timm's name that keeps a copy of a model; timm itself is not needed to tell."""

    class ModelEmaV3(torch.nn.Module):
        __module__ = "timm.utils.model_ema"
        __qualname__ = "ModelEmaV3"

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.module = copy.deepcopy(model)

    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    ModelEmaV3(model)
    zerocast.nn.convert(model, FP8, weights="quantized")
    with pytest.raises(UnsupportedError, match="ModelEmaV3"):
        ModelEmaV3(model)
