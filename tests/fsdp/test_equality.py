"""What FSDP2 gathers is the unsharded cast, byte for byte, and training follows from it."""

import pytest
import torch

import zerocast
from tests.fsdp.sharded import (
    RECIPES,
    Bank,
    Unsharded,
    adamw,
    bank,
    batch,
    feed,
    gathered,
    reshard,
    whole_masters,
)
from tests.support.ranks import run_ranks
from tests.support.same_bytes import assert_same_bytes

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.slow]


def assert_is_unsharded_cast(model: torch.nn.Module, whole: Unsharded, when: str) -> None:
    """Every gathered weight has the bytes of the unsharded one, in every buffer that a layer
    reads.
    """
    for name, weight in gathered(model).items():
        expected = whole.weights[name].storage.buffers
        state = set(weight.recipe.state)
        assert set(weight.storage.buffers) == set(expected) - state
        for buffer, actual in weight.storage.buffers.items():
            assert_same_bytes(actual, expected[buffer], f"{when}, {name}.{buffer}")
    reshard(model)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
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
                zerocast.fsdp.precompute_scales_for_fsdp(model)

    run_ranks("torch_distributed", world_size, run)


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed"])
def test_equal_gradients_train_equal_weights_on_any_number_of_ranks(recipe):
    """With the same gradients fed, masters after 20 steps of foreach AdamW are bit for bit those of
    plain unsharded tensors, on 1, 2, 3 and 4 ranks, and so are the codes made of them.
    """
    torch.manual_seed(0)
    plain = dict(Bank().named_parameters())
    optimizer = adamw(plain.values())
    for step in range(20):
        feed(plain.values(), step)
        optimizer.step()

    def run(comm):
        model = bank(RECIPES[recipe])
        optimizer = adamw(model.parameters())
        for step in range(20):
            model(batch(comm)).backward()
            feed(model.parameters(), step)
            optimizer.step()
            optimizer.zero_grad()
            zerocast.fsdp.precompute_scales_for_fsdp(model)
        masters = whole_masters(model)
        return masters, {name: w.dequantize() for name, w in gathered(model).items()}

    codes = None
    for world_size in (1, 2, 3, 4):
        for masters, values in run_ranks("torch_distributed", world_size, run):
            for name, expected in plain.items():
                what = f"{name} after 20 steps on {world_size} ranks"
                assert_same_bytes(masters[name], expected, what)
                codes = codes or values
                assert_same_bytes(values[name], codes[name], f"decoded {what}")
