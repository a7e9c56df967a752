"""Weights that the ranks of a tensor-parallel group hold in parts: each part has the bytes that it
has in the unsharded cast of the whole weight.
"""

import random
from functools import cache
from typing import Any

import pytest
import torch

import zerocast
from tests.support.claims import assert_unsharded_cast
from tests.support.nightly import first_of_each
from tests.support.partitions import draw_partition
from tests.support.ranks import on_ranks, run_ranks, split_ranks
from tests.support.recipes import VARIANTS, each
from tests.support.same_bytes import assert_same_bytes
from tests.support.tp_shards import has_columnwise, shape_of, unit
from tests.support.values import draw_values
from zerocast import TensorParallelShard
from zerocast.cast.amax_buffers import STEP_WORDS, ExchangeKind
from zerocast.comm import Communicator, RecordingCommunicator, SingleRank, run_in_process
from zerocast.errors import InputError
from zerocast.layout import Extent
from zerocast.recipes import Recipe
from zerocast.tensors import quantize_into

BACKENDS = ("reference", "cpu")
CASTS = 3
"""In a row: what a recipe remembers of one shows in the next."""


@cache
def master(name: str) -> torch.Tensor:
    """The whole master of the weight under this recipe."""
    shape = shape_of(VARIANTS[name])
    return draw_values("wide", shape.numel(), list(VARIANTS).index(name)).view(shape)


@cache
def whole(name: str) -> zerocast.QuantizedTensor:
    """What the numerics demands: three unsharded casts of the whole weight, by the reference."""

    def on_rank(comm: Communicator) -> zerocast.QuantizedTensor:
        recipe = VARIANTS[name]
        weight = zerocast.empty(
            shape_of(recipe), recipe, columnwise=has_columnwise(recipe), name=name
        )
        for _ in range(CASTS):
            quantize_into(weight.quantized_storage, master(name))
        return weight

    with zerocast.use_backend("reference"):
        return run_in_process(1, on_rank)[0]


def draw_part(
    recipe: Recipe, dim: int, comm: Communicator, rng: random.Random
) -> TensorParallelShard:
    """This rank's part of one weight: cut anywhere between blocks; parts may be empty."""
    shape = shape_of(recipe)
    lines, step = shape[dim], unit(recipe)
    inner = [rng.randrange(0, lines + step, step) for _ in range(comm.size - 1)]
    cuts = [0, *sorted(min(cut, lines) for cut in inner), lines]
    start, end = cuts[comm.rank : comm.rank + 2]
    return TensorParallelShard(shape, dim, start, end - start, comm)


def cast_parts(
    tensor_parallel: Communicator,
    data_parallel: Communicator,
    dim: int,
    exchange: ExchangeKind = "boundary",
) -> None:
    """Cast this rank's shards of its parts of all weights, in one plan; every byte is right."""
    weights, shards, starts = [], [], []
    for name, recipe in VARIANTS.items():
        rng = random.Random(name)
        tp_shard = draw_part(recipe, dim, tensor_parallel, rng)
        weights.append(
            zerocast.empty(
                tp_shard.shape, recipe, tp_shard=tp_shard, columnwise=has_columnwise(recipe)
            )
        )
        mine = tp_shard.slice_of(master(name)).contiguous().view(-1)
        rng = random.Random(f"{name} {tensor_parallel.rank}")
        extents = [Extent(0, 0)] * data_parallel.size
        if mine.numel():
            extents = draw_partition(mine.numel(), data_parallel.size, rng)
        extent = extents[data_parallel.rank]
        shards.append(mine[extent.start : extent.end])
        starts.append(extent.start)
    names = list(VARIANTS)
    plan = zerocast.CastPlan(weights, shards, starts, data_parallel, names=names, exchange=exchange)
    for _ in range(CASTS):
        plan.cast()
        plan.all_gather()
    for name, weight in zip(names, weights, strict=True):
        assert_unsharded_cast(weight, whole(name), name)


def two_groups(comm: Any, tensor_parallel: int) -> tuple[Communicator, Communicator]:
    """The tensor-parallel group of neighbours, and the data-parallel group across them."""
    return comm.split(comm.rank // tensor_parallel), comm.split(comm.rank % tensor_parallel)


@first_of_each(
    ("dim", "size", "backend"),
    [(i % 2, n, BACKENDS[(i // 2 + i + n // 2) % 2]) for n in (1, 2, 3, 4) for i in range(4)],
    columns=2,
)
def test_gathered_parts_are_the_slices_of_the_whole(dim: int, size: int, backend: str) -> None:
    """Every recipe, each weight cut over 1 to 4 ranks in drawn places, each part sharded over two
    ranks at any element.
    """

    def on_rank(comm: Any) -> None:
        cast_parts(*two_groups(comm, size), dim, ("full", "boundary")[(dim + size) % 2])

    for name in VARIANTS:
        whole(name)
    with zerocast.use_backend(backend):
        run_in_process(2 * size, on_rank)


def test_on_ranks_of_every_kind(comm_kind: str) -> None:
    """The same on 2 x 2 ranks of every communicator, sharded by rows and by columns."""

    def on_rank(comm: Communicator) -> None:
        groups = split_ranks(comm, comm.rank // 2), split_ranks(comm, comm.rank % 2)
        for dim in (0, 1):
            cast_parts(*groups, dim)

    run_ranks(comm_kind, 4, on_rank)


@on_ranks("in_process", 3)
def test_parts_that_are_not_sharded(comm: Communicator) -> None:
    """Tensor parallelism alone: the group that shares each part is one rank."""
    cast_parts(comm, SingleRank(), 0)


@on_ranks("in_process", 4)
def test_a_plan_of_parts_over_several_groups_and_of_whole_weights(comm: Communicator) -> None:
    """On 2 x 2 ranks: a weight that all four hold in parts, one that pairs hold in parts, one that
    all share, one of another pair; each has its whole weight's bytes.
    """
    recipe = VARIANTS["nvfp4"]
    masters = [draw_values("normal", 128 * 64, i).view(128, 64) * 10.0**i for i in range(4)]
    tensor_parallel, data_parallel = two_groups(comm, 2)
    tp_shards = [
        TensorParallelShard.chunk((128, 64), 0, comm),
        TensorParallelShard.chunk((128, 64), 1, tensor_parallel),
        None,
        TensorParallelShard.chunk((128, 64), 0, data_parallel),
    ]
    groups = [SingleRank(), data_parallel, comm, tensor_parallel]
    weights, shards, starts = [], [], []
    for x, tp_shard, group in zip(masters, tp_shards, groups, strict=True):
        mine = (x if tp_shard is None else tp_shard.slice_of(x)).contiguous().view(-1)
        start, end = (mine.numel() * r // group.size for r in (group.rank, group.rank + 1))
        shape = (128, 64) if tp_shard is None else tp_shard.shape
        weights.append(zerocast.empty(shape, recipe, tp_shard=tp_shard))
        shards.append(mine[start:end])
        starts.append(start)
    plan = zerocast.CastPlan(weights, shards, starts, groups)
    plan.cast()
    plan.all_gather()
    for x, weight in zip(masters, weights, strict=True):
        assert_unsharded_cast(weight, x, f"{weight.quantized_storage.tp_shard or 'whole'}")


@on_ranks("in_process", 2)
def test_weights_may_come_in_any_list(comm: Communicator) -> None:
    """Their parts are found in a ParameterList, as in a list."""
    x = torch.tensor([[1.0, 2.0], [3.0, 400.0]])
    recipe = zerocast.Float8CurrentScaling()
    tp_shard = TensorParallelShard.chunk((2, 2), 0, comm)
    weight = torch.nn.Parameter(zerocast.empty(tp_shard.shape, recipe, tp_shard=tp_shard))
    weights: Any = torch.nn.ParameterList([weight])
    zerocast.CastPlan(weights, [tp_shard.slice_of(x)], [0], SingleRank()).cast()
    assert weights[0].rowwise_scale_inv * 448 == 400


@pytest.mark.parametrize("count", [1, 30])
@on_ranks("in_process", 4)
def test_one_collective_a_group_and_cast(comm: Communicator, count: int) -> None:
    """However many weights: one all-reduce of all amaxes, and of two words of the step, over the
    ranks that share them, and one of the shared entries over those that hold the parts.
    """
    tensor_parallel, data_parallel = map(RecordingCommunicator, two_groups(comm, 2))
    recipes = [zerocast.NVFP4BlockScaling(), zerocast.Float8BlockScaling()] * count
    tp_shard = TensorParallelShard.chunk((256, 32), 0, tensor_parallel)
    weights = [zerocast.empty(tp_shard.shape, recipe, tp_shard=tp_shard) for recipe in recipes]
    half = tp_shard.shape.numel() // 2
    shards = [torch.randn(half) for _ in weights]
    starts = [half * data_parallel.rank] * len(weights)
    plan = zerocast.CastPlan(weights, shards, starts, data_parallel)
    for recorded in (tensor_parallel, data_parallel):
        recorded.reset()
    plan.cast()
    slots = sum(weight.quantized_storage.amax_slots for weight in weights)
    for recorded, entries in ((tensor_parallel, count), (data_parallel, slots + STEP_WORDS)):
        total = recorded.total()
        assert (total.calls, total.payload_bytes) == (1, 4 * entries)


@on_ranks("in_process", 2)
@each("nvfp4", "current")
def test_parts_of_an_amax_group(comm: Communicator, recipe: Recipe) -> None:
    """Grouped weights that are sharded, and one beside them that every rank has whole, are cast
    under the amax of them all.
    """
    names = ["l.wq", "l.wk", "l.wv"]
    masters = [draw_values("normal", 64 * 32, i).view(64, 32) * 10.0**i for i in range(3)]
    fused = zerocast.quantize(torch.cat(masters), recipe, dtype=torch.bfloat16)
    # The first one is whole, and the last one has the largest values.
    tp_shards = [None, *(TensorParallelShard.chunk((64, 32), 0, comm) for _ in names[1:])]
    weights = [
        zerocast.empty((64, 32) if tp_shard is None else tp_shard.shape, recipe, tp_shard=tp_shard)
        for tp_shard in tp_shards
    ]
    shards = [
        x if tp_shard is None else tp_shard.slice_of(x)
        for x, tp_shard in zip(masters, tp_shards, strict=True)
    ]
    groups = [["*.w" + c for c in "qkv"]]
    plan = zerocast.CastPlan(
        weights, shards, [0] * 3, SingleRank(), names=names, amax_groups=groups
    )
    plan.cast()
    for i, (weight, tp_shard) in enumerate(zip(weights, tp_shards, strict=True)):
        rows = fused.rowwise_data[64 * i : 64 * i + 64]
        expected = rows if tp_shard is None else tp_shard.slice_of(rows)
        assert_same_bytes(weight.rowwise_data, expected, names[i])


@on_ranks("in_process", 4)
def test_the_functional_cast_finds_plans_of_parts_again(comm: Communicator) -> None:
    """And where one rank has forgotten its plan, all of both groups make one."""
    recipe = zerocast.Float8CurrentScaling()
    x = draw_values("normal", 12 * 8, 0).view(12, 8)
    tensor_parallel, data_parallel = two_groups(comm, 2)
    tp_shard = TensorParallelShard.chunk((12, 8), 0, tensor_parallel)
    weight = zerocast.empty(tp_shard.shape, recipe, tp_shard=tp_shard, columnwise=False)
    start, end = ((0, 13), (13, tp_shard.shape.numel()))[data_parallel.rank]
    plans = []
    for call in range(3):
        shard = tp_shard.slice_of(x * 2**call).reshape(-1)[start:end]
        if call == 2 and comm.rank == 3:
            weight.quantized_storage.plans.clear()
        zerocast.quantize_master_weights([weight], [shard], [start], data_parallel)
        plans.append(next(iter(weight.quantized_storage.plans.values())))
        whole = zerocast.quantize(x * 2**call, recipe, dtype=torch.bfloat16)
        mine = tp_shard.slice_of(whole.rowwise_data).reshape(-1)[start:end]
        assert_same_bytes(weight.rowwise_data.view(-1)[start:end], mine, "codes")
        assert_same_bytes(weight.rowwise_scale_inv, whole.rowwise_scale_inv, "scale")
    assert plans[0] is plans[1]
    assert plans[1] is not plans[2]


def test_a_capture_asks_both_kinds_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph cannot hold of the second reduction is said, too; the all-gather has no
    part in it.
    """
    asked: list[list[Communicator]] = []

    def record(device: torch.device, comms: Any, **_: Any) -> None:
        asked.append(list(comms))

    for module in ("plan", "sharded_cast"):
        monkeypatch.setattr(f"zerocast.cast.{module}.check_capture", record)
    parts_of = RecordingCommunicator(SingleRank())
    tp_shard = TensorParallelShard((16, 16), 0, 0, 16, parts_of)
    weight = zerocast.empty((16, 16), zerocast.NVFP4BlockScaling(), tp_shard=tp_shard)
    plan = zerocast.CastPlan([weight], [torch.randn(16, 16)], [0], SingleRank())
    plan.cast()
    plan.all_gather()
    assert asked == [[SingleRank(), parts_of], [SingleRank()]]


@on_ranks("in_process", 4)
def test_an_amax_group_over_two_tensor_parallel_groups(comm: Any) -> None:
    """Its members could not have one amax on all ranks."""
    tp_shards = [TensorParallelShard.chunk((32, 32), 0, group) for group in two_groups(comm, 2)]
    weights = [
        zerocast.empty((16, 32), zerocast.NVFP4BlockScaling(), tp_shard=tp_shard)
        for tp_shard in tp_shards
    ]
    with pytest.raises(
        InputError,
        match=r"weights of one amax group must be sharded over one tensor-parallel group, or not "
        r"at all, got l\.wq \(InProcessCommunicator\(rank=., size=2\)\) and l\.wk \(",
    ):
        zerocast.CastPlan(
            weights, [torch.randn(16, 32)] * 2, [0, 0], SingleRank(), names=["l.wq", "l.wk"],
            amax_groups=[["*.wq", "*.wk"]],
        )  # fmt: skip
