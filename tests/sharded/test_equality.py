"""What FSDP2 gathers is the unsharded cast, byte for byte, and training follows from it."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

import zerocast
from tests.sharded.sharded import (
    BF16,
    Unsharded,
    adamw,
    bank,
    batch,
    feed,
    gathered,
    train_and_compare,
    train_step,
    whole_masters,
)
from tests.support.claims import assert_same_tensors, stored
from tests.support.models import Bank, SideBySide
from tests.support.ranks import on_gloo, run_ranks
from tests.support.recipes import NOT_SHARDABLE, RECIPES, param
from tests.support.settings import deterministic

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.fixture(autouse=True)
def fresh_memory_is_garbage(monkeypatch):
    """Neither ``torch.empty`` nor what FSDP2 allocates again before a gather gives zeros."""

    def alloc_garbage(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.size() != tensor.nbytes:
            storage.resize_(tensor.nbytes)
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xA5)

    monkeypatch.setattr(_fsdp_param, "alloc_storage", alloc_garbage)
    with deterministic():
        yield


@on_gloo()
@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        param(name, size, slow=size != 3 and name != "nvfp4")
        for name in (*RECIPES, *NOT_SHARDABLE)
        for size in (1, 2, 3, 4)
    ],
)
def test_what_is_gathered_is_the_unsharded_cast(comm, recipe):
    """After each of 4 steps codes, scales, amax, padding and columnwise copies on every rank are
    those of ``quantize(full master)``, in forward and backward: with even, uneven and empty shards,
    cast in the hooks or ahead of them. A copy that is cast from the transposed tensor is not made.
    """
    model = bank(recipe)
    train_and_compare(model, batch(comm), Unsharded(model, recipe), range(4))


def banks() -> SideBySide:
    """A :class:`Bank` for each recipe, of the same values at every call."""
    torch.manual_seed(0)
    return SideBySide(torch.nn.ModuleDict({name: Bank((48, 5)) for name in RECIPES}))


@pytest.mark.slow
def test_equal_gradients_train_equal_weights_on_any_number_of_ranks():
    """With the same gradients fed, masters of every recipe, side by side in one gather, are after
    20 steps of foreach AdamW bit for bit those of plain unsharded tensors, on 1, 2, 3 and 4 ranks,
    with even, uneven and empty shards; and the bytes gathered then are those of one rank.
    """
    plain = dict(banks().named_parameters())
    optimizer = adamw(plain.values())
    for number in range(20):
        feed(plain.values(), number)
        optimizer.step()

    def run(comm):
        model = banks()
        for name, recipe in RECIPES.items():
            zerocast.nn.convert(model.layers[name], recipe, weights="master")
        fully_shard(model, mp_policy=BF16)
        optimizer = adamw(model.parameters())
        for number in range(20):
            train_step(model, optimizer, comm, number, ahead=True)
        when = f"after 20 steps on {comm.size} ranks"
        assert_same_tensors(whole_masters(model), stored(plain), when)
        return stored(gathered(model))

    (one_rank,) = run_ranks("torch_distributed", 1, run)
    for world_size in (2, 3, 4):
        for rank, found in enumerate(run_ranks("torch_distributed", world_size, run)):
            assert_same_tensors(found, one_rank, f"on rank {rank} of {world_size}")
