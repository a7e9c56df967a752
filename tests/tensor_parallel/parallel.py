"""Two layers one after the other, on one rank or split over several."""

import collections

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerocast
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


def batch(seed: int = 0) -> torch.Tensor:
    """[2, 32, K], the same on every rank."""
    return torch.randn(2, 32, K, generator=torch.Generator().manual_seed(1000 + seed))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A distributed tensor gathered, any other as it is. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class Gathers(TorchDispatchMode):
    """Counts what is all-gathered within the context: calls, and bytes of what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if "c10d" in name and "gather" in name and "reduce" not in name:
            self.calls[name] += 1
            tensors = tree_leaves((args, out))
            self.bytes += max(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return out
