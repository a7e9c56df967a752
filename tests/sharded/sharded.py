"""A model of linear layers under FSDP2, whose gradients are given and whose weights are read."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import zerocast
from tests.support.models import Bank
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import Communicator
from zerocast.tensors.quantize import quantize_into

K = 96
ROWS = (48, 130, 37, 5, 1)
"""On 2, 3 and 4 ranks: even, even or not, never even; on 4 ranks a last shard of one row or none,
and three without any."""

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def bank(recipe, rows=ROWS, *, policy=BF16, seed=0, mesh=None, wrap_layers=True, **options):
    """A converted and sharded :class:`Bank`, of the same values whatever the number of ranks."""
    torch.manual_seed(seed)
    model = Bank(rows)
    zerocast.nn.convert(model, recipe, weights="master")
    if wrap_layers:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, **options)
    return fully_shard(model, mesh=mesh, mp_policy=policy, **options)


def batch(comm: Communicator | None = None) -> torch.Tensor:
    """[4, K] for this rank."""
    rank = 0 if comm is None else comm.rank
    return torch.randn(4, K, generator=torch.Generator().manual_seed(1000 + rank)).bfloat16()


def gradient(shape: torch.Size, step: int) -> torch.Tensor:
    """A weight's whole gradient in a step: the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step * 1000 + shape[0]))


def feed(parameters, step: int) -> None:
    """Let every parameter have :func:`gradient`, sharded as it is."""
    for p in parameters:
        whole = gradient(p.shape, step)
        if isinstance(p, DTensor):
            size, rank = (
                p.device_mesh.size(-1),
                p.device_mesh.get_local_rank(p.device_mesh.ndim - 1),
            )
            rows = -(-p.shape[0] // size)
            tp_shard = whole[rank * rows : (rank + 1) * rows]
            whole = DTensor.from_local(
                tp_shard, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
        p.grad = whole


def adamw(parameters) -> torch.optim.Optimizer:
    """torch's, by its foreach implementation; steps large enough to move every scale."""
    return torch.optim.AdamW(parameters, lr=0.05, foreach=True)


class Unsharded:
    """What every weight must be: the whole master, cast on one rank."""

    def __init__(self, model: torch.nn.Module, recipe, dtype=torch.bfloat16) -> None:
        self.weights = {
            name: zerocast.empty(p.shape, recipe, dtype=dtype, name=name)
            for name, p in model.named_parameters()
        }

    def cast(self, masters: dict[str, torch.Tensor]) -> None:
        """Cast every master once."""
        for name, weight in self.weights.items():
            quantize_into(weight.quantized_storage, masters[name])


def whole_masters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter of a sharded model, gathered in high precision. Collective."""
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def gathered(model: torch.nn.Module) -> dict[str, zerocast.QuantizedTensor]:
    """Gather every parameter as a forward does; the parameters that layers see."""
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    return dict(model.named_parameters())


def reshard(model: torch.nn.Module) -> None:
    """Undo :func:`gathered`."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def assert_unsharded_cast(model, recipe, when="", *, dtype=torch.bfloat16) -> None:
    """What is gathered are the bytes of one cast of the whole masters as they are."""
    whole = Unsharded(model, recipe, dtype)
    whole.cast(whole_masters(model))
    for name, weight in gathered(model).items():
        assert weight.dtype == dtype
        for buffer, actual in weight.quantized_storage.buffers.items():
            expected = whole.weights[name].quantized_storage.buffers[buffer]
            assert_same_bytes(actual, expected, f"{name} {buffer} {when}".rstrip())
    reshard(model)
