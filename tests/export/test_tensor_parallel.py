"""Exports and refits of weights that tensor parallelism splits, alone and under FSDP2: the files of
the whole model on one rank.
"""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import zerocast
from tests.sharded.sharded import adamw, feed, whole_masters
from tests.support.claims import message_of
from tests.support.exports import contents, update
from tests.support.ranks import on_gloo, run_ranks, shared_folder
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes
from tests.tensor_parallel.parallel import pair
from tests.tensor_parallel.test_masters import input_of, parallel, shard
from zerocast.export import DIALECTS, Export, save_pretrained
from zerocast.refit import Receiver, Refit
from zerocast.tensors import TensorParallelShard

NVFP4 = RECIPES["nvfp4"]
MESHES = pytest.mark.parametrize(("world_size", "tp"), [(2, 2), (4, 2)])
NAMES = ("compressed-tensors/nvfp4", "compressed-tensors/fp8-tensor", "modelopt/fp8-channel",
         "deepseek/fp8", "modelopt/mxfp8", "deepseek/v4-mxfp4")  # fmt: skip


def assert_encoded(tensors, masters, dialect, recipe, when: str) -> None:
    """The cast of each whole matrix as the dialect stores it, and everything else in BF16."""
    for name, master in masters.items():
        if master.dim() < 2:
            assert_same_bytes(tensors[name], master.bfloat16(), f"{when}: {name}")
            continue
        storage = zerocast.quantize(master, recipe, dtype=torch.bfloat16).quantized_storage
        for part, tensor in dialect.encode(storage).items():
            stored = name.removesuffix("weight") + part if part[0] != "_" else name + part
            assert_same_bytes(tensors[stored], tensor, f"{when}: {stored}")


@on_gloo()
@MESHES
@pytest.mark.parametrize("is_converted", [True, False])
def test_files_are_those_of_the_whole_model_on_one_rank(comm, tp, is_converted):
    """In a dialect of each kind of blocks, of converted layers and of plain ones: rows of one
    weight, columns of the other, biases split or not.
    """
    recipe, folder = NVFP4 if is_converted else None, shared_folder(comm)
    model = shard(pair(recipe, "master"), tp)
    options = {"include": [] if is_converted else ["up", "down"], "bucket_bytes": 1_000}
    for number, name in enumerate(NAMES):
        split, alone = folder / f"split{number}", folder / f"alone{number}"
        common = {"dialect": name, "dtype": torch.bfloat16}
        save_pretrained(model, split, from_masters=is_converted, **common, **options)
        if comm.rank == 0:
            own = {"include": ["up", "down"], "bucket_bytes": 1_000}
            save_pretrained(pair(), alone, group=zerocast.comm.SingleRank(), **common, **own)
            assert len(contents(alone)) > 2
            assert contents(split) == contents(alone), name
    comm.barrier()


@on_gloo()
@MESHES
@pytest.mark.parametrize("hidden", [160, 256])
def test_trained_bytes_and_deltas_are_those_of_the_whole(comm, tp, hidden):
    """NVFP4 in 16x16 blocks as trained, also where FSDP2 cuts the blocks of a part: after each of
    three steps whole tensors, and what deltas make of the ones before.
    """
    dialect = DIALECTS["compressed-tensors/nvfp4"]
    model = shard(pair(NVFP4, "master", hidden=hidden), tp)
    optimizer, receiver = adamw(model.parameters()), Receiver()
    refit = Refit(model, dialect, dtype=torch.bfloat16, bucket_bytes=10_000)
    for step in range(3):
        model(input_of(comm, tp)).square().mean().backward()
        feed(model.parameters(), step)
        optimizer.step()
        optimizer.zero_grad()
        masters = whole_masters(model)
        assert_encoded(dict(refit.named_tensors()), masters, dialect, NVFP4, f"step {step}")
        update(refit, receiver)
        assert_encoded(receiver.tensors, masters, dialect, NVFP4, f"delta {step}")
        assert [each.name for each in refit.audit()] == list(masters)
    message = message_of(zerocast.UnsupportedError, lambda: list(refit.shards()))
    assert f"up.weight is split by tensor parallelism, rows [0, {hidden // 2})" in message


@on_gloo(4)
def test_weights_that_share_an_amax_share_it_over_all_parts(comm):
    """Rows of one and columns of the other, of other magnitudes in every part."""
    model = parallel(NVFP4, 2)
    with torch.no_grad():
        model.down.weight.mul_(3)
    options = {"dtype": torch.bfloat16, "amax_groups": [["up.weight", "down.weight"]]}
    (tensors,) = Export(model, "modelopt/nvfp4", from_masters=True, **options).buckets()
    largest = max(master.bfloat16().abs().max() for master in whole_masters(model).values())
    for name in ("up", "down"):
        assert tensors[f"{name}.weight_scale_2"] == largest.float() / 2688


@on_gloo(2)
def test_plain_weights_that_fsdp2_splits_by_columns(comm):
    """Are parts, too, and exported whole."""
    model = pair()
    fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    dialect, include = DIALECTS["modelopt/nvfp4"], ["up", "down"]
    (tensors,) = Export(model, dialect, include=include, dtype=torch.bfloat16).buckets()
    assert_encoded(tensors, whole_masters(model), dialect, dialect.recipe, f"rank {comm.rank}")


@on_gloo(4)
def test_parts_that_a_dialect_cannot_cast_are_refused_by_name(comm):
    """64 rows a rank, where blocks have 128."""
    model = parallel(NVFP4, 4)
    message = message_of(
        zerocast.InputError, Export, model, "deepseek/fp8", from_masters=True, dtype=torch.bfloat16
    )
    expected = "up.weight: a shard of a weight under Float8BlockScaling must begin and end between"
    assert expected in message


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("from_masters", [True, False])
def test_parts_that_a_plan_casts_are_exported_whole(dim, from_masters):
    """Of a weight over 3 ranks, unequal rows or columns each: the encoded cast of the whole."""
    torch.manual_seed(0)
    master, dialect = torch.randn(80, 96), DIALECTS["modelopt/nvfp4"]

    def run(comm):
        starts = (0, 16, 48, master.shape[dim])
        start, size = starts[comm.rank], starts[comm.rank + 1] - starts[comm.rank]
        part = TensorParallelShard(master.shape, dim, start, size, comm)
        own = part.slice_of(master).contiguous()
        weight = zerocast.empty(part.shape, NVFP4, dtype=torch.bfloat16, tp_shard=part)
        group = zerocast.comm.SingleRank()
        plan = zerocast.CastPlan([weight], [own], [0], group, names=["a.weight"])
        plan.cast()
        (tensors,) = Export(plan, dialect, from_masters=from_masters, group=comm).buckets()
        recipe = dialect.recipe if from_masters else NVFP4
        assert_encoded(tensors, {"a.weight": master}, dialect, recipe, f"rank {comm.rank}")

    run_ranks("in_process", 3, run)
