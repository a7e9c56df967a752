"""A layer whose weight is split over ranks computes what the whole layer does."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zerocast
from tests.support.claims import message_of
from tests.support.ranks import on_gloo
from tests.support.recipes import RECIPES
from tests.tensor_parallel.parallel import K, batch, mesh_of, pair, results, split

CURRENT = RECIPES["current"]


@on_gloo()
@pytest.mark.parametrize(
    ("world_size", "hidden", "sequence"),
    [(2, 256, False), (3, 100, False), (4, 256, False), (2, 256, True), (4, 256, True)],
)
def test_split_layers_compute_what_whole_ones_do(comm, hidden, sequence):
    """Under torch's styles outputs and all gradients are those of the unsplit layers, up to the
    order of sums: biases, splits that are not even and inputs split in time included.
    """
    x, expected = batch(), results(pair(hidden=hidden), batch())
    model = split(pair(CURRENT, hidden=hidden), mesh_of(comm.size), sequence=sequence)
    if sequence:
        x, output, grad = (
            value.chunk(comm.size, 1)[comm.rank]
            for value in (x, expected["output"], expected["input"])
        )
        expected |= {"output": output, "input": grad}
    torch.testing.assert_close(results(model, x), expected, rtol=1e-4, atol=1e-4)


@on_gloo(2)
def test_a_replicated_weight_multiplies_a_split_input(comm):
    """A weight that every rank has whole takes an input split in time as it is: output and input
    gradient are split alike, and the weight's gradient is the sum over ranks.
    """
    torch.manual_seed(0)
    alone, layer, mesh = torch.nn.Linear(K, K), zerocast.nn.Linear(K, K), mesh_of(comm.size)
    for name, value in alone.named_parameters():
        distributed = distribute_tensor(value.detach(), mesh, [Replicate()])
        setattr(layer, name, torch.nn.Parameter(distributed))
    x = distribute_tensor(batch(), mesh, [Shard(1)])
    assert layer(x).placements == (Shard(1),)
    found, expected = results(layer, x), results(alone, batch())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# --- what is refused ---


@on_gloo(2)
def test_weights_that_hold_codes_are_refused_when_split(comm):
    """parallelize_module on a layer with quantized weights raises, on every rank."""
    model = pair(CURRENT, "quantized")
    assert message_of(zerocast.UnsupportedError, split, model, mesh_of(comm.size)) == (
        "up: a weight that holds codes cannot be tensor-parallel, because it was cast whole and an "
        "optimizer would need its master; convert the model with weights='master', or with "
        "'high_precision' and zerocast.autocast, before it is parallelized."
    )


@on_gloo(2)
def test_an_input_that_is_not_distributed_is_refused(comm):
    """A plain input of a layer whose weight was split by hand raises on every rank, and so does one
    of another mesh.
    """
    mesh, other = mesh_of(2), init_device_mesh("cpu", (1, 2))
    layer = zerocast.nn.Linear(K, K, bias=False)
    layer.name = "head"
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]))
    start = (
        "head: the weight is a DTensor on a mesh of shape (2,), so the input must be a DTensor "
        "there, too, got "
    )
    end = "; parallelize the layer by ColwiseParallel or RowwiseParallel, which make it one."
    assert message_of(zerocast.InputError, layer, batch()) == f"{start}a Tensor{end}"
    x = DTensor.from_local(batch(), other, [Replicate(), Replicate()])
    message = message_of(zerocast.InputError, layer, x)
    assert message == f"{start}one on another mesh, of shape (1, 2){end}"


@on_gloo(4)
def test_a_mesh_of_two_dimensions_is_refused(comm):
    """A weight on a mesh of two dimensions, split over one or over both, raises on every rank."""
    mesh = init_device_mesh("cpu", (2, 2))
    layer = zerocast.nn.Linear(K, K, bias=False)
    layer.name, values = "head", layer.weight.detach()
    x = distribute_tensor(batch(), mesh, [Replicate(), Replicate()])
    for other, message in (
        (
            Replicate(),
            "must be Shard(0), Shard(1) or Replicate() over a mesh of one dimension, got "
            "(Shard(dim=0), Replicate()) on a mesh of shape (2, 2); ",
        ),
        (
            Shard(1),
            "must be split by rows or by columns over one dimension of the mesh, Shard(0) or "
            "Shard(1), got (Shard(dim=0), Shard(dim=1)); ",
        ),
    ):
        layer.weight = torch.nn.Parameter(distribute_tensor(values, mesh, [Shard(0), other]))
        assert message_of(zerocast.UnsupportedError, layer, x) == (
            f"head: the weight of a tensor-parallel layer {message}parallelize it by "
            f"ColwiseParallel or RowwiseParallel."
        )


@on_gloo(2)
def test_quantized_outputs_are_refused(comm):
    """fp8_output=True asks a split layer for codes of a part of its output: an error."""
    model = parallelize_module(pair(CURRENT), mesh_of(2), {"up": ColwiseParallel()})
    with zerocast.autocast(recipe=CURRENT):
        message = message_of(zerocast.InputError, model.up, batch(), fp8_output=True)
    assert message == "up: fp8_output=True is for layers that are not tensor-parallel."
