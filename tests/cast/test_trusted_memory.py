"""A plan that trusts its caller looks at no tensor, and follows the moves that are said."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import zerocast
from tests.kernels.test_graphs_and_threads import Idle
from tests.support.same_bytes import assert_same_storage
from tests.support.values import draw_values
from zerocast.backends.cuda import CudaBackend

SHAPE = (48, 32)
NUMEL = 48 * 32


def step(plan: zerocast.CastPlan) -> None:
    """A step by one rank."""
    plan.cast()
    plan.all_gather()


def instructions(run: Callable[[], None]) -> int:
    """How many instructions of Python ``run`` takes."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("trusting", [True, False])
def test_a_step_looks_at_no_tensor(trusting: bool) -> None:
    """It takes as many instructions of Python for 12 weights as for 2; without trust more."""

    @zerocast.use_backend(CudaBackend(Idle()))
    def of(count: int) -> int:
        weights = [zerocast.empty(SHAPE, "nvfp4") for _ in range(count)]
        plan = zerocast.CastPlan(weights, [torch.ones(NUMEL) for _ in weights], [0] * count)
        if trusting:
            plan.trust_memory()
        step(plan)
        return instructions(lambda: step(plan))

    assert (of(12) == of(2)) == trusting


@zerocast.use_backend("reference")
def test_moves_that_are_said_are_followed() -> None:
    """``replace_raw_data`` and ``bind`` are, and the bytes are those of any plan."""
    weight, master = zerocast.empty(SHAPE, "nvfp4"), draw_values("normal", NUMEL, 1)
    plan = zerocast.CastPlan([weight], [master], [0])
    plan.trust_memory()
    for seed in range(3):
        if seed == 1:
            zerocast.replace_raw_data(weight, torch.zeros(NUMEL // 2, dtype=torch.uint8))
        if seed == 2:
            master = torch.empty(NUMEL)
            plan.bind([master])
        master.copy_(draw_values("normal", NUMEL, seed))
        step(plan)
        expected = zerocast.quantize(master.view(SHAPE), "nvfp4", dtype=torch.bfloat16)
        assert_same_storage(weight, expected, f"step {seed}")
