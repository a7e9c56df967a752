"""verify: ranks that hold different bytes are told so, on every rank, with the likely cause."""

from typing import Any

import pytest
import torch

import zerocast
from tests.sharded.sharded import bank, gathered
from tests.support.claims import message_of
from tests.support.ranks import on_ranks, run_ranks
from tests.support.recipes import RECIPES
from tests.support.tp_shards import tp_shard_of
from tests.support.values import draw_values
from zerocast.comm import Communicator, RecordingCommunicator, as_communicator
from zerocast.errors import InputError, RankMismatchError

SHAPE = torch.Size((40, 96))
NUMEL = SHAPE.numel()
NVFP4 = RECIPES["nvfp4"]


def refusal(*args: Any, kind: type[Exception] = RankMismatchError) -> str:
    """What ``verify`` is refused with."""
    return message_of(kind, zerocast.verify, *args)


def planned(comm: Communicator, recipe: Any) -> tuple[zerocast.CastPlan, list[torch.Tensor]]:
    """A plan over two weights, and the weights. The last rank owns nothing, where there is
    another.
    """
    owners = max(comm.size - 1, 1)
    cuts = [NUMEL * min(r, owners) // owners for r in range(comm.size + 1)]
    start, end = cuts[comm.rank], cuts[comm.rank + 1]
    weights: list[torch.Tensor] = [zerocast.empty(SHAPE, recipe, name=n) for n in "ab"]
    masters = [draw_values("normal", NUMEL, i)[start:end] for i in range(2)]
    return zerocast.CastPlan(weights, masters, [start] * 2, comm, names=["a", "b"]), weights


def test_a_forgotten_all_gather_is_found(ranks: Any) -> None:
    """Under every recipe: after a gather all ranks hold the same bytes; after a cast without one,
    or with derived copies made too early, ``verify`` raises on every rank and names weights, codes
    and the cause.
    """

    def on_rank(comm: Communicator, recipe: Any) -> None:
        plan, weights = planned(comm, recipe)
        named = list(zip("ab", weights, strict=True))
        plan.cast()
        if comm.size > 1:
            for done in (lambda: None, plan.post_all_gather_processing):
                done()
                message = refusal(named, comm)
                assert "a: rowwise_data (" in message
                assert "; b: " in message
                assert "the all-gather of the codes was left out, or ran before" in message
        plan.all_gather()
        zerocast.verify(weights, comm)
        zerocast.verify(weights[0], comm)
        zerocast.verify(iter(named), comm)

    ranks.run(lambda comm: [on_rank(comm, recipe) for recipe in RECIPES.values()])


def test_it_costs_one_all_reduce(comm_kind: str) -> None:
    """However many weights there are, the ranks exchange 40 bytes."""

    def on_rank(comm: Communicator) -> None:
        weights = [torch.ones(3), *(zerocast.empty(SHAPE, r) for r in RECIPES.values())]
        recording = RecordingCommunicator(comm)
        zerocast.verify(weights, recording)
        total = recording.total()
        assert (total.calls, recording.total(kind="all_reduce").calls) == (1, 1)

    run_ranks(comm_kind, 2, on_rank)


def test_the_ranks_that_differ_are_named(comm_kind: str) -> None:
    """A byte that one rank wrote is found in every kind of buffer and in plain weights, and the
    message says which rank holds it.
    """
    recipe = RECIPES["delayed"]

    def on_rank(comm: Communicator) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(96, 40, bias=False), torch.nn.LayerNorm(40))
        model[0].weight = torch.nn.Parameter(zerocast.empty(SHAPE, recipe))
        zerocast.verify(model, comm)
        storage = model[0].weight.quantized_storage
        for field, buffer in (*storage.buffers.items(), ("values", model[1].bias.data)):
            before = buffer.clone()
            if comm.rank == 1:
                buffer.view(-1)[-1] += 1
            message = refusal(model, comm)
            name = "1.bias" if field == "values" else "0.weight"
            assert f"these differ: {name}: {field} (ranks 0, 2 against rank 1). " in message
            cause = "all-gather" if field.endswith("wise_data") else "More than codes differs"
            assert cause in message
            buffer.copy_(before)
        zerocast.verify(model, comm)

    run_ranks(comm_kind, 3, on_rank)


def test_ranks_with_other_weights_are_told_apart(comm_kind: str) -> None:
    """Another number of weights, another order, dtype, recipe or name is an error on every rank
    that says which ranks hold what; so is something that is no weight, on one rank.
    """
    plain, nvfp4 = torch.zeros(4), zerocast.empty(SHAPE, NVFP4)
    given = {
        "weight 1 of 2 on rank 0 is weights[1]": ([plain, nvfp4], [plain]),
        "and weight 0 of 0 on rank 1 is nothing.": ([plain], []),
        "(40, 96) torch.bfloat16 NVFP4": ([plain, nvfp4], [nvfp4, plain]),
        "torch.float64": ([plain], [plain.double()]),
        "of 1 on rank 1 is w, (4,)": ([("v", plain)], [("w", plain)]),
    }

    def on_rank(comm: Communicator) -> None:
        for text, weights in given.items():
            message = refusal(weights[comm.rank], comm)
            assert text in message
            assert "Give the same weights in the same order" in message
        for bad in (3.0, "name", [plain, 3], [("w", None)], plain.to_sparse(), plain.to("meta")):
            weights = bad if comm.rank else plain
            message = refusal(weights, comm, kind=InputError)
            assert "on rank 1: verify takes" in message

    run_ranks(comm_kind, 2, on_rank)


@on_ranks("in_process", 2)
def test_a_copy_that_one_rank_alone_rebuilt_is_found(comm: Communicator) -> None:
    """Stale copies are equal to stale copies and to nothing else."""
    plan, weights = planned(comm, NVFP4)
    plan.cast()
    plan.all_gather()
    plan.cast()  # the same codes once more
    zerocast.verify(weights, comm)
    if comm.rank == 0:
        plan.post_all_gather_processing()
    message = refusal(weights, comm)
    assert "columnwise_data (rank 0 against rank 1)" in message
    assert "post_all_gather_processing" in message


@on_ranks("in_process", 2)
def test_the_optimizer_leaves_equal_weights(comm: Communicator) -> None:
    """After a step of ``ZeroOptimizer`` all weights of a model, quantized and plain, are equal,
    gathers that are under way included; after a write on one rank they are not.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 40), torch.nn.LayerNorm(40)).bfloat16()
    zerocast.nn.convert(model, NVFP4)
    optimizer = zerocast.optim.ZeroOptimizer(
        model.named_parameters(), group=comm, overlap_all_gather=True
    )
    model(torch.ones(2, 96).bfloat16()).float().square().sum().backward()
    optimizer.step()
    zerocast.verify(model, comm)
    if comm.rank:
        model[1].weight.data[3] = 7
    assert "1.weight: values (rank 0 against rank 1)" in refusal(model, comm)


@on_ranks("in_process", 4)
def test_parts_are_compared_over_the_data_parallel_group(comm: Communicator) -> None:
    """Ranks that hold the same part of a weight compare it; over the tensor-parallel group there is
    nothing to compare, and the message says which group to give.
    """
    whole = zerocast.quantize(draw_values("normal", 64 * 96, 1).view(64, 96), NVFP4)
    tensor_parallel = comm.split(comm.rank // 2)
    data_parallel = comm.split(comm.rank % 2)
    tp_shard = zerocast.TensorParallelShard.chunk((64, 96), 0, tensor_parallel)
    weight = zerocast.empty((32, 96), NVFP4, tp_shard=tp_shard)
    for name, buffer in tp_shard_of(whole, tp_shard).items():
        weight.quantized_storage.buffers[name].copy_(buffer)
    zerocast.verify(weight, data_parallel)
    assert "give the data-parallel group" in refusal(weight, tensor_parallel)


@pytest.mark.mpi(min_size=4)
@on_ranks("torch_distributed", 2)
def test_gathered_codes_of_fsdp2_are_compared(comm: Communicator) -> None:
    """Sharded masters are refused, because each rank holds other rows, with what to do; unsharded
    codes that differ are found.
    """
    model = bank(NVFP4, rows=(48, 130))
    message = refusal(model)
    assert "on rank 0 is layers.0.weight, (24, 96) torch.float32 at [0]" in message
    assert "call module.unshard()" in message
    weight = gathered(model)["layers.1.weight"]
    zerocast.verify(model, as_communicator(None))
    if comm.rank == 0:
        weight.quantized_storage.buffers["rowwise_data"][-1, -1] ^= 1
    message = refusal(model)
    assert "layers.1.weight: rowwise_data (rank 0 against rank 1)" in message
