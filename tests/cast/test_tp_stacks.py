"""Experts [..., M, K] that the ranks of a tensor-parallel group hold in parts: whole matrices, or
rows or columns of each. A part has the bytes that it has in the unsharded cast of the whole.
"""

import dataclasses
import random
from functools import cache
from typing import Any

import pytest
import torch

import zerocast
from tests.support.claims import assert_unsharded_cast, message_of
from tests.support.nightly import first_of_each
from tests.support.partitions import draw_partition
from tests.support.ranks import on_ranks
from tests.support.recipes import VARIANTS
from tests.support.tp_shards import has_columnwise, shape_of, unit
from tests.support.values import draw_values
from zerocast import TensorParallelShard
from zerocast.comm import Communicator, run_in_process
from zerocast.layout import Extent
from zerocast.recipes import Recipe
from zerocast.tensors import quantize_into

PARTS = ("matrices", "rows", "columns")
BACKENDS = ("reference", "cpu")
CASTS = 2


def experts(name: str) -> Recipe:
    """The recipe, for stacks."""
    return dataclasses.replace(VARIANTS[name], per_matrix=True)


def stack_shape(name: str) -> torch.Size:
    """Of three matrices, or of two times two."""
    stack = (3,) if len(name) % 2 else (2, 2)
    return torch.Size((*stack, *shape_of(VARIANTS[name])))


@cache
def master(name: str) -> torch.Tensor:
    """The whole master of the stack under this recipe."""
    shape = stack_shape(name)
    return draw_values("wide", shape.numel(), list(VARIANTS).index(name)).view(shape)


@cache
def whole(name: str) -> zerocast.QuantizedTensor:
    """Casts of the whole stack, by the reference."""

    def on_rank(comm: Communicator) -> zerocast.QuantizedTensor:
        recipe = experts(name)
        copies = has_columnwise(recipe)
        weight = zerocast.empty(stack_shape(name), recipe, columnwise=copies, name=name)
        for _ in range(CASTS):
            quantize_into(weight.quantized_storage, master(name))
        return weight

    with zerocast.use_backend("reference"):
        return run_in_process(1, on_rank)[0]


def draw_part(name: str, part: str, comm: Communicator) -> TensorParallelShard:
    """This rank's part, cut anywhere between blocks, or matrices; parts may be empty."""
    shape, rng = stack_shape(name), random.Random(f"{name} {part}")
    if part == "matrices":
        step = shape[1:-1].numel()
        lines = shape[0] * step
    else:
        step, lines = unit(VARIANTS[name]), shape[-2 if part == "rows" else -1]
    inner = [rng.randrange(0, lines + step, step) for _ in range(comm.size - 1)]
    cuts = [0, *sorted(min(cut, lines) for cut in inner), lines]
    start, end = cuts[comm.rank : comm.rank + 2]
    dim = int(part == "columns")
    return TensorParallelShard(shape, dim, start, end - start, comm, per_matrix=part == "rows")


@first_of_each(
    ("part", "size", "backend"),
    [(PARTS[i % 3], size, BACKENDS[(i + size) % 2]) for size in (1, 2, 3) for i in range(6)],
    columns=2,
)
def test_gathered_parts_are_the_slices_of_the_whole(part: str, size: int, backend: str) -> None:
    """Every recipe, each stack cut over 1 to 3 ranks in drawn places, each part sharded over two
    ranks at any element; by plans, and by ``quantize`` of the part.
    """

    def on_rank(comm: Any) -> None:
        tensor_parallel, data_parallel = comm.split(comm.rank // size), comm.split(comm.rank % size)
        weights, shards, starts = [], [], []
        for name in VARIANTS:
            recipe, tp_shard = experts(name), draw_part(name, part, tensor_parallel)
            copies = has_columnwise(recipe)
            weights.append(
                zerocast.empty(tp_shard.shape, recipe, tp_shard=tp_shard, columnwise=copies)
            )
            mine = tp_shard.slice_of(master(name)).contiguous().view(-1)
            rng = random.Random(f"{name} {tensor_parallel.rank}")
            extents = [Extent(0, 0)] * data_parallel.size
            if mine.numel():
                extents = draw_partition(mine.numel(), data_parallel.size, rng)
            extent = extents[data_parallel.rank]
            shards.append(mine[extent.start : extent.end])
            starts.append(extent.start)
        names, exchange = list(VARIANTS), ("full", "boundary")[size % 2]
        plan = zerocast.CastPlan(
            weights, shards, starts, data_parallel, names=names, exchange=exchange, verify="full"
        )
        for _ in range(CASTS):
            plan.cast()
            plan.all_gather()
        for name, weight in zip(names, weights, strict=True):
            assert_unsharded_cast(weight, whole(name), name)
        for name in ("nvfp4", "current", "rowwise", "mxfp8"):
            tp_shard = draw_part(name, part, tensor_parallel)
            own = tp_shard.slice_of(master(name))
            weight = zerocast.quantize(own, experts(name), tp_shard=tp_shard)
            assert_unsharded_cast(weight, zerocast.quantize(master(name), experts(name)), name)

    for name in VARIANTS:
        whole(name)
    with zerocast.use_backend(backend):
        run_in_process(2 * size, on_rank)


@on_ranks("in_process", 2)
def test_rows_of_each_matrix_of_one_tensor(comm: Communicator) -> None:
    """Under a recipe that takes all matrices for one tensor: one scale over all parts."""
    value = draw_values("normal", 3 * 6 * 8, 0).view(3, 6, 8)
    for name in ("current", "rowwise"):
        tp_shard = TensorParallelShard.chunk(value.shape, 1, comm)
        assert (
            str(tp_shard)
            == f"rows [{3 * comm.rank}, {3 * comm.rank + 3}) of each matrix of (3, 6, 8)"
        )
        weight = zerocast.quantize(tp_shard.slice_of(value), VARIANTS[name], tp_shard=tp_shard)
        expected = zerocast.quantize(value, VARIANTS[name])
        assert torch.equal(weight.dequantize(), tp_shard.slice_of(expected.dequantize()))


@pytest.mark.parametrize("part", PARTS[1:])
def test_a_part_inside_a_block_is_refused(part: str) -> None:
    """By the rows or columns of a matrix; whole matrices may be any."""
    shape, comm = torch.Size((4, 64, 64)), zerocast.comm.SingleRank()
    inside = TensorParallelShard(shape, int(part == "columns"), 8, 56, comm, part == "rows")
    message = message_of(
        zerocast.InputError, zerocast.empty, inside.shape, "nvfp4", tp_shard=inside
    )
    assert f"at multiples of 16 {part}, got {inside}" in message
    one = TensorParallelShard(shape, 0, 64, 64, comm)
    assert zerocast.empty(one.shape, "nvfp4", tp_shard=one).shape == (1, 64, 64)


def test_rows_of_each_matrix_are_of_weights_with_matrices() -> None:
    """A matrix is not made of several, and columns are those of each in any case."""
    comm = zerocast.comm.SingleRank()
    for shape, dim in (((64, 64), 0), ((4, 64, 64), 1)):
        message = message_of(
            zerocast.InputError, TensorParallelShard, shape, dim, 0, 16, comm, per_matrix=True
        )
        assert "per_matrix needs rows of each matrix" in message
