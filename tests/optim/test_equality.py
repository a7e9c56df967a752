"""The same training on any number of ranks: bit for bit that of one rank with whole masters."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.conftest import Ranks, in_turn
from tests.optim.training import (
    FP8,
    NVFP4,
    assert_cast_of,
    draw_gradients,
    make_params,
    set_gradients,
    start_values,
    train_sharded,
    train_whole,
)
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import Communicator, run_in_process
from zerocast.nn import convert
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import Recipe

TRAININGS: dict[str, tuple[Recipe, type[Optimizer], dict[str, Any]]] = {
    "nvfp4-adamw": (NVFP4, AdamW, {"lr": 1e-2, "foreach": False}),
    "nvfp4-sgd": (NVFP4, SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "fp8-adamw-foreach": (FP8, AdamW, {"lr": 1e-2, "foreach": True}),
    "fp8-sgd": (FP8, SGD, {"lr": 0.1, "nesterov": True, "momentum": 0.9}),
}


@pytest.mark.parametrize(
    ("recipe", "optimizer_class", "options", "ranks"), in_turn(TRAININGS), indirect=["ranks"]
)
def test_100_steps_are_bit_identical_to_unsharded_training(
    ranks: Ranks, recipe: Recipe, optimizer_class: type[Optimizer], options: dict[str, Any]
) -> None:
    """After 100 steps every byte of every weight is, on every rank, what one rank without sharding
    gets from the mean gradients.
    """
    trained = ranks.run(lambda comm: train_sharded(comm, recipe, 100, optimizer_class, **options))
    whole = train_whole(recipe, 100, ranks.size, partial(optimizer_class, **options))
    for params in trained:
        assert_cast_of(params, whole)


ELEMENTWISE = [
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    Adam,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
]


@pytest.mark.own_defaults("meta")
@pytest.mark.parametrize("optimizer_class", ELEMENTWISE)
def test_every_elementwise_optimizer_of_torch_is_bit_identical(
    optimizer_class: type[Optimizer],
) -> None:
    """20 steps on 3 ranks with torch's other element-wise optimizers and their default options."""
    trained = run_in_process(3, lambda comm: train_sharded(comm, NVFP4, 20, optimizer_class))
    whole = train_whole(NVFP4, 20, 3, optimizer_class)
    for params in trained:
        assert_cast_of(params, whole)


@pytest.mark.parametrize("options", [{"maximize": True}, {"amsgrad": True, "weight_decay": 0.3}])
def test_options_reach_the_inner_optimizer(options: dict[str, Any]) -> None:
    """``maximize`` and others mean what they mean to the inner optimizer."""
    trained = run_in_process(2, lambda comm: train_sharded(comm, FP8, 10, AdamW, **options))
    for params in trained:
        assert_cast_of(params, train_whole(FP8, 10, 2, partial(AdamW, **options)))


def test_fused_optimizers_are_accepted_and_close() -> None:
    """Fused AdamW may round some elements otherwise when cut, by no more than a few ulps."""

    def train(comm: Communicator) -> list[torch.Tensor]:
        params = make_params(NVFP4)
        optimizer = ZeroOptimizer(params, AdamW, group=comm, fused=True)
        for step in range(5):
            set_gradients(params, draw_gradients([p.shape for p in params], step, comm.rank))
            optimizer.step()
        return [optimizer.gather_master(p) for p in params]

    whole = train_whole(NVFP4, 5, 3, partial(AdamW, fused=True))
    for masters in run_in_process(3, train):
        for master, expected in zip(masters, whole, strict=True):
            torch.testing.assert_close(master, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("world_size", [17, 64])
def test_more_ranks_than_a_weight_has_rows(world_size: int) -> None:
    """Ranks that own nothing of a weight, or nothing at all, take part and hold the same weights.

    128 codes of 4 bits are the least that a rank owns, so 25 ranks share the 3200 there are.
    """
    trained = run_in_process(world_size, lambda comm: train_sharded(comm, NVFP4, 3, AdamW))
    whole = train_whole(NVFP4, 3, world_size, AdamW)
    for params in trained:
        assert_cast_of(params, whole)


def test_identical_bf16_gradients_on_3_ranks_give_exactly_that_gradient() -> None:
    """For a BF16 g, g + g + g is exact in FP32 and a third of it is g again: SGD moves by lr g."""

    def train(comm: Communicator) -> list[torch.Tensor]:
        params = make_params(FP8)
        optimizer = ZeroOptimizer(params, SGD, group=comm, lr=1.0)
        before = [optimizer.gather_master(p) for p in params]
        g = torch.Generator().manual_seed(5)
        gradients = [torch.randn(p.shape, generator=g).bfloat16() for p in params]
        set_gradients(params, gradients)
        optimizer.step()
        after = [optimizer.gather_master(p) for p in params]
        return [(b - gr.float(), a) for b, gr, a in zip(before, gradients, after, strict=True)]

    for moves in run_in_process(3, train):
        for i, (expected, after) in enumerate(moves):
            assert_same_bytes(after, expected, f"master {i}")


@pytest.mark.own_defaults
@pytest.mark.parametrize("recipe", [NVFP4, FP8], ids=["nvfp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_masters_are_fp32_whatever_torchs_default_dtype(dtype: torch.dtype, recipe: Recipe) -> None:
    """Who builds models under set_default_dtype gets the same weights, and FP32 masters."""
    options = {"lr": 0.1, "momentum": 0.9}
    whole = train_whole(recipe, 3, 1, partial(SGD, **options))
    params = make_params(recipe)
    torch.set_default_dtype(dtype)
    try:
        optimizer = ZeroOptimizer(params, SGD, **options)
        for step in range(3):
            set_gradients(params, draw_gradients([p.shape for p in params], step, 0))
            optimizer.clip_grad_norm_(1e9, math.inf)
            optimizer.step()
        masters = [optimizer.gather_master(param) for param in params]
    finally:
        torch.set_default_dtype(torch.float32)
    assert_cast_of(params, whole)
    for i, (master, expected) in enumerate(zip(masters, whole, strict=True)):
        assert_same_bytes(master, expected, f"master {i}")


def test_ranks_that_start_differently_hold_the_same_weights() -> None:
    """Each rank contributes its part of the start, so after construction weights are equal on all
    ranks and are the cast of the gathered masters.
    """

    def start(comm: Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        params = make_params(NVFP4, seed=comm.rank)
        optimizer = ZeroOptimizer(params, group=comm)
        return params, [optimizer.gather_master(p) for p in params]

    started = run_in_process(4, start)
    for params, masters in started:
        assert_cast_of(params, masters)
        assert_cast_of(params, started[0][1])


def test_masters_start_from_the_values_before_quantization() -> None:
    """Where a weight kept its high-precision value the master is that, on any number of ranks; and
    it keeps it no longer.
    """

    def start(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, object]:
        torch_linear = torch.nn.Linear(48, 33, bias=False)
        with torch.no_grad():
            torch_linear.weight.copy_(torch.linspace(-1, 1, 33 * 48).view(33, 48))
        before = torch_linear.weight.detach().clone()
        convert(torch_linear, NVFP4)
        optimizer = ZeroOptimizer(torch_linear.parameters(), group=comm)
        weight = torch_linear.weight
        return (
            before,
            optimizer.gather_master(weight),
            hasattr(weight, "get_high_precision_init_val"),
        )

    for before, master, kept in run_in_process(3, start):
        assert_same_bytes(master, before, "master")
        assert not kept


def test_weights_without_a_kept_value_start_from_their_own() -> None:
    """A weight that was made by ``quantize`` starts from its dequantized value."""

    def start(comm: Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        params = make_params(FP8)
        values = start_values(params)
        optimizer = ZeroOptimizer(params, group=comm)
        return values, [optimizer.gather_master(p) for p in params]

    for values, masters in run_in_process(2, start):
        for i, (value, master) in enumerate(zip(values, masters, strict=True)):
            assert_same_bytes(master, value, f"master {i}")


def test_gradients_accumulate_over_backward_passes() -> None:
    """Two backward passes of half a gradient and one step are one step of the whole gradient."""

    def train(comm: Communicator) -> list[torch.nn.Parameter]:
        params = make_params(NVFP4)
        optimizer = ZeroOptimizer(params, SGD, group=comm, lr=0.5)
        gradients = draw_gradients([p.shape for p in params], 0, comm.rank)
        for _ in range(2):
            for param, gradient in zip(params, gradients, strict=True):
                (param * (gradient / 2).to(param.dtype)).sum().backward()
        optimizer.step()
        return params

    whole = train_whole(NVFP4, 1, 2, partial(SGD, lr=0.5))
    for params in run_in_process(2, train):
        assert_cast_of(params, whole)
