"""Delayed scaling over 50 steps against a plain restatement: every byte, scale and history entry.

Among the steps are amaxes that are zero, subnormal, tiny, as large as FP32 goes, infinite and NaN.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import zerocast
from tests.oracles.arbitrary import check_weight
from tests.oracles.scalar_delayed import Delayed
from tests.support.partitions import draw_partition
from zerocast.comm import Communicator, run_in_process
from zerocast.recipes import DelayedScaling
from zerocast.tensors import QuantizedTensor, quantize_into

pytestmark = pytest.mark.usefixtures("backend")

SHAPE, STEPS = (5, 7), 50

# What the largest element of a step is, where it is not left to chance.
AMAXES = {4: 0.0, 5: 0.0, 9: 2.0**-149, 10: 2.0**-130, 13: (2 - 2.0**-23) * 2.0**127,
          17: float("inf"), 18: 1.0, 22: float("nan"), 23: 448.0, 29: 1e-30, 36: -float("inf"),
          40: 2.0**127, 47: 2.0**-126}  # fmt: skip


def masters() -> list[torch.Tensor]:
    """[5, 7] FP32 for every step, their magnitudes growing and shrinking over 20 powers of two."""
    generator = torch.Generator().manual_seed(7)
    steps = []
    for step in range(STEPS):
        x = torch.randn(SHAPE, generator=generator) * 2.0 ** (10 * np.sin(step / 5))
        if step in AMAXES:
            amax = AMAXES[step]
            x = x / x.abs().max() * (amax if np.isfinite(amax) else 1.0) * 0.5
            x[step % 5, step % 7] = amax
        steps.append(x)
    return steps


def median(history):
    """An algorithm of the user's own: of a tensor, or of the restatement's list."""
    if isinstance(history, torch.Tensor):
        return history[history > 0].median()
    return sorted(history)[(len(history) - 1) // 2]


def zero(history):
    """One that never gives a usable amax."""
    return torch.zeros(1) if isinstance(history, torch.Tensor) else np.float32(0)


CASES = {
    "max of 4": DelayedScaling(fp8_format="e4m3", amax_history_len=4),
    "max of 1": DelayedScaling(fp8_format="e5m2", amax_history_len=1),
    "latest": DelayedScaling(margin=3, amax_history_len=16, amax_compute_algo="most_recent"),
    "latest e5m2": DelayedScaling(margin=-2, fp8_format="e5m2", amax_compute_algo="most_recent"),
    "a large margin": DelayedScaling(margin=100, amax_history_len=3),
    "longer than the run": DelayedScaling(),
    "a function": DelayedScaling(amax_history_len=5, amax_compute_algo=median),
    "a useless function": DelayedScaling(amax_history_len=5, amax_compute_algo=zero),
}


def restated(recipe: DelayedScaling, dtype: str = "float32") -> list:
    """What every step must give."""
    numerics = recipe.numerics
    plain = Delayed(
        numerics.fmt.name, recipe.amax_history_len, numerics.margin, numerics.amax_compute_algo
    )
    return [plain.cast(x.numpy(), dtype) for x in masters()]


@pytest.mark.parametrize("recipe", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_casts_of_one_tensor(recipe, dtype):
    """Codes, scale_inv, both scales, history and amax after every one of them."""
    weight = zerocast.empty(SHAPE, recipe, dtype=dtype)
    expected = restated(recipe, str(dtype).removeprefix("torch."))
    for x, step in zip(masters(), expected, strict=True):
        quantize_into(weight.quantized_storage, x)
        check_weight(weight, step)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("recipe", CASES.values(), ids=CASES)
def test_fifty_steps_of_a_plan(recipe, ranks):
    """The same on every rank, whatever each owns of the tensor."""
    expected = restated(recipe)
    extents = draw_partition(35, ranks, random.Random(ranks))
    steps = masters()

    def train(comm: Communicator) -> list[QuantizedTensor]:
        weight = zerocast.empty(SHAPE, recipe, dtype=torch.float32)
        mine = extents[comm.rank]
        shard = torch.zeros(mine.size)
        plan = zerocast.CastPlan([weight], [shard], [mine.start], comm)
        for x, step in zip(steps, expected, strict=True):
            shard.copy_(x.view(-1)[mine.start : mine.end])
            plan.cast()
            plan.all_gather()
            check_weight(weight, step)
        return [weight]

    assert len(run_in_process(ranks, train)) == ranks


@pytest.mark.parametrize("step", [0, 3, 4, 17, 22, 30])
def test_a_rewound_cast_is_the_same_cast(step):
    """A checkpoint holds the state after a cast; rewound, the cast gives every byte once more.

    After an amax that entered the history, and after those that did not: zero, infinite, NaN.
    """
    recipe = DelayedScaling(amax_history_len=3)
    weight = zerocast.empty(SHAPE, recipe, dtype=torch.float32)
    for x in masters()[: step + 1]:
        quantize_into(weight.quantized_storage, x)
    expected = restated(recipe)[step]
    check_weight(weight, expected)
    recipe.rewind(weight.quantized_storage.buffers)
    quantize_into(weight.quantized_storage, masters()[step])
    check_weight(weight, expected)


def test_the_scale_worked_out_by_hand():
    """Amaxes 2, 8, 4 in a history of 2: scales 1, 448/2 = 224, 448/8 = 56, and 56 again.

    The first cast multiplies by 1, as nothing is known: 2 is 0x40. Then 8 * 224 saturates at 448,
    code 0x7E, decoded as 2. Then 4 * 56 = 224 = 1.75 * 2^7, code 0x76.
    """
    recipe = DelayedScaling(amax_history_len=2)
    weight = zerocast.empty((1,), recipe, dtype=torch.float32)
    seen = []
    for amax in (2.0, 8.0, 4.0, 4.0):
        quantize_into(weight.quantized_storage, torch.tensor([amax]))
        buffers = weight.quantized_storage.buffers
        seen.append((int(weight.rowwise_data), weight.dequantize(torch.float32).item(),
                     buffers["scale"].item(), buffers["amax_history"].tolist()))  # fmt: skip
    assert seen == [
        (0x40, 2.0, 224.0, [2.0, 0.0]),
        (0x7E, 2.0, 56.0, [8.0, 2.0]),
        (0x76, 4.0, 56.0, [4.0, 8.0]),
        (0x76, 4.0, 112.0, [4.0, 4.0]),
    ]
