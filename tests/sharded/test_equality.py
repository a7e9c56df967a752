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
    reshard,
    whole_masters,
)
from tests.support.models import Bank, SideBySide
from tests.support.ranks import run_ranks
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes

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
    torch.use_deterministic_algorithms(True)  # which lets torch.empty be filled with NaN or 255
    yield
    torch.use_deterministic_algorithms(False)


def assert_is_unsharded_cast(model: torch.nn.Module, whole: Unsharded, when: str) -> None:
    """Every gathered weight has the bytes of the unsharded one, in every buffer that a layer
    reads.
    """
    for name, weight in gathered(model).items():
        expected = whole.weights[name].quantized_storage.buffers
        state = set(weight.recipe.state)
        assert set(weight.quantized_storage.buffers) == set(expected) - state
        for buffer, actual in weight.quantized_storage.buffers.items():
            assert_same_bytes(actual, expected[buffer], f"{when}, {name}.{buffer}")
    reshard(model)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(size, marks=[] if size == 3 else pytest.mark.slow) for size in (1, 2, 3, 4)],
)
def test_what_is_gathered_is_the_unsharded_cast(world_size, recipe):
    """After each of 4 steps codes, scales, amax, padding and columnwise copies on every rank are
    those of ``quantize(full master)``, in forward and backward: with even, uneven and empty shards,
    cast in the hooks or ahead of them.
    """

    def run(comm):
        model = bank(RECIPES[recipe])
        optimizer = adamw(model.parameters())
        whole = Unsharded(model, RECIPES[recipe])
        for step in range(4):
            whole.cast(whole_masters(model))
            loss = model(batch(comm))
            assert_is_unsharded_cast(model, whole, f"forward of step {step}")
            loss.backward()
            assert_is_unsharded_cast(model, whole, f"backward of step {step}")
            feed(model.parameters(), step)
            optimizer.step()
            optimizer.zero_grad()
            if step in (1, 2):
                zerocast.sharded.precompute_scales_for_fsdp(model)

    run_ranks("torch_distributed", world_size, run)


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
    for step in range(20):
        feed(plain.values(), step)
        optimizer.step()

    def run(comm):
        model = banks()
        for name, recipe in RECIPES.items():
            zerocast.nn.convert(model.layers[name], recipe, weights="master")
        fully_shard(model, mp_policy=BF16)
        optimizer = adamw(model.parameters())
        for step in range(20):
            model(batch(comm)).backward()
            feed(model.parameters(), step)
            optimizer.step()
            optimizer.zero_grad()
            zerocast.sharded.precompute_scales_for_fsdp(model)
        for name, master in whole_masters(model).items():
            assert_same_bytes(master, plain[name], f"{name} after 20 steps on {comm.size} ranks")
        return {
            f"{name}.{buffer}": tensor
            for name, weight in gathered(model).items()
            for buffer, tensor in weight.quantized_storage.buffers.items()
        }

    (one_rank,) = run_ranks("torch_distributed", 1, run)
    for world_size in (2, 3, 4):
        for rank, found in enumerate(run_ranks("torch_distributed", world_size, run)):
            assert found.keys() == one_rank.keys()
            for name, expected in one_rank.items():
                assert_same_bytes(found[name], expected, f"{name} on rank {rank} of {world_size}")
