"""Refit from trainers: FSDP2's masters and a ZeroOptimizer's, while they are trained."""

import pytest
import torch

import zerocast
from tests.support.exports import assert_received, pieces_of, update
from tests.support.models import Pair
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_bytes import assert_same_bytes
from zerocast.export import DIALECTS
from zerocast.optim import ZeroOptimizer
from zerocast.refit import Receiver, Refit

NVFP4 = zerocast.NVFP4BlockScaling()


def feed(parameters, step: int, place=lambda whole, like: whole) -> None:
    """Give every parameter a gradient that does not depend on the ranks."""
    for p in parameters:
        generator = torch.Generator().manual_seed(step * 1000 + p.shape[0])
        p.grad = place(torch.randn(p.shape, generator=generator).to(p.dtype), p)


def assert_holds(tensors, masters, dialect, recipe, when: str) -> None:
    """What a server holds is the cast of the whole masters, and the rest in BF16."""
    for name, master in masters.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and master.dim() == 2:
            whole = zerocast.quantize(master, recipe, dtype=torch.bfloat16)
            for stored, tensor in dialect.encode(whole.quantized_storage).items():
                assert_same_bytes(tensors[f"{module}.{stored}"], tensor, f"{when}: {name}")
        else:
            assert_same_bytes(tensors[name], master.bfloat16(), f"{when}: {name}")


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("world_size", [3, 4])
def test_masters_of_fsdp2_feed_a_receiver(world_size):
    """Rows that divide over the ranks or do not, of weights, biases and a norm: after each step the
    deltas make what is held the cast of the new masters, by the recipe of training or another.
    """
    from torch.distributed.fsdp import fully_shard

    from tests.sharded.sharded import BF16, adamw, placed_like, whole

    for dialect, options in (
        (DIALECTS["compressed-tensors/nvfp4"], {}),
        (DIALECTS["deepseek/fp8"], {"from_masters": True}),
    ):

        def run(comm, dialect=dialect, options=options):
            torch.manual_seed(0)
            model = Pair(norm=True, hidden=208)
            zerocast.nn.convert(model, NVFP4, weights="master")
            fully_shard(model, mp_policy=BF16)
            optimizer, receiver = adamw(model.parameters()), Receiver()
            refit = Refit(model, dialect, dtype=torch.bfloat16, bucket_bytes=8000, **options)
            recipe = dialect.recipe if options else NVFP4
            for step in range(3):
                model(torch.ones(2, 64)).sum().backward()
                feed(model.parameters(), step, placed_like)
                optimizer.step()
                optimizer.zero_grad()
                update(refit, receiver)
                masters = {name: whole(p) for name, p in model.named_parameters()}
                assert_holds(receiver.tensors, masters, dialect, recipe, f"step {step}")
            assert pieces_of(refit, assert_received(refit, receiver))

        run_ranks("torch_distributed", world_size, run)


@pytest.mark.parametrize("from_masters", [False, True])
@on_ranks("in_process", 3)
def test_a_zero_optimizer_feeds_a_receiver(comm, from_masters):
    """The bytes that it trains with, or another cast of its masters."""
    dialect = DIALECTS["modelopt/nvfp4"]
    torch.manual_seed(0)
    model = Pair(norm=True, hidden=208).bfloat16()
    zerocast.nn.convert(model, NVFP4)
    optimizer, receiver = ZeroOptimizer(model.named_parameters(), lr=1e-2, group=comm), Receiver()
    refit = Refit(model, dialect, optimizer=optimizer, from_masters=from_masters, bucket_bytes=8000)
    for step in range(3):
        feed(model.parameters(), step)
        optimizer.step()
        update(refit, receiver)
        masters = {name: optimizer.gather_master(p) for name, p in model.named_parameters()}
        recipe = dialect.recipe if from_masters else NVFP4
        assert_holds(receiver.tensors, masters, dialect, recipe, f"step {step}")


def sent(**options) -> Refit:
    """A refit of a model whose second layer stays in high precision."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 32)).bfloat16()
    zerocast.nn.convert(model, zerocast.Float8BlockScaling(), filter_fqns=["1"])
    return Refit(model, "deepseek/fp8", **options)


def test_an_audit_says_what_everything_travels_as():
    """By name; under the names of the checkpoint; and against a server's configuration."""
    refit = sent(names=lambda name: f"model.{name}")
    config = DIALECTS["deepseek/fp8"].quantization_config(["model.1", "lm_head"])
    assert [str(each) for each in refit.audit(config)] == [
        "model.0.weight: Float8BlockScaling (model.0.weight float8_e4m3fn [32, 64], "
        "model.0.weight_scale_inv float32 [1, 1])",
        "model.0.bias: not quantized (model.0.bias bfloat16 [32])",
        "model.1.weight: not quantized (model.1.weight bfloat16 [32, 32])",
        "model.1.bias: not quantized (model.1.bias bfloat16 [32])",
    ]
    stored = [(name, tensor.dtype, tensor.shape) for name, tensor in refit.named_tensors()]
    assert refit.metadata() == stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules_to_not_convert": []}, "expects quantized 1, which travels in high precision"),
        ({"modules_to_not_convert": ["11"]}, "expects quantized 1, which travels"),
        ({"modules_to_not_convert": ["*"]}, "takes as not quantized 0, which is here"),
        ({"modules_to_not_convert": ["re:[01]"]}, "takes as not quantized 0, which is here"),
        ({"weight_block_size": [1, 128]}, r"weight_block_size is \[1, 128\] at the server and"),
        ({"quant_method": "modelopt"}, "quant_method is 'modelopt' at the server and 'fp8' here"),
    ],
)
def test_an_audit_refuses_what_the_server_does_not_expect(change, message):
    """Another format, or a layer that it takes otherwise; part of a name is no match."""
    config = DIALECTS["deepseek/fp8"].quantization_config(["1"])
    assert sent().audit(config)
    with pytest.raises(zerocast.InputError, match=message):
        sent().audit(config | change)
