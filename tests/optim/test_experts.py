"""Experts under ZeroOptimizer: stacks of matrices that hold codes."""

import copy
from dataclasses import replace

import pytest
import torch

import zerocast
from tests.support.claims import assert_unsharded_cast
from tests.support.experts import INCLUDE, KINDS, moe, tokens
from tests.support.fused import cast_as_served
from tests.support.nightly import nightly
from tests.support.ranks import on_ranks
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes
from tests.support.weights import through_a_file
from zerocast.comm import Communicator, RecordingCommunicator, run_in_process
from zerocast.optim import ZeroOptimizer
from zerocast.tensors import QuantizedTensor

NVFP4 = RECIPES["nvfp4"]


def gradient(shape: torch.Size, step: int) -> torch.Tensor:
    """A multiple of 1/64 that BF16 holds: any number of ranks has exactly it as the mean."""
    generator = torch.Generator().manual_seed(step * 1000 + shape.numel())
    return torch.randint(-127, 128, shape, generator=generator).float() / 64


def train(comm: Communicator, plain: torch.nn.Module, steps: int) -> None:
    """What each rank does."""
    model = copy.deepcopy(plain)
    report = zerocast.nn.convert(model, NVFP4, include=INCLUDE, strict=True)
    assert len(report.included) == 5
    comm = RecordingCommunicator(comm)
    sharded = ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-2, group=comm)
    whole = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    if comm.rank == 0:  # the modules' own forward computes with values of codes
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
    for step in range(steps):
        for module in (plain, model):
            for parameter in module.parameters():
                parameter.grad = gradient(parameter.shape, step)
        with comm.label("step"):
            sharded.step()
        whole.step()
    weights = dict(model.named_parameters())
    masters = {name: sharded.gather_master(weight) for name, weight in weights.items()}
    layers = {f"{name}.weight": masters[f"{name}.weight"] for name in report.converted}
    whole_weights = masters | cast_as_served(layers, NVFP4, torch.float32)
    for name, parameter in plain.named_parameters():
        weight, master = weights[name], masters[name]
        assert_same_bytes(master, parameter.detach(), name)
        if name not in report.included:
            assert_unsharded_cast(weight, whole_weights[name], name)
            continue
        matrices = weight.quantized_storage.matrices
        values = master.view(-1, *master.shape[-2:])
        for i, (own, value) in enumerate(zip(matrices, values, strict=True)):
            alone = zerocast.quantize(value, NVFP4, columnwise=False)
            assert_unsharded_cast(QuantizedTensor(own), alone, f"{name}[{i}]")
    zerocast.verify(model, comm)
    gathered = comm.total(kind="all_gather", label="step").payload_bytes
    assert gathered < steps * 0.62 * sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize(
    ("kind", "world_size", "steps"),
    [("gpt-oss", 3, 3), *(nightly(kind, size, 20) for kind in KINDS for size in (1, 2, 3, 4))],
)
def test_experts_of_transformers_train_as_plain_tensors(
    kind: str, world_size: int, steps: int
) -> None:
    """With given gradients masters are after some steps of AdamW bit for bit those of plain
    tensors, codes and scales those of the unsharded cast, each matrix alone; gathers move codes.
    """
    model = moe(kind)  # by this thread, for who draws or imports first is left to no race
    run_in_process(world_size, lambda comm: train(comm, copy.deepcopy(model), steps))


STACKS = {name: replace(RECIPES[name], per_matrix=True) for name in ("delayed", "nvfp4-drawn")}


@pytest.mark.parametrize("recipe", STACKS.values(), ids=STACKS)
@on_ranks("in_process", 2)
def test_the_state_of_each_matrix_is_saved_and_resumed(comm: Communicator, recipe) -> None:
    """Histories of amaxes and counts of draws of every matrix: a resumed optimizer gives the bytes
    of one that went on.
    """

    def fresh() -> tuple[torch.nn.Parameter, ZeroOptimizer]:
        values = torch.randn(3, 17, 32, generator=torch.Generator().manual_seed(0))
        values *= torch.logspace(-2, 2, 3).view(3, 1, 1)
        weight = torch.nn.Parameter(zerocast.quantize(values, recipe, name="experts"))
        return weight, ZeroOptimizer([("experts", weight)], torch.optim.AdamW, lr=0.1, group=comm)

    def step(weight: torch.nn.Parameter, optimizer: ZeroOptimizer, number: int) -> None:
        weight.grad = gradient(weight.shape, number)
        optimizer.step()

    weight, optimizer = fresh()
    for number in range(3):
        step(weight, optimizer, number)
    saved = through_a_file(optimizer.state_dict(), weights_only=False)
    resumed, another = fresh()
    another.load_state_dict(saved)
    for number in range(3, 5):
        step(weight, optimizer, number)
        step(resumed, another, number)
    for name, buffer in weight.quantized_storage.buffers.items():
        assert_same_bytes(resumed.quantized_storage.buffers[name], buffer, name)


@pytest.mark.parametrize(("dim", "per_matrix"), [(0, False), (0, True), (1, False)])
@on_ranks("in_process", 4)
def test_experts_that_tensor_parallelism_splits(
    comm: Communicator, dim: int, per_matrix: bool
) -> None:
    """Whole ones, rows or columns of each, over two ranks, and each part over two more: after steps
    with given gradients the part that a rank has of the whole's cast.
    """
    tensor_parallel, data_parallel = (comm.split(comm.rank // 2), comm.split(comm.rank % 2))
    shape = torch.Size((3, 64, 96))
    lines = {(0, False): 3 * 64, (0, True): 64, (1, False): 96}[dim, per_matrix]
    cuts = (0, {192: 128, 64: 16, 96: 48}[lines], lines)
    start, end = cuts[tensor_parallel.rank : tensor_parallel.rank + 2]
    part = zerocast.TensorParallelShard(
        shape, dim, start, end - start, tensor_parallel, per_matrix=per_matrix
    )
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(zerocast.quantize(part.slice_of(value), NVFP4, tp_shard=part))
    # Masters start from the values of the codes.
    whole = torch.nn.Parameter(zerocast.quantize(value, NVFP4).dequantize())
    sharded = ZeroOptimizer([("experts", weight)], torch.optim.AdamW, lr=1e-2, group=data_parallel)
    plain = torch.optim.AdamW([whole], lr=1e-2)
    for step in range(3):
        whole.grad = gradient(shape, step)
        weight.grad = part.slice_of(whole.grad).contiguous()
        sharded.step()
        plain.step()
    expected = zerocast.quantize(whole.detach(), NVFP4, dtype=weight.dtype)
    assert_unsharded_cast(weight, expected, str(part))
