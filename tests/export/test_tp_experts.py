"""Exports of experts [E, M, K] that tensor parallelism splits: whole matrices, rows or columns of
each; the encoded cast of every whole matrix, whoever had what of it.
"""

import random
from typing import Any

import pytest
import torch

import zerocast
from tests.refit.planned import masters
from tests.support.claims import assert_same_tensors, message_of
from tests.support.exports import tensors_of, update
from tests.support.partitions import draw_partition
from zerocast import TensorParallelShard
from zerocast.comm import Communicator, run_in_process
from zerocast.export import DIALECTS, Export
from zerocast.export.dialects import EXPERTS as EXPERTS_IN_CODES
from zerocast.export.dialects import Dialect
from zerocast.layout import Extent
from zerocast.refit import Receiver, Refit

EXPERTS, INNER, OUTER = 3, 256, 384
"""gate_up is [3, 512, 384], down [3, 384, 256]: blocks of 128 end between gate and up."""

PARTS = ("matrices", "rows", "columns")
OF_EXPERTS = [
    name
    for name, each in DIALECTS.items()
    if EXPERTS_IN_CODES in each.reads and not each.input_scale
]
SHAPES = {
    "experts.gate_up_proj": (EXPERTS, 2 * INNER, OUTER),
    "experts.down_proj": (EXPERTS, OUTER, INNER),
}


def unit(recipe: zerocast.recipes.Recipe, dim: int) -> int:
    """Rows, or columns, that no cut may divide under the recipe, of rows alone."""
    block = recipe.planes((1024, 1024), columnwise=False)[0].block[dim]
    return block or 1


def draw_part(
    shape: tuple[int, ...], part: str, step: int, comm: Communicator, rng: random.Random
) -> TensorParallelShard:
    """This rank's part; cut at multiples of ``step`` rows or columns, some parts empty."""
    lines = {"matrices": shape[0] * shape[1], "rows": shape[1], "columns": shape[2]}[part]
    step = shape[1] if part == "matrices" else step
    inner = sorted(rng.randrange(0, lines + step, step) for _ in range(comm.size - 1))
    cuts = [0, *(min(cut, lines) for cut in inner), lines]
    start, end = cuts[comm.rank : comm.rank + 2]
    dim = int(part == "columns")
    return TensorParallelShard(
        torch.Size(shape), dim, start, end - start, comm, per_matrix=part == "rows"
    )


def plan_of(
    comm: Any,
    size: int,
    part: str,
    values: dict[str, torch.Tensor],
    recipe: Any,
    step: int,
    seed: int,
) -> zerocast.CastPlan:
    """Parts over ``size`` ranks each, every one of them sharded over the others at any even
    element.
    """
    tensor_parallel, data_parallel = comm.split(comm.rank // size), comm.split(comm.rank % size)
    weights, shards, starts = [], [], []
    for name, value in values.items():
        tp_shard = draw_part(
            value.shape, part, step, tensor_parallel, random.Random(f"{name}{seed}")
        )
        weights.append(
            zerocast.empty(
                tp_shard.shape, recipe, dtype=torch.bfloat16, tp_shard=tp_shard, columnwise=False
            )
        )
        mine = tp_shard.slice_of(value).contiguous().view(-1)
        extents = [Extent(0, 0)] * data_parallel.size
        if mine.numel():
            rng = random.Random(f"{name}{seed} {tensor_parallel.rank}")
            halves = draw_partition(mine.numel() // 2, data_parallel.size, rng)
            extents = [Extent(2 * each.start, 2 * each.end) for each in halves]
        extent = extents[data_parallel.rank]
        shards.append(mine[extent.start : extent.end])
        starts.append(extent.start)
    return zerocast.CastPlan(weights, shards, starts, data_parallel, names=list(values))


def expected(
    dialect: Dialect, values: dict[str, torch.Tensor], recipe: Any = None
) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint, from ``quantize`` of whole matrices. Of the bytes of training
    a projection has the rows of the matrix's cast.
    """
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if dialect.fuses_experts:
            whole = zerocast.quantize(value, recipe or dialect.recipe, dtype=torch.bfloat16)
            encoded = dialect.encode(whole.quantized_storage)
            found |= {f"{name}{part}": tensor for part, tensor in encoded.items()}
            continue
        gate_up = name.endswith("gate_up_proj")
        projections = ["gate_proj", "up_proj"] if gate_up else ["down_proj"]
        for e, matrix in enumerate(value):
            for i, projection in enumerate(projections):
                rows, own = matrix.chunk(len(projections))[i], recipe or dialect.recipe
                cast = zerocast.quantize(rows, own, dtype=torch.bfloat16)
                if gate_up and own.scales_tensor:  # which gate and up share
                    cast = _under_amax(matrix, own, i)
                for part, tensor in dialect.encode(cast.quantized_storage).items():
                    found[f"experts.{e}.{projection}.{part}"] = tensor
    return found


def _under_amax(matrix: torch.Tensor, recipe: Any, i: int) -> zerocast.QuantizedTensor:
    """The projection ``i`` of two, cast under the amax of both."""
    weights = [
        zerocast.empty(rows.shape, recipe, dtype=torch.bfloat16, columnwise=False)
        for rows in matrix.chunk(2)
    ]
    zerocast.CastPlan(
        weights, list(matrix.chunk(2)), [0, 0], zerocast.comm.SingleRank(), names=["0", "1"],
        amax_groups=[["0", "1"]],
    ).cast()  # fmt: skip
    return weights[i]


SQUARE = {"enable_2d_quantization": True}
CASTS = [
    *((name, None) for name in OF_EXPERTS),
    ("compressed-tensors/nvfp4", zerocast.NVFP4BlockScaling()),
    ("deepseek/fp8", zerocast.Float8BlockScaling()),
    ("modelopt/mxfp8", zerocast.MXFP8BlockScaling(**SQUARE)),
    ("gpt-oss/mxfp4", zerocast.MXFP4BlockScaling(**SQUARE)),
]
"""A dialect, and the recipe whose bytes of training it holds: what a cast gathered. Without one
masters are cast.
"""


def step_of(recipe: zerocast.recipes.Recipe, part: str) -> int:
    """Rows or columns that no cut may divide: whole blocks, and whole bytes."""
    return 1 if part == "matrices" else max(unit(recipe, int(part == "columns")), 2)


@pytest.mark.parametrize(
    ("name", "trained", "part", "size"),
    [
        (*cast, part, 2 + (i + j) % 2)
        for i, cast in enumerate(CASTS)
        for j, part in enumerate(PARTS)
    ],
    ids=str,
)
def test_parts_over_drawn_ranks_are_exported_whole(name, trained, part, size):
    """Over 2 or 3 ranks of tensor parallelism, each part over 2 more: buckets on all ranks."""
    dialect, values = DIALECTS[name].of("experts.down_proj"), masters(0, SHAPES)
    step, wanted = step_of(trained or dialect.recipe, part), expected(dialect, values, trained)

    def run(comm):
        plan = plan_of(comm, size, part, values, trained or "current", step, size)
        options = {"from_masters": True, "dtype": torch.bfloat16}
        if trained is not None:
            options = {}
            plan.cast()
            plan.all_gather()
        found = tensors_of(plan, name, group=comm, bucket_bytes=200_000, **options)
        assert_same_tensors(found, wanted, f"rank {comm.rank}")

    run_in_process(2 * size, run)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["deepseek/fp8", "modelopt/nvfp4", "gpt-oss/mxfp4"])
def test_deltas_of_parts_make_up_the_whole(name, part):
    """Two versions; shards of a range of the whole are refused by name."""
    values = masters(2, SHAPES)
    dialect = DIALECTS[name].of("experts.down_proj")
    step = step_of(dialect.recipe, part)
    changed = {key: value.clone() for key, value in values.items()}
    for value in changed.values():
        value[:, ::7] *= 1.25
    versions = [expected(dialect, each) for each in (values, changed)]

    def run(comm):
        plan = plan_of(comm, 2, part, values, "current", step, 0)
        refit = Refit(plan, name, from_masters=True, dtype=torch.bfloat16, group=comm)
        receiver = Receiver()
        for wanted in versions:
            update(refit, receiver)
            assert_same_tensors(receiver.tensors, wanted, f"rank {comm.rank}")
            plan.bind(plan_of(comm, 2, part, changed, "current", step, 0)._prepared.bound)
        message = message_of(zerocast.UnsupportedError, lambda: list(refit.shards()))
        assert "is split by tensor parallelism" in message

    run_in_process(4, run)


def test_rows_inside_a_block_of_an_expert_are_refused():
    """By the name of the expert and its projection."""

    def run(comm):
        plan = plan_of(
            comm, 2, "rows", {"experts.gate_up_proj": torch.ones(2, 256, 128)}, "current", 32, 4
        )
        return message_of(
            zerocast.InputError, Export, plan, "deepseek/fp8", from_masters=True,
            dtype=torch.bfloat16, group=comm,
        )  # fmt: skip

    for message in run_in_process(2, run):
        assert "experts.0.gate_proj.weight: a shard of a weight under Float8BlockScaling" in message
