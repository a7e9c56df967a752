"""The bitwise guarantee: whatever the partition, gathered shards are the bytes, scales and padding
of the unsharded cast.
"""

import dataclasses
import random
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import pytest
import torch

import zerocast
from tests.support.nightly import nightly
from tests.support.partitions import draw_partition
from tests.support.recipes import VARIANTS
from tests.support.same_bytes import assert_same_storage
from tests.support.values import KINDS, draw_values
from zerocast.comm import Communicator, run_in_process
from zerocast.layout import Extent, Source
from zerocast.recipes import Recipe
from zerocast.tensors import quantize_into

BACKENDS = ("reference", "cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 272)


class Case:
    """Some weights, their whole masters and a partition, all drawn from one seed, the same on every
    rank.
    """

    def __init__(self, seed: int, world_size: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.recipes = [VARIANTS[rng.choice(list(VARIANTS))] for _ in range(rng.randint(1, 3))]
        self.shapes = [self._shape(recipe, rng) for recipe in self.recipes]
        for i, recipe in enumerate(self.recipes):
            if rng.random() < 0.3:  # a stack
                self.recipes[i] = dataclasses.replace(recipe, per_matrix=True)
                leading = rng.choice(((2,), (3,), (1, 2)))
                self.shapes[i] = torch.Size((*leading, *(1, *self.shapes[i])[-2:]))
        self.dtypes = [rng.choice(DTYPES) for _ in self.recipes]
        # A columnwise copy that is cast from the transposed tensor cannot be sharded.
        self.columnwise = [
            rng.random() < 0.8 and r.columnwise_source is not Source.TRANSPOSED_MASTER
            for r in self.recipes
        ]
        self.masters = [
            draw_values(rng.choice(KINDS), shape.numel(), seed + i)
            for i, shape in enumerate(self.shapes)
        ]
        self.partitions = [draw_partition(m.numel(), world_size, rng) for m in self.masters]
        self.own_buffers = rng.random() < 0.3
        self.exchange = rng.choice(("full", "boundary"))

    def stored(self, i: int) -> torch.Tensor:
        """The whole master of weight ``i`` in the dtype that ranks hold it in."""
        return self.masters[i].to(DTYPES[(self.seed + i) % 3])

    @property
    def casts(self) -> int:
        """In a row: what a recipe remembers of one shows in the next."""
        return 3 if any(recipe.state for recipe in self.recipes) else 1

    @staticmethod
    def _shape(recipe: Recipe, rng: random.Random) -> torch.Size:
        rows = rng.choice((1, 2, 3, 15, 16, 17, 31, 33, 70))
        if isinstance(recipe, zerocast.NVFP4BlockScaling):
            return torch.Size((rows, rng.choice(WIDTHS)))
        if recipe.block[1] == 32:
            return torch.Size((rows, 2 * rng.choice(WIDTHS)))
        if isinstance(recipe, zerocast.Float8BlockScaling):
            return torch.Size((rng.choice((1, 70, 127, 129, 140)), rng.choice((1, 7, 127, 130))))
        return torch.Size(rng.choice(((rows, 7), (rows * 5,), (3, rows, 10), (rows, 48))))

    def whole(self) -> list[torch.Tensor]:
        """What the numerics demands: the unsharded cast of FP32 masters, as often as the sharded
        one is made, by the reference backend.
        """
        with zerocast.use_backend("reference"):
            weights = self._empty()
            for _ in range(self.casts):
                for i, weight in enumerate(weights):
                    master = self.stored(i).float().view(weight.shape)
                    quantize_into(weight.quantized_storage, master)
            return weights

    def unfilled(self, device: torch.device | None = None) -> list[torch.Tensor]:
        """Weights to cast into, every byte of theirs wrong, padding included; but for what the
        recipes remember.
        """
        weights = self._empty(device)
        for weight in weights:
            for name, buffer in weight.quantized_storage.buffers.items():
                if name not in weight.recipe.state:
                    buffer.view(torch.uint8).fill_(0xA5)
        return weights

    def _empty(self, device: torch.device | None = None) -> list[zerocast.QuantizedTensor]:
        given = zip(self.shapes, self.recipes, self.dtypes, self.columnwise, strict=True)
        return [
            zerocast.empty(s, r, dtype=d, device=device, columnwise=c, name=f"weight.{i}")
            for i, (s, r, d, c) in enumerate(given)
        ]

    def shards(self, rank: int) -> tuple[list[torch.Tensor | None], list[int | None]]:
        """This rank's masters and start offsets. Masters of 16 bits begin at any element of the
        whole, and a third of the ranks holds the same values in FP32; an empty shard is absent, or
        present with no elements.
        """
        extents = [partition[rank] for partition in self.partitions]
        absent = (self.seed + rank) % 2 == 0
        masters = [
            self._shard(i, rank, e) if e or not absent else None for i, e in enumerate(extents)
        ]
        starts = [None if m is None else e.start for m, e in zip(masters, extents, strict=True)]
        return masters, starts

    def _shard(self, i: int, rank: int, extent: Extent) -> torch.Tensor:
        own = self.stored(i)[extent.start : extent.end]
        return own.float().clone() if (self.seed + rank) % 3 == 0 else own


def cast_and_gather(
    comm: Communicator, case: Case, device: torch.device | None = None
) -> list[torch.Tensor]:
    """The weights as this rank holds them after a plan's cast and all-gather."""
    weights = case.unfilled(device)
    masters, starts = case.shards(comm.rank)
    masters = [None if master is None else master.to(device) for master in masters]
    shard_codes = _shard_buffers(case, comm.rank, device) if case.own_buffers else None
    plan = zerocast.CastPlan(
        weights, masters, starts, comm,
        fsdp_shard_model_weights=shard_codes, exchange=case.exchange,
    )  # fmt: skip
    for _ in range(case.casts):
        plan.cast()
        plan.all_gather()
    return weights


def _shard_buffers(case: Case, rank: int, device: torch.device | None) -> list[Any]:
    buffers = []
    for partition, weight in zip(case.partitions, case.unfilled(device), strict=True):
        e = partition[rank]
        four_bits = weight.recipe.numerics.fmt.bits == 4
        size = ((e.end + 1) // 2 - e.start // 2 if four_bits else e.size) if e else 0
        planes = [
            torch.full((size,), 0x5A, dtype=torch.uint8, device=device)
            for _ in weight.quantized_storage.gathered
        ]
        buffers.append(planes if len(planes) > 1 else planes[0])
    return buffers


def check(case: Case, by_rank: Mapping[int, list[torch.Tensor]]) -> None:
    """The weights of these ranks are the unsharded ones."""
    whole = case.whole()
    for rank, weights in by_rank.items():
        for i, (weight, expected) in enumerate(zip(weights, whole, strict=True)):
            extents = [str(e) for e in case.partitions[i]]
            kind = f"{case.recipes[i]} {case.dtypes[i]}"
            seed = f"seed {case.seed}, {case.exchange} exchange"
            where = f"{seed}, rank {rank}, weight {i} {kind} cut at {extents}"
            assert_same_storage(weight, expected, where)


def check_in_process(case: Case, world_size: int, device: torch.device | None = None) -> None:
    """The numerics for ``case`` on ranks that are threads."""
    by_rank = run_in_process(world_size, lambda comm: cast_and_gather(comm, case, device))
    check(case, dict(enumerate(by_rank)))


def one_weight(shape: tuple[int, int], kind: str, partition: list[Extent]) -> Case:
    """An NVFP4 weight of these values, cut like this."""
    numel = torch.Size(shape).numel()
    case = Case(numel, len(partition))
    case.recipes, case.shapes = [VARIANTS["nvfp4"]], [torch.Size(shape)]
    case.dtypes, case.columnwise, case.own_buffers = [torch.bfloat16], [True], False
    case.masters, case.partitions = [draw_values(kind, numel, partition[0].end)], [partition]
    return case


def test_random_partitions_on_every_communicator(ranks: Any) -> None:
    """25 drawn cases give the unsharded bytes on every kind of communicator and world size, by one
    backend and the other in turn.
    """

    def on_rank(comm: Communicator) -> None:
        for case in cases:
            check(case, {comm.rank: cast_and_gather(comm, case)})

    for first, backend in enumerate(BACKENDS):
        cases = [Case(90000 + seed, ranks.size) for seed in range(first, 25, len(BACKENDS))]
        with zerocast.use_backend(backend):
            ranks.run(on_rank)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [*range(2), *map(nightly, range(2, 10))])
def test_random_partitions_in_process(backend: str, block: int) -> None:
    """60 drawn cases of up to 3 weights on 1 to 9 ranks give the unsharded bytes; 1,200 cases over
    all parameters, most of them nightly.
    """
    for seed in range(1000 * block, 1000 * block + 60):
        world_size = 1 + seed % 9
        case = Case(seed, world_size)
        with zerocast.use_backend(backend):
            check_in_process(case, world_size)


@pytest.mark.parametrize(
    ("backend", "world_size"), [*product(BACKENDS, [64]), ("cpu", 129), nightly("cpu", 257)]
)
def test_many_ranks(backend: str, world_size: int) -> None:
    """More ranks than rows, and more than elements of some weights, still give the unsharded
    bytes.
    """
    case = Case(world_size, world_size)
    with zerocast.use_backend(backend):
        check_in_process(case, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "kind", "cuts"),
    [((32, 16), "ties", (cut, 512)) for cut in (1, 15, 17, 31, 33, 257, 511)]
    + [((40, cols), "wide", (999, 1002, 40 * cols)) for cols in (80, 96, 112)],
)
def test_odd_offsets_and_widths_that_are_no_multiple_of_64(
    backend: str, shape: tuple[int, int], kind: str, cuts: tuple[int, ...]
) -> None:
    """Ranks meet at odd elements, so they share a byte, and neither disturbs the other's nibble;
    under K = 80, 96, 112 scales are stored with the padded stride (TransformerEngine 2.20 uses the
    unpadded one).
    """
    partition = [Extent(start, end) for start, end in pairwise((0, *cuts))]
    with zerocast.use_backend(backend):
        check_in_process(one_weight(shape, kind, partition), len(partition))
