"""What a plan promises beyond the bytes: reuse, moves, groups, staleness, memory."""

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch

import zerocast
from tests.support.claims import told_all
from tests.support.planned import NUMEL, SHAPE, Planned, unsharded
from tests.support.ranks import on_ranks
from tests.support.recipes import RECIPES, each
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.values import draw_values
from zerocast.backends.reference import ReferenceBackend
from zerocast.comm import (
    Communicator,
    InProcessCommunicator,
    RecordingCommunicator,
    SingleRank,
    run_in_process,
)
from zerocast.errors import InputError, RankMismatchError, StaleCopyError
from zerocast.numerics import Launch, Masters, Numerics, TensorOperand

NVFP4, FP8 = RECIPES["nvfp4"], RECIPES["current"]
both = each("nvfp4", "current")


@both
@on_ranks("in_process", 3)
def test_a_plan_casts_every_step(comm: Communicator, recipe: zerocast.Recipe) -> None:
    """Masters updated in place are cast anew by each call: nothing of an earlier step is left in
    amaxes or scales.
    """
    planned = Planned(comm, recipe, cuts=(0, 1001, NUMEL, NUMEL))
    for step, kind in enumerate(("huge", "wide", "nan", "zeros", "normal")):
        master = draw_values(kind, NUMEL, step)
        planned.master.copy_(master[planned.start : planned.end])
        expected = unsharded(master, recipe)
        assert_same_storage(planned.cast(), expected, f"step {step} rank {comm.rank}")


@on_ranks("in_process", 3)
@both
def test_codes_of_others_are_untouched(comm: Communicator, recipe: zerocast.Recipe) -> None:
    """A cast without a gather changes the codes of its own elements only, to the nibble; scales are
    right already.
    """
    master = draw_values("normal", NUMEL, 3)
    expected = unsharded(master, recipe)
    weight = zerocast.empty(SHAPE, recipe)
    weight.rowwise_data.fill_(0xA5)
    start, end = ((0, 901), (901, 1003), (1003, NUMEL))[comm.rank]
    zerocast.quantize_master_weights([weight], [master[start:end]], [start], comm)
    assert_same_bytes(weight.rowwise_scale_inv, expected.rowwise_scale_inv, "rowwise_scale_inv")
    codes, right = _codes(weight, recipe), _codes(expected, recipe)
    before = torch.full_like(codes, 0xA5)
    if recipe is NVFP4:
        before = torch.tensor([5, 10], dtype=torch.uint8).repeat(NUMEL // 2)
    before[start:end] = right[start:end]
    assert_same_bytes(codes, before, f"codes on rank {comm.rank}")


def _codes(weight: zerocast.QuantizedTensor, recipe: zerocast.Recipe) -> torch.Tensor:
    """[numel] one code an element."""
    data = weight.rowwise_data.reshape(-1)
    return torch.stack((data & 15, data >> 4), 1).view(-1) if recipe is NVFP4 else data


@on_ranks("in_process", 2)
@both
def test_shard_buffers_receive_the_codes(comm: Communicator, recipe: zerocast.Recipe) -> None:
    """fsdp_shard_model_weights gets exactly the shard's codes; the weight's own codes stay as they
    are.
    """
    master = draw_values("wide", NUMEL, 5)
    expected = _codes(unsharded(master, recipe), recipe)
    weight = zerocast.empty(SHAPE, recipe)
    start, end = ((0, 902), (902, NUMEL))[comm.rank]
    buffer = torch.full(
        (end // 2 - start // 2,) if recipe is NVFP4 else (end - start,), 0x77, dtype=torch.uint8
    )
    zerocast.quantize_master_weights([weight], [master[start:end]], [start], comm, [buffer])
    got = torch.stack((buffer & 15, buffer >> 4), 1).view(-1) if recipe is NVFP4 else buffer
    assert_same_bytes(got, expected[start:end], "shard")
    assert not weight.rowwise_data.any()


@on_ranks("in_process", 2)
@both
def test_shard_buffers_of_a_stack_receive_the_codes(
    comm: Communicator, recipe: zerocast.Recipe
) -> None:
    """fsdp_shard_model_weights gets the codes of a shard that begins or ends inside of a matrix of
    a stack, and the gather brings them to their places.
    """
    recipe, shape = dataclasses.replace(recipe, per_matrix=True), (3, 16, 32)
    master, numel, middle = draw_values("wide", 3 * 512, 5), 3 * 512, 600
    whole = zerocast.quantize(master.view(shape), recipe, dtype=torch.bfloat16)
    expected = whole.rowwise_data.reshape(-1)
    weight = zerocast.empty(shape, recipe)
    start, end = ((0, middle), (middle, numel))[comm.rank]
    first, last = (at * len(expected) // numel for at in (start, end))
    buffer = torch.full((last - first,), 0x77, dtype=torch.uint8)
    plan = zerocast.CastPlan(
        [weight], [master[start:end]], [start], comm, fsdp_shard_model_weights=[buffer]
    )
    plan.cast()
    masters, matrices = plan._prepared.masters.tensors, plan._prepared.matrices
    held = [0 if master is None else master.numel() for master in masters]
    assert held == [matrix.extent.size for matrix in matrices]
    assert_same_bytes(buffer, expected[first:last], "shard")
    plan.all_gather()
    assert_same_storage(weight, whole, "gathered")


def test_copies_are_rebuilt_where_a_weight_lies_now() -> None:
    """Of a weight that moves between the cast and the copies, too."""
    master = draw_values("normal", NUMEL, 1)
    weight = zerocast.empty(SHAPE, NVFP4)
    plan = zerocast.CastPlan([weight], [master], [0])
    plan.cast()
    plan.post_all_gather_processing()
    plan.cast([-master])
    flat = torch.zeros(NUMEL, dtype=torch.uint8)
    zerocast.replace_raw_data(weight, flat[64 : 64 + NUMEL // 2])
    plan.post_all_gather_processing()
    assert_same_storage(weight, unsharded(-master, NVFP4), "moved")


def test_a_moved_weight_leaves_the_plan_its_backend() -> None:
    """A plan made within use_backend() keeps that backend when a move makes it prepare anew."""
    master = draw_values("normal", NUMEL, 1)
    weight = zerocast.empty(SHAPE, NVFP4)
    prepared: list[str] = []

    class Spy(ReferenceBackend):
        def partial_cast(
            self, numerics: Numerics, operands: Sequence[TensorOperand], masters: Masters
        ) -> Launch:
            prepared.append("spy")
            return super().partial_cast(numerics, operands, masters)

    with zerocast.use_backend(Spy()):
        plan = zerocast.CastPlan([weight], [master], [0])
    zerocast.replace_raw_data(weight, torch.zeros(NUMEL // 2, dtype=torch.uint8))
    plan.cast()
    plan.post_all_gather_processing()
    assert prepared == ["spy", "spy"]
    assert_same_storage(weight, unsharded(master, NVFP4), "moved")


@pytest.mark.parametrize("elsewhere", [(), (0,), (1,), (0, 1)])
@on_ranks("in_process", 2)
def test_gather_in_place_copies_nothing(comm: Communicator, elsewhere: tuple[int, ...]) -> None:
    """Weights whose codes lie end to end in one buffer, cut rank by rank, are gathered in that very
    buffer; what was cast elsewhere, of whichever of them, is brought there.
    """
    gathered: list[int] = []

    class Spy(RecordingCommunicator):
        def start_all_gather_(
            self, buffer: torch.Tensor, counts: Sequence[int] | None = None
        ) -> Callable[[], None]:
            gathered.append(buffer.data_ptr())
            return super().start_all_gather_(buffer, counts)

    masters = [draw_values("normal", NUMEL, i) for i in (1, 2)]
    weights = [zerocast.empty(SHAPE, NVFP4) for _ in masters]
    flat = torch.zeros(NUMEL, dtype=torch.uint8)
    for i, weight in enumerate(weights):
        zerocast.replace_raw_data(weight, flat[i * NUMEL // 2 : (i + 1) * NUMEL // 2])
    cut = NUMEL + 1002  # rank 0: the first weight and the head of the second
    mine = [masters[0], masters[1][:1002]] if comm.rank == 0 else [None, masters[1][1002:]]
    starts = [0, 0] if comm.rank == 0 else [None, cut - NUMEL]
    own = [None if master is None or i not in elsewhere else torch.zeros(len(master) // 2).byte()
           for i, master in enumerate(mine)]  # fmt: skip
    plan = zerocast.CastPlan(weights, mine, starts, Spy(comm), fsdp_shard_model_weights=own)
    gathered.clear()
    plan.cast()
    plan.all_gather()
    assert gathered == [flat.data_ptr()]
    for weight, master in zip(weights, masters, strict=True):
        assert_same_storage(weight, unsharded(master, NVFP4), f"rank {comm.rank}")


@on_ranks("in_process", 4)
def test_experts_have_groups_of_their_own(comm: InProcessCommunicator) -> None:
    """Weights of one plan in different groups: each expert is shared by two of the four ranks, the
    dense one by all; what they hold is compared in each.
    """
    dense, *experts = (draw_values("wide", NUMEL, i) for i in range(3))
    expert = experts[comm.rank // 2]
    pair = comm.split(comm.rank // 2)
    weights = [zerocast.empty(SHAPE, NVFP4), zerocast.empty(SHAPE, FP8)]
    quarter, half = NUMEL // 4, NUMEL // 2
    starts = [comm.rank * quarter, pair.rank * half]
    masters = [dense[starts[0] :][:quarter], expert[starts[1] :][:half]]
    plan = zerocast.CastPlan(weights, masters, starts, [comm, pair], verify="full")
    for _ in range(2):  # each group compares all of its weights
        plan.cast()
        plan.all_gather()
    assert_same_storage(weights[0], unsharded(dense, NVFP4), f"dense on rank {comm.rank}")
    assert_same_storage(weights[1], unsharded(expert, FP8), f"expert of rank {comm.rank}")


# --- derived copies ---


X = torch.ones(2, SHAPE[1], dtype=torch.bfloat16)


def linear(recipe: zerocast.Recipe) -> zerocast.nn.Linear:
    """A layer whose weight is to be cast."""
    return zerocast.nn.Linear(SHAPE[1], SHAPE[0], bias=False, recipe=recipe, dtype=torch.bfloat16)


def test_automatic_rebuild_in_the_next_forward() -> None:
    """manual_post_all_gather_processing=False: a direct read is refused, a forward rebuilds."""
    master, layer = draw_values("normal", NUMEL, 1), linear(NVFP4)
    zerocast.quantize_master_weights(
        [layer.weight], [master], [0], manual_post_all_gather_processing=False
    )
    with pytest.raises(StaleCopyError):
        _ = layer.weight.columnwise_data
    layer(X)
    assert_same_storage(layer.weight, unsharded(master, NVFP4), "after forward")


def test_post_all_gather_hook() -> None:
    """The hook rebuilds before the module's forward, once a cast, and can be removed; without it a
    forward that comes too early is refused rather than served from half a gather.
    """
    master, layer = draw_values("normal", NUMEL, 1), linear(FP8)
    plan = zerocast.CastPlan([layer.weight], [master], [0])
    handle = plan.post_all_gather_hook(layer)
    plan.cast()
    layer(X)
    assert_same_storage(layer.weight, unsharded(master, FP8), "after forward")
    handle.remove()
    plan.cast()
    with pytest.raises(StaleCopyError):
        layer(X)
    zerocast.quantize_master_weights([layer.weight], [master], [0])
    with pytest.raises(StaleCopyError):
        layer(X)
    with pytest.raises(InputError, match="none of its 1 weights"):
        plan.post_all_gather_hook(torch.nn.Linear(2, 2))


# --- the functional calls ---


@on_ranks("in_process", 2)
def test_functional_calls_reuse_their_plan(comm: Communicator) -> None:
    """The second call for the same weights runs two all-reduces: its opening and the amaxes,
    wherever masters lie.
    """
    comm = RecordingCommunicator(comm)  # the same object each time, so it is the same group
    weight = zerocast.empty(SHAPE, NVFP4)
    half = NUMEL // 2
    for step in range(3):
        master = draw_values("normal", NUMEL, step)
        comm.reset()
        zerocast.cast_master_weights_to_nvfp4(
            [weight], [master[comm.rank * half :][:half].clone()], [comm.rank * half], comm
        )
        if step:
            assert comm.total().calls == comm.total(kind="all_reduce").calls == 2


@on_ranks("in_process", 2)
def test_one_rank_that_must_plan_makes_all_plan(comm: Communicator) -> None:
    """A rank that lost its plan (a new shard buffer) makes all ranks plan anew instead of
    hanging.
    """
    master = draw_values("normal", NUMEL, 1)
    weight = zerocast.empty(SHAPE, NVFP4)
    half = NUMEL // 2
    shard = master[comm.rank * half :][:half]
    for step in range(3):
        fresh = [torch.zeros(half // 2, dtype=torch.uint8)] if comm.rank == 1 else None
        zerocast.quantize_master_weights([weight], [shard], [comm.rank * half], comm, fresh)
        if fresh:
            expected = unsharded(master, NVFP4).rowwise_data.view(-1)[half // 2 :]
            assert_same_bytes(fresh[0], expected, f"step {step}")


@on_ranks("in_process", 2)
@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda kwargs: kwargs["model_weights"].reverse(), "another order"),
        (lambda kwargs: kwargs.update(check_finite=True), "check_finite=True"),
        (lambda kwargs: kwargs["start_offsets"].reverse(), "owned twice"),
    ],
    ids=["order", "check_finite", "partition"],
)
def test_ranks_that_find_different_plans_are_told(
    comm: Communicator, spoil: Callable[[dict[str, Any]], None], text: str
) -> None:
    """Both calls were right when all ranks made them, so both are planned; one on each rank is
    refused.
    """
    weights = [zerocast.empty(SHAPE, recipe) for recipe in (NVFP4, FP8)]
    starts = [comm.rank * NUMEL // 2, (1 - comm.rank) * NUMEL // 2]

    masters = [torch.ones(NUMEL // 2)] * 2
    plain, other = (
        {"model_weights": [*weights], "master_weights": masters, "start_offsets": [*starts]}
        for _ in range(2)
    )
    spoil(other)
    for kwargs in (plain, other):
        zerocast.quantize_master_weights(**kwargs, group=comm)
    call = zerocast.quantize_master_weights
    mine = (plain, other)[comm.rank]
    assert text in told_all(comm, RankMismatchError, call, **mine, group=comm)


def test_functional_calls_keep_nothing_alive() -> None:
    """No master outlives its call, and no plan outlives its weights."""
    weight = zerocast.empty(SHAPE, NVFP4)
    master = torch.ones(NUMEL)
    zerocast.quantize_master_weights([weight], [master], [0])
    (plan,) = weight.quantized_storage.plans.values()
    refs = [weakref.ref(master), weakref.ref(plan), weakref.ref(weight.quantized_storage)]
    del master
    gc.collect()
    assert refs[0]() is None
    del plan, weight
    gc.collect()
    assert refs[1]() is None
    assert refs[2]() is None


@pytest.mark.parametrize("integer", [int, numpy.int64, numpy.uint32, torch.tensor])
def test_start_offsets_of_any_integer_type(integer: Callable[[int], Any]) -> None:
    """An offset may come from numpy's or torch's arithmetic; the codes land where it says."""
    x = draw_values("normal", NUMEL, 1)
    cuts = [integer(each) for each in (0, 101, NUMEL)]
    for w in run_in_process(2, lambda comm: Planned(comm, NVFP4, x, cuts=cuts).cast()):
        assert_same_storage(w, unsharded(x, NVFP4), "gathered")


@on_ranks("in_process", 3)
def test_nothing_to_cast(comm: Communicator) -> None:
    """A call without weights, and a rank without masters, take part and do nothing."""
    zerocast.quantize_master_weights([], [], [], comm)
    master = draw_values("normal", NUMEL, 1)
    weight = zerocast.empty(SHAPE, FP8)
    mine, start = ([master], [0]) if comm.rank == 2 else ([None], [None])
    plan = zerocast.CastPlan([weight], mine, start, comm)
    plan.cast()
    plan.all_gather()
    assert_same_storage(weight, unsharded(master, FP8), f"rank {comm.rank}")


def test_steps_are_the_cast() -> None:
    """A profiler that runs the named steps one by one gets what cast() gives."""
    master = draw_values("normal", NUMEL, 1)
    planned = Planned(SingleRank(), NVFP4, master)
    steps = dict(planned.plan.pipeline)
    assert list(steps) == ["partial_amax", "reduce_amax", "compute_scale", "partial_cast"]
    for step in steps.values():
        step()
    planned.plan.all_gather()
    assert_same_storage(planned.weight, unsharded(master, NVFP4), "steps")


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-4over6"])
def test_a_step_is_four_python_frames_from_c(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a plan has cast, of every step that launches something."""
    planned = Planned(SingleRank(), RECIPES[recipe], draw_values("normal", NUMEL, 1))
    planned.cast()
    frames: dict[str, int] = {}
    this = sys._getframe()

    def threads() -> int:  # what a launch asks for before it calls C
        frame, frames[name] = sys._getframe(1), 0
        while frame is not this:
            assert frame.f_back is not None
            frame, frames[name] = frame.f_back, frames[name] + 1
        return 1

    monkeypatch.setattr(torch, "get_num_threads", threads)
    for name, step in planned.plan.pipeline:  # noqa: B007
        step()
    chosen = {"partial_select", "select"} if "4over6" in recipe else {"partial_cast"}
    assert frames.keys() == {"partial_amax", "compute_scale"} | chosen
    assert set(frames.values()) == {4}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_masters_of_other_dtypes_are_bound(backend: str) -> None:
    """A plan made with FP32 masters casts BF16 and FP16 ones, a dtype a weight, of which each rank
    may hold another: the bytes of FP32 masters of the same values. They are not copied.
    """
    recipes = (NVFP4, RECIPES["mxfp8"])
    values = [draw_values("ties", NUMEL, seed) for seed in range(2)]  # exact in every dtype
    stored = (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)

    def on_rank(comm: Communicator) -> None:
        start, end = ((0, 999), (999, NUMEL))[comm.rank]
        weights = [zerocast.empty(SHAPE, r) for r in recipes]
        first = [torch.zeros(end - start) for _ in recipes]
        plan = zerocast.CastPlan(weights, first, [start] * 2, comm)
        dtypes = stored[comm.rank]
        masters = [v[start:end].to(d, copy=True) for v, d in zip(values, dtypes, strict=True)]
        for factor in (1, 2):
            for master in masters:
                master *= factor
            plan.cast(masters) if factor == 1 else plan.cast()
            plan.all_gather()
            for weight, value, recipe in zip(weights, values, recipes, strict=True):
                expected = unsharded(value * factor, recipe)
                assert_same_storage(weight, expected, f"rank {comm.rank} times {factor}")

    with zerocast.use_backend(backend):
        run_in_process(2, on_rank)
