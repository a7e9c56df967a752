"""Masters whose weights have several recipes, gathered by FSDP2: each in the codes of its own."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.sharded.sharded import BF16, adamw, gathered, reshard, whole_masters
from tests.support.claims import assert_same_tensors, assert_unsharded_cast
from tests.support.experts import MIXED, mixed_moe, own_casts, tokens
from tests.support.nightly import nightly
from tests.support.ranks import on_gloo, run_ranks, shared_folder
from tests.support.same_bytes import assert_same_bytes
from zerocast.tensors import QuantizedTensor

pytestmark = pytest.mark.mpi(min_size=4)


def sharded(recipes: str, *, seed: int = 0):
    """The model, gathered block by block; and the report of its conversion."""
    model = mixed_moe(seed=seed)
    report = zerocast.nn.convert(model, MIXED[recipes], weights="master", strict=True)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=BF16)
    return fully_shard(model, mp_policy=BF16), report


def train(model, optimizer, number: int) -> None:
    """A step with the gradients of the model's own backward."""
    model(input_ids=tokens(number), labels=tokens(number)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    zerocast.sharded.precompute_scales_for_fsdp(model)


def assert_own_casts(model, report) -> None:
    """What is gathered are the casts of the whole masters, or their values where a module works
    with values. Collective.
    """
    masters = whole_masters(model)
    expected, weights = own_casts(masters, report, torch.bfloat16), gathered(model)
    for name, weight in weights.items():
        if name not in expected:
            assert_same_bytes(weight.detach(), masters[name].bfloat16(), name)
        elif isinstance(weight, QuantizedTensor):
            assert_unsharded_cast(weight, expected[name], name)
        else:
            assert_same_bytes(weight.detach(), expected[name].dequantize(), name)
    reshard(model)


@on_gloo()
@pytest.mark.parametrize("recipes", MIXED)
@pytest.mark.parametrize("world_size", [3, *(nightly(size) for size in (1, 2, 4))])
def test_every_weight_is_gathered_in_the_codes_of_its_own_recipe(comm, recipes):
    """Cast alone and ahead of the gathers, before and after steps."""
    model, report = sharded(recipes)
    optimizer = adamw(model.parameters())
    assert_own_casts(model, report)
    for number in range(2):
        train(model, optimizer, number)
    assert_own_casts(model, report)


def test_masters_go_on_from_a_checkpoint():
    """Of three ranks, on two."""

    def first(comm):
        model, _ = sharded("experts")
        optimizer = adamw(model.parameters())
        train(model, optimizer, 0)
        path = shared_folder(comm) / "saved"
        zerocast.checkpoint.save(path, optimizer, model=model)
        return path, whole_masters(model)

    path, masters = run_ranks("torch_distributed", 3, first)[0]

    def second(comm):
        model, report = sharded("experts", seed=1)
        zerocast.checkpoint.load(path, adamw(model.parameters()), model=model)
        assert_same_tensors(whole_masters(model), masters, "loaded")
        assert_own_casts(model, report)

    run_ranks("torch_distributed", 2, second)
