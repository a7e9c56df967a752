"""Weights that the ranks of a tensor-parallel group hold in parts: each part has the bytes that it
has in the unsharded cast of the whole weight.
"""

import random
from functools import cache
from typing import Any

import pytest
import torch

import zerocast
from tests.cast.test_first_law import RECIPES
from tests.support.partitions import draw_partition
from tests.support.parts import assert_is_part, shape_of, unit
from tests.support.values import draw_values
from zerocast import Part
from zerocast.comm import Communicator, run_in_process
from zerocast.layout import Extent
from zerocast.recipes import Recipe
from zerocast.tensors import quantize_into

BACKENDS = ("reference", "cpu")
DIMS = ("rows", "columns")
CASTS = 3
"""In a row: what a recipe remembers of one shows in the next."""


@cache
def master(i: int) -> torch.Tensor:
    """The whole master of recipe number i."""
    shape = shape_of(RECIPES[i])
    return draw_values("wide", shape.numel(), 70 + i).view(shape)


def columnwise(recipe: Recipe) -> bool:
    """A columnwise copy that is cast from the transposed tensor cannot be sharded."""
    return not recipe.casts_transpose


@cache
def whole(i: int) -> zerocast.QuantizedTensor:
    """What the law demands: three unsharded casts of the whole weight, by the reference."""

    def on_rank(comm: Communicator) -> zerocast.QuantizedTensor:
        recipe = RECIPES[i]
        weight = zerocast.empty(
            shape_of(recipe), recipe, columnwise=columnwise(recipe), name=f"weight.{i}"
        )
        for _ in range(CASTS):
            quantize_into(weight.storage, master(i))
        return weight

    with zerocast.use_backend("reference"):
        return run_in_process(1, on_rank)[0]


def draw_part(recipe: Recipe, dim: int, comm: Communicator, rng: random.Random) -> Part:
    """This rank's part of one weight: cut anywhere between blocks; parts may be empty."""
    shape = shape_of(recipe)
    lines, step = shape[dim], unit(recipe)
    inner = [rng.randrange(0, lines + step, step) for _ in range(comm.size - 1)]
    cuts = [0, *sorted(min(cut, lines) for cut in inner), lines]
    start, end = cuts[comm.rank : comm.rank + 2]
    return Part(shape, dim, start, end - start, comm)


def cast_parts(tensor_parallel: Communicator, data_parallel: Communicator, dim: int) -> None:
    """Cast this rank's shards of its parts of all weights, in one plan; every byte is right."""
    weights, shards, starts = [], [], []
    for i, recipe in enumerate(RECIPES):
        rng = random.Random(i)
        part = draw_part(recipe, dim, tensor_parallel, rng)
        weights.append(zerocast.empty(part.shape, recipe, part=part, columnwise=columnwise(recipe)))
        mine = part.slice_of(master(i)).contiguous().view(-1)
        rng = random.Random(100 * i + tensor_parallel.rank)
        extents = [Extent(0, 0)] * data_parallel.size
        if mine.numel():
            extents = draw_partition(mine.numel(), data_parallel.size, rng)
        extent = extents[data_parallel.rank]
        shards.append(mine[extent.start : extent.end])
        starts.append(extent.start)
    names = [f"weight.{i}" for i in range(len(RECIPES))]
    plan = zerocast.CastPlan(weights, shards, starts, data_parallel, names=names)
    for _ in range(CASTS):
        plan.cast()
        plan.all_gather()
    for i, weight in enumerate(weights):
        assert_is_part(weight, whole(i), f"{RECIPES[i]}")


def two_groups(comm: Any, tensor_parallel: int) -> tuple[Communicator, Communicator]:
    """The tensor-parallel group of neighbours, and the data-parallel group across them."""
    return comm.split(comm.rank // tensor_parallel), comm.split(comm.rank % tensor_parallel)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [0, 1], ids=DIMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gathered_parts_are_the_slices_of_the_whole(backend: str, dim: int, size: int) -> None:
    """Every recipe, each weight cut over 1 to 4 ranks in drawn places, each part sharded over two
    ranks at any element.
    """

    def on_rank(comm: Any) -> None:
        cast_parts(*two_groups(comm, size), dim)

    for i in range(len(RECIPES)):
        whole(i)
    with zerocast.use_backend(backend):
        run_in_process(2 * size, on_rank)
