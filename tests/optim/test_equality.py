"""The same training on any number of ranks: bit for bit that of one rank with whole masters."""

from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

import zerocast
from tests.conftest import Ranks, in_turn
from tests.optim.training import (
    FP8,
    NVFP4,
    Training,
    Whole,
    assert_cast_of,
    assert_same_lists,
    draw_gradients,
    make_params,
    set_gradients,
    start_values,
)
from tests.support.ranks import PROCESSES, on_ranks
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import Communicator
from zerocast.nn import convert
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import Recipe

TRAININGS: dict[str, tuple[Recipe, type[Optimizer], dict[str, Any]]] = {
    "nvfp4-adamw": (NVFP4, AdamW, {"lr": 1e-2, "foreach": False}),
    "nvfp4-sgd": (NVFP4, SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "fp8-adamw-foreach": (FP8, AdamW, {"lr": 1e-2, "foreach": True}),
    "fp8-sgd": (FP8, SGD, {"lr": 0.1, "nesterov": True, "momentum": 0.9}),
}


def assert_trains_as_a_whole(
    ranks: Ranks, recipe: Recipe, steps: int, optimizer_class: type[Optimizer], **options: Any
) -> None:
    """After these steps every byte of every weight is, on every rank, what one rank without
    sharding gets from the mean gradients.
    """
    whole = Whole(recipe, optimizer_class, ranks=ranks.size, **options).train(*range(steps))
    for params in ranks.run(
        lambda comm: Training(comm, recipe, optimizer_class, **options).train(*range(steps))
    ):
        assert_cast_of(params, whole)


@pytest.mark.parametrize(
    ("recipe", "optimizer_class", "options", "ranks"), in_turn(TRAININGS), indirect=["ranks"]
)
def test_100_steps_are_bit_identical_to_unsharded_training(
    ranks: Ranks, recipe: Recipe, optimizer_class: type[Optimizer], options: dict[str, Any]
) -> None:
    """After 100 steps, 25 on processes, every byte of every weight is, on every rank, what one rank
    without sharding gets from the mean gradients.
    """
    steps = 25 if ranks.kind in PROCESSES else 100
    assert_trains_as_a_whole(ranks, recipe, steps, optimizer_class, **options)


ADAMW_OPTIONS = ({"maximize": True}, {"amsgrad": True, "weight_decay": 0.3})
OTHERS = [
    *(pytest.param(NVFP4, 3, 20, name, {}, marks=pytest.mark.own_defaults("meta")) for name in (
        "Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")),
    *((FP8, 3, 10, "AdamW", options) for options in ADAMW_OPTIONS),
    # 128 codes of 4 bits are the least that a rank owns, so 25 ranks share the 3200 there are.
    *((NVFP4, size, 3, "AdamW", {}) for size in (17, 64)),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "size", "steps", "name", "options"), OTHERS)
def test_other_optimizers_options_and_numbers_of_ranks_are_bit_identical(
    recipe: Recipe, size: int, steps: int, name: str, options: dict[str, Any]
) -> None:
    """torch's other element-wise optimizers with their default options; options that mean what they
    mean to the inner optimizer; and more ranks than a weight has rows, which own nothing of a
    weight, or nothing at all.
    """
    ranks = Ranks("in_process", size)
    assert_trains_as_a_whole(ranks, recipe, steps, getattr(torch.optim, name), **options)


@on_ranks("in_process", 3)
def test_fused_optimizers_are_accepted_and_close(comm: Communicator) -> None:
    """Fused AdamW may round some elements otherwise when cut, by no more than a few ulps."""
    t, whole = Training(comm, fused=True), Whole(ranks=3, fused=True)
    t.train(*range(5))
    for master, expected in zip(t.masters(), whole.train(*range(5)), strict=True):
        torch.testing.assert_close(master, expected, rtol=1e-5, atol=1e-7)


@on_ranks("in_process", 3)
def test_identical_bf16_gradients_on_3_ranks_give_exactly_that_gradient(comm: Communicator) -> None:
    """For a BF16 g, g + g + g is exact in FP32 and a third of it is g again: SGD moves by lr g."""
    t = Training(comm, FP8, SGD, lr=1.0)
    before = t.masters()
    g = torch.Generator().manual_seed(5)
    gradients = [torch.randn(p.shape, generator=g).bfloat16() for p in t.params]
    set_gradients(t.params, gradients)
    t.optimizer.step()
    expected = [b - g.float() for b, g in zip(before, gradients, strict=True)]
    assert_same_lists(t.masters(), expected, "masters")


@on_ranks("in_process", 4)
def test_ranks_that_start_differently_hold_the_same_weights(comm: Communicator) -> None:
    """Each rank contributes its part of the start, so after construction weights are equal on all
    ranks and are the cast of the gathered masters.
    """
    t = Training(comm, seed=comm.rank)
    assert_cast_of(t.params, t.masters())
    zerocast.verify(t.params, comm)


@on_ranks("in_process", 3)
def test_masters_start_from_the_values_before_quantization(comm: Communicator) -> None:
    """Where a weight kept its high-precision value the master is that, on any number of ranks; and
    it keeps it no longer.
    """
    layer = torch.nn.Linear(48, 33, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, 33 * 48).view(33, 48))
    before = layer.weight.detach().clone()
    convert(layer, NVFP4)
    optimizer = ZeroOptimizer(layer.parameters(), group=comm)
    assert_same_bytes(optimizer.gather_master(layer.weight), before, "master")
    assert not hasattr(layer.weight, "get_high_precision_init_val")


@on_ranks("in_process", 2)
def test_weights_without_a_kept_value_start_from_their_own(comm: Communicator) -> None:
    """A weight that was made by ``quantize`` starts from its dequantized value."""
    assert_same_lists(Training(comm, FP8).masters(), start_values(make_params(FP8)), "masters")


@on_ranks("in_process", 2)
def test_gradients_accumulate_over_backward_passes(comm: Communicator) -> None:
    """Two backward passes of half a gradient and one step are one step of the whole gradient."""
    t = Training(comm, NVFP4, SGD, lr=0.5)
    for _ in range(2):
        for param, g in zip(t.params, draw_gradients(t.params, 0, comm.rank), strict=True):
            (param * (g / 2).to(param.dtype)).sum().backward()
    t.optimizer.step()
    assert_cast_of(t.params, Whole(NVFP4, SGD, ranks=2, lr=0.5).train(0))
