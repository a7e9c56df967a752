"""What the calls of a plan look at: of weights and masters in a few allocations a few tensors, so
that a step takes as long as that of one weight; and every move is followed or refused.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import zerocast
from tests.edges.moves import (
    NAMES,
    emptied,
    lost_and_found,
    moved,
    set_to_zeros,
    shared,
    swapped,
)
from tests.kernels.test_graphs_and_threads import Idle
from tests.support.claims import assert_unsharded_cast
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.values import draw_values
from zerocast.backends.cuda import CudaBackend
from zerocast.comm import Communicator, run_in_process
from zerocast.tensors.allocations import allocate_together, lay_together
from zerocast.tensors.ledger import Scope, announce

SHAPE = (48, 32)
NUMEL = 48 * 32
RECIPES = ["nvfp4", "mxfp8", "delayed", "block"]


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


def planned(recipe: str, count: int, scope: Scope = "storage") -> tuple:
    """Weights laid together, the masters' memory, and a plan of views of it."""
    weights = [zerocast.empty(SHAPE, recipe) for _ in range(count)]
    lay_together(weight.quantized_storage for weight in weights)
    for weight, codes in zip(
        weights, allocate_together(code_sizes(weights), torch.uint8, torch.device("cpu")),
        strict=True,
    ):  # fmt: skip
        zerocast.replace_raw_data(weight, codes)
    masters = draw_values("normal", count * NUMEL, 1)
    plan = zerocast.CastPlan(weights, list(masters.split(NUMEL)), [0] * count, scope=scope)
    step(plan)
    return weights, masters, plan


def code_sizes(weights: list[zerocast.QuantizedTensor]) -> list[int]:
    """Bytes of rowwise codes."""
    return [weight.rowwise_data.numel() for weight in weights]


@pytest.mark.parametrize("call", ["cast", "all_gather", "post_all_gather_processing"])
@pytest.mark.parametrize("scope", ["storage", "tensor"])
def test_a_call_takes_as_many_instructions_for_more_weights(scope: Scope, call: str) -> None:
    """Of Python, for 12 weights and for 2, whether their tensors are the plan's or its caller's."""

    @zerocast.use_backend(CudaBackend(Idle()))
    def of(count: int) -> int:
        _, _, plan = planned("nvfp4", count, scope)
        return instructions(getattr(plan, call))

    assert of(12) == of(2)


@pytest.mark.parametrize("scope", ["storage", "tensor"])
def test_looks(scope: Scope) -> None:
    """A cast looks at one tensor of each storage, or at every tensor."""
    _, _, plan = planned("nvfp4", 12, scope)
    looked_at = [plan._prepared._watched, plan._prepared.addresses._watched]
    few = 5 if scope == "storage" else 12 * 5
    assert [len(each.tensors) for each in looked_at] == [1 if scope == "storage" else 12, few]


def test_gathers_of_its_maker_are_no_moves() -> None:
    """After those that its maker waits for, a cast looks at no more than before."""

    @zerocast.use_backend(CudaBackend(Idle()))
    def of(*, gathers: bool) -> int:
        _, _, plan = planned("nvfp4", 2)
        if gathers:
            announce("tensor")
        return instructions(plan.cast)

    assert of(gathers=True) == of(gathers=False)


@zerocast.use_backend("cpu")
@pytest.mark.parametrize(
    ("what", "move", "recipe"),
    [
        (what, move, RECIPES[(i + j) % 4])
        for i, what in enumerate(("masters", "rowwise_data", "rowwise_scale_inv", "another"))
        for j, move in enumerate((moved, shared, lost_and_found))
    ],
)
def test_a_storage_that_moves_is_followed(
    recipe: str, move: Callable[[torch.Tensor], None], what: str
) -> None:
    """Wherever it is seen first: in the tensor of another weight, too."""
    weights, masters, plan = planned(recipe, 3)
    last = weights[-1]
    moving = {"masters": masters, "another": weights[0].rowwise_data}
    move(moving[what] if what in moving else getattr(last, what))
    for weight in weights[:-1]:
        weight.rowwise_data[:] = 0  # what comes is written now
    masters.copy_(draw_values("normal", masters.numel(), 7))
    expected = [zerocast.empty(SHAPE, recipe) for _ in weights]
    other = zerocast.CastPlan(expected, list(masters.split(NUMEL)), [0] * len(weights))
    for name in weights[0].recipe.state:
        for weight, made in zip(weights, expected, strict=True):
            getattr(made, name).copy_(getattr(weight, name))
    step(other)
    step(plan)
    for i, (weight, made) in enumerate(zip(weights, expected, strict=True)):
        assert_same_storage(weight, made, f"weight {i}")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("move", [emptied, set_to_zeros, swapped])
@zerocast.use_backend("cpu")
def test_what_a_weight_hands_out_moves_nothing(
    recipe: str, move: Callable[[torch.Tensor], None]
) -> None:
    """Other memory given to an attribute of a weight leaves the weight where it is; what is written
    to one is written to the weight.
    """
    weights, masters, plan = planned(recipe, 2)
    before = [weight.dequantize() for weight in weights]
    for weight in weights:
        for name in NAMES:
            try:
                attribute = getattr(weight, name)
            except zerocast.MissingDataError:
                continue
            assert attribute.data_ptr() == getattr(weight, name).data_ptr()
            move(attribute)
    for i, (weight, value) in enumerate(zip(weights, before, strict=True)):
        assert_same_bytes(weight.dequantize(), value, f"weight {i}")
    masters.neg_()
    plan.cast()
    plan.all_gather()
    if recipe != "delayed":  # whose scales are those of the cast before
        for i, (weight, value) in enumerate(zip(weights, before, strict=True)):
            assert_same_bytes(weight.dequantize(), -value, f"weight {i}")
    weights[0].rowwise_data.zero_()
    assert not weights[0].rowwise_data.any()


@zerocast.use_backend("reference")
def test_moves_that_are_said_are_followed() -> None:
    """``replace_raw_data``, within one allocation, too, and ``bind`` are."""
    weights, masters, plan = planned("nvfp4", 2)
    room = torch.zeros(4, NUMEL // 2, dtype=torch.uint8)
    for seed in range(4):
        if seed in (1, 2):
            for place, weight in enumerate(weights):
                zerocast.replace_raw_data(weight, room[place + seed])
        if seed == 3:
            masters = torch.empty(2 * NUMEL)
            plan.bind(list(masters.split(NUMEL)))
        masters.copy_(draw_values("normal", 2 * NUMEL, seed))
        step(plan)
        for weight, master in zip(weights, masters.split(NUMEL), strict=True):
            expected = zerocast.quantize(master.view(SHAPE), "nvfp4", dtype=torch.bfloat16)
            assert_same_storage(weight, expected, f"step {seed}")


def test_a_move_of_one_weight_is_followed_by_the_gather() -> None:
    """Where the one that is looked at stays, which lies in the same allocation."""
    values = draw_values("normal", 2 * NUMEL, 1)

    def on_rank(comm: Communicator) -> None:
        start, half = comm.rank * NUMEL // 2, NUMEL // 2
        masters = [whole[start : start + half].clone() for whole in values.split(NUMEL)]
        weights = [zerocast.empty(SHAPE, "nvfp4") for _ in range(2)]
        room = torch.zeros(3, NUMEL // 2, dtype=torch.uint8)
        for weight, codes in zip(weights, room[1:], strict=True):
            zerocast.replace_raw_data(weight, codes)
        plan = zerocast.CastPlan(weights, masters, [start] * 2, comm, scope="storage")
        step(plan)
        zerocast.replace_raw_data(weights[0], room[0])
        for master in masters:
            master.neg_()
        step(plan)
        for weight, whole in zip(weights, values.split(NUMEL), strict=True):
            assert_unsharded_cast(weight, -whole.view(SHAPE), f"on rank {comm.rank}")

    run_in_process(2, on_rank)


def test_memory_is_given_back() -> None:
    """That of copies that all weights drop, after the next step."""
    weights, _, plan = planned("nvfp4", 2)
    copy = weights[0].columnwise_data.untyped_storage()
    for weight in weights:
        weight.update_usage(columnwise_usage=False)
    step(plan)
    assert torch._C._storage_Use_Count(copy._cdata) == 1
