"""Bytes do not follow what the thread around a cast has set: flags and modes of torch. That they
follow no default dtype or device, and no fresh memory, is the claim of tests/test_allocations.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.settings import two_threads
from zerocast.backends.subnormals import keeping_subnormals
from zerocast.comm import Communicator, run_in_process
from zerocast.recipes import QParams, Recipe
from zerocast.tensors import QuantizedTensor

pytestmark = pytest.mark.usefixtures("backend")

RECIPES = (zerocast.NVFP4BlockScaling(), zerocast.Float8CurrentScaling())


def subnormals(shape: tuple[int, int]) -> torch.Tensor:
    """Every element, and the amax, an FP32 subnormal; flushing would make them all zero."""
    numel = shape[0] * shape[1]
    return torch.arange(1, numel + 1, dtype=torch.int32).view(torch.float32).view(shape)


def cast(x: torch.Tensor, recipe: Recipe) -> tuple[QuantizedTensor, torch.Tensor]:
    """The weight, nominally FP32, and its values."""
    weight = zerocast.quantize(x, recipe, dtype=torch.float32)
    return weight, weight.dequantize(torch.float32)


def sharded_cast(
    x: torch.Tensor, recipe: Recipe, setting: Callable[[], AbstractContextManager]
) -> list[QuantizedTensor]:
    """The weight of each of two ranks that share it at an odd element, gathered."""
    cut = 2 * (x.numel() // 4) + 1
    shards, starts = (x.reshape(-1)[:cut], x.reshape(-1)[cut:]), (0, cut)

    def rank(comm: Communicator) -> QuantizedTensor:
        weight = zerocast.empty(x.shape, recipe, dtype=torch.float32)
        with setting():
            plan = zerocast.CastPlan([weight], [shards[comm.rank]], [starts[comm.rank]], comm)
            plan.cast()
            plan.all_gather()
        return weight

    return run_in_process(2, rank)


# --- what is set ---


@contextmanager
def flushing() -> Iterator[None]:
    """Subnormals flushed in this thread, and in those that torch creates meanwhile."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


SETTINGS = {
    "subnormals flushed": flushing,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_bytes_do_not_follow_a_setting(setting, recipe):
    """Codes, scales, amax, copies and values are those of a thread that set nothing."""
    for x in (subnormals((33, 80)), torch.randn(33, 80), torch.full((16, 16), torch.nan)):
        weight, values = cast(x, recipe)
        with SETTINGS[setting]():
            set_weight, set_values = cast(x.clone().requires_grad_(), recipe)
        assert_same_storage(set_weight, weight, setting)
        assert_same_bytes(set_values, values, f"values, {setting}")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_sharded_cast_does_not_follow_a_setting(setting, recipe):
    """The same for a plan over two ranks, each of which sets it in its thread."""
    x = subnormals((33, 80))
    weight, _ = cast(x, recipe)
    for rank, sharded in enumerate(sharded_cast(x, recipe, SETTINGS[setting])):
        assert_same_storage(sharded, weight, f"{setting}, rank {rank}")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_subnormals_of_a_tensor_that_torch_shares_among_threads(recipe):
    """Past 32,768 elements torch computes in its pool too; those threads have their own flags."""
    x = subnormals((512, 256))
    expected, _ = cast(x, recipe)
    with two_threads(), flushing():
        assert (x * 1 == 0).any(), "this test flushes in one thread at least"
        weight, _ = cast(x, recipe)
    assert_same_storage(weight, expected, "flushing")


@pytest.mark.parametrize("epsilon", [1e-45, 2.0**-126 * (1 - 2.0**-30), 3e-39])
def test_an_amax_epsilon_below_the_normal_numbers(epsilon):
    """It is rounded to FP32 as ever, also by a thread that flushes: scale_inv is of it, not 1."""
    recipe = zerocast.Float8CurrentScaling(
        fp8_quant_fwd_weight=QParams(power_2_scale=True, amax_epsilon=epsilon)
    )
    expected, _ = cast(torch.zeros(4), recipe)
    assert expected.rowwise_scale_inv.item() < 1e-30
    with flushing():
        weight, _ = cast(torch.zeros(4), recipe)
    assert_same_storage(weight, expected, "flushing")


def smallest_normal_halved() -> bool:
    """Whether this thread keeps subnormals."""
    return bool(torch.tensor(torch.finfo(torch.float32).tiny) / 2)


def test_the_guard_restores_flag_and_threads():
    """After a launch, and after one that fails, the caller's flag and thread count are back."""
    seen = []

    @keeping_subnormals
    def launch():
        seen.append((smallest_normal_halved(), torch.get_num_threads()))

    @keeping_subnormals
    def fail():
        launch()
        raise RuntimeError("on purpose")

    with two_threads(), flushing():
        launch()
        with pytest.raises(RuntimeError, match="on purpose"):
            fail()
        assert not smallest_normal_halved()
        assert torch.get_num_threads() == 2
    launch()
    assert [kept for kept, _ in seen] == [True] * 3
    assert seen[0][1] == 1
