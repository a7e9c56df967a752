"""Two layers one after the other, on one rank or split over several."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import zerocast
from tests.sharded.sharded import gradients, whole
from tests.support.models import Pair

K, HIDDEN = 64, 256


def pair(recipe=None, weights="high_precision", *, seed=0, **options) -> Pair:
    """The same values on every rank; converted where there is a recipe."""
    torch.manual_seed(seed)
    model = Pair(**options)
    if recipe is not None:
        zerocast.nn.convert(model, recipe, weights=weights)
    return model


def mesh_of(world_size: int) -> DeviceMesh:
    """All ranks in one dimension."""
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


def split(model: Pair, mesh: DeviceMesh, *, sequence: bool = False) -> Pair:
    """``up`` by rows and ``down`` by columns of their weights, with torch's styles; with
    ``sequence`` input and output are split in time.
    """
    layouts = ({"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}) if sequence else ({}, {})
    plan = {"up": ColwiseParallel(**layouts[0]), "down": RowwiseParallel(**layouts[1])}
    return parallelize_module(model, mesh, plan)


def results(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and the gradients of the input and of every parameter. Collective."""
    x = x.detach().clone().requires_grad_()
    out = model(x)
    weights = torch.linspace(-1, 1, out.shape[-1])
    if isinstance(out, DTensor):
        weights = distribute_tensor(weights, out.device_mesh, [Replicate()])
    (out.float() * weights).sum().backward()
    return {"output": whole(out), "input": whole(x.grad)} | gradients(model)


def batch(seed: int = 0) -> torch.Tensor:
    """[2, 32, K], the same on every rank."""
    return torch.randn(2, 32, K, generator=torch.Generator().manual_seed(1000 + seed))
