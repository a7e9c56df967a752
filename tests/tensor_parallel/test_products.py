"""A layer whose weight is split over ranks computes what the whole layer does."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zerocast
from tests.support.claims import message_of
from tests.support.ranks import run_ranks
from tests.support.recipes import RECIPES
from tests.tensor_parallel.parallel import K, batch, mesh_of, pair, split, whole

pytestmark = pytest.mark.mpi(min_size=4)

CURRENT = RECIPES["current"]


def results(model, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    out = model(x)
    (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    return {"output": out.detach(), "input": x.grad.clone(), **gradients}


@pytest.mark.parametrize("sequence", [False, True], ids=["whole input", "split in time"])
@pytest.mark.parametrize(("world_size", "hidden"), [(2, 256), (3, 100), (4, 256)])
def test_split_layers_compute_what_whole_ones_do(world_size, hidden, sequence):
    """Under torch's styles outputs and all gradients are those of the unsplit layers, up to the
    order of sums: biases, splits that are not even and inputs split in time included.
    """
    if sequence and 32 % world_size:
        pytest.skip("time does not divide over the ranks")
    expected = results(pair(hidden=hidden), batch())

    def run(comm):
        model = split(pair(CURRENT, hidden=hidden), mesh_of(comm.size), sequence=sequence)
        x = batch().chunk(comm.size, 1)[comm.rank] if sequence else batch()
        return results(model, x)

    found = run_ranks("torch_distributed", world_size, run)
    for name, value in expected.items():
        by_rank = [values[name] for values in found]
        if sequence and name in ("output", "input"):
            by_rank = [torch.cat(by_rank, 1)]
        for actual in by_rank:
            torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-4)


def test_a_replicated_weight_multiplies_a_split_input():
    """A weight that every rank has whole takes an input split in time as it is: output and input
    gradient are split alike, and the weight's gradient is the sum over ranks.
    """
    layer = torch.nn.Linear(K, K, bias=True)
    values = {name: p.detach().clone() for name, p in layer.named_parameters()}
    expected = results(layer, batch())

    def run(comm):
        mesh = mesh_of(comm.size)
        layer = zerocast.nn.Linear(K, K)
        for name, value in values.items():
            distributed = distribute_tensor(value, mesh, [Replicate()])
            setattr(layer, name, torch.nn.Parameter(distributed))
        x = distribute_tensor(batch(), mesh, [Shard(1)]).requires_grad_()
        out = layer(x)
        assert out.placements == (Shard(1),)
        weights = distribute_tensor(torch.linspace(-1, 1, K), mesh, [Replicate()])
        (out * weights).sum().backward()
        gradients = {name: whole(p.grad) for name, p in layer.named_parameters()}
        return {"output": whole(out), "input": whole(x.grad), **gradients}

    for found in run_ranks("torch_distributed", 2, run):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


# --- what is refused ---


def test_weights_that_hold_codes_are_refused_when_split():
    """parallelize_module on a layer with quantized weights raises, on every rank."""

    def run(comm):
        model = pair(CURRENT, "quantized")
        return message_of(zerocast.UnsupportedError, split, model, mesh_of(comm.size))

    assert run_ranks("torch_distributed", 2, run) == 2 * [
        "up: a weight that holds codes cannot be tensor-parallel, for it was cast whole and an "
        "optimizer would need its master; convert the model with weights='master', or with "
        "'high_precision' and zerocast.autocast, before it is parallelized."
    ]


def test_an_input_that_is_not_distributed_is_refused():
    """A plain input of a layer whose weight was split by hand raises on every rank, and so does one
    of another mesh.
    """

    def run(comm):
        mesh, other = mesh_of(2), init_device_mesh("cpu", (1, 2))
        layer = zerocast.nn.Linear(K, K, bias=False)
        layer.name = "head"
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]))
        plain = message_of(zerocast.InputError, layer, batch())
        x = DTensor.from_local(batch(), other, [Replicate(), Replicate()])
        return plain, message_of(zerocast.InputError, layer, x)

    start = (
        "head: the weight is a DTensor on a mesh of shape (2,), so the input must be a DTensor "
        "there, too, got "
    )
    end = "; parallelize the layer by ColwiseParallel or RowwiseParallel, which make it one."
    for plain, elsewhere in run_ranks("torch_distributed", 2, run):
        assert plain == f"{start}a Tensor{end}"
        assert elsewhere == f"{start}one on another mesh, of shape (1, 2){end}"


def test_a_mesh_of_two_dimensions_is_refused():
    """A weight on a mesh of two dimensions, split over one or over both, raises on every rank."""

    def run(comm):
        mesh = init_device_mesh("cpu", (2, 2))
        layer = zerocast.nn.Linear(K, K, bias=False)
        layer.name, values = "head", layer.weight.detach()
        x = distribute_tensor(batch(), mesh, [Replicate(), Replicate()])
        messages = []
        for other in (Replicate(), Shard(1)):
            weight = distribute_tensor(values, mesh, [Shard(0), other])
            layer.weight = torch.nn.Parameter(weight)
            messages.append(message_of(zerocast.UnsupportedError, layer, x))
        return messages

    for once, twice in run_ranks("torch_distributed", 4, run):
        assert once == (
            "head: the weight of a tensor-parallel layer must be Shard(0), Shard(1) or Replicate() "
            "over a mesh of one dimension, got (Shard(dim=0), Replicate()) on a mesh of shape "
            "(2, 2); parallelize it by ColwiseParallel or RowwiseParallel."
        )
        assert twice == (
            "head: the weight of a tensor-parallel layer must be split by rows or by columns over "
            "one dimension of the mesh, Shard(0) or Shard(1), got (Shard(dim=0), Shard(dim=1)); "
            "parallelize it by ColwiseParallel or RowwiseParallel."
        )


def test_quantized_outputs_are_refused():
    """fp8_output=True asks a split layer for codes of a part of its output: an error."""

    def run(comm):
        model = parallelize_module(pair(CURRENT), mesh_of(2), {"up": ColwiseParallel()})
        with zerocast.autocast(recipe=CURRENT):
            return message_of(zerocast.InputError, model.up, batch(), fp8_output=True)

    assert run_ranks("torch_distributed", 2, run) == 2 * [
        "up: fp8_output=True is for layers that are not tensor-parallel."
    ]
