"""A model of linear layers under FSDP2, whose gradients are given and whose weights are read."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import zerocast
from tests.support.claims import assert_unsharded_cast, stored
from tests.support.fused import cast_as_served
from tests.support.models import Bank
from tests.support.ranks import shared_folder
from tests.support.recipes import RECIPES
from zerocast.comm import Communicator
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.placement import to_local, tp_shard_of
from zerocast.tensors.quantize import quantize_into

K = 96
ROWS = (48, 130, 37, 5, 1)
"""On 2, 3 and 4 ranks: even, even or not, never even; on 4 ranks a last shard of one row or none,
and three without any."""

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def converted(recipe=RECIPES["nvfp4"], rows=ROWS, *, seed=0, weights="master", **options) -> Bank:
    """On one rank, whole: the same values for the same seed."""
    torch.manual_seed(seed)
    model = Bank(rows)
    zerocast.nn.convert(model, recipe, weights=weights, **options)
    return model


def shard(model: Bank, *, policy=BF16, wrap_layers=True, **options) -> Bank:
    """By fully_shard, of each layer and of all."""
    for layer in model.layers if wrap_layers else ():
        fully_shard(layer, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def bank(recipe=RECIPES["nvfp4"], rows=ROWS, *, seed=0, **options) -> Bank:
    """A converted and sharded :class:`Bank`, of the same values whatever the number of ranks."""
    return shard(converted(recipe, rows, seed=seed), **options)


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
        p.grad = placed_like(gradient(p.shape, step), p)


def placed_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``whole``, which every rank has, sharded and split as ``like`` is."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A distributed tensor gathered, any other as it is. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def adamw(parameters) -> torch.optim.Optimizer:
    """torch's, by its foreach implementation; steps large enough to move every scale."""
    return torch.optim.AdamW(parameters, lr=0.05, foreach=True)


def train_step(model, optimizer, comm, number=None, *, ahead=False) -> torch.Tensor:
    """One step, and the loss before it; with a ``number`` its gradients are given ones, with
    ``ahead`` its cast is made ahead of the gathers.
    """
    loss = model(batch(comm))
    loss.backward()
    if number is not None:
        feed((p for p in model.parameters() if p.requires_grad), number)
    optimizer.step()
    optimizer.zero_grad()
    if ahead:
        zerocast.sharded.precompute_scales_for_fsdp(model)
    return loss.detach()


def trajectory(model, x, steps: int) -> dict[str, torch.Tensor]:
    """The loss of each step of AdamW, and all whole gradients. Collective."""
    optimizer, found = adamw(model.parameters()), {}
    for number in range(steps):
        loss = model(x)
        loss.backward()
        seen = {"loss": loss.detach()} | gradients(model)
        found |= {f"{name}, step {number}": value for name, value in seen.items()}
        optimizer.step()
        optimizer.zero_grad()
    return found


def save_plain(model, comm) -> Path:
    """Save the masters by torch.distributed.checkpoint, which sees plain tensors; the folder."""
    folder, state = shared_folder(comm), model.state_dict()
    assert all(type(tensor.to_local()) is torch.Tensor for tensor in state.values())
    dcp.save(state, checkpoint_id=folder)
    return folder


def load(model, folder: Path) -> None:
    """Load what torch.distributed.checkpoint saved, on however many ranks."""
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)


class Unsharded:
    """What every weight must be: the whole master, cast on one rank; those of an amax group by one
    plan.
    """

    def __init__(self, model: torch.nn.Module, recipe, dtype=torch.bfloat16, groups=None) -> None:
        shapes = {name: p.shape for name, p in model.named_parameters()}
        self.weights = {
            name: zerocast.empty(
                shape, recipe, dtype=dtype, columnwise=recipe.columnwise_has_shards, name=name
            )
            for name, shape in shapes.items()
        }
        self.plan = groups and zerocast.CastPlan(
            list(self.weights.values()), list(map(torch.zeros, shapes.values())), [0] * len(shapes),
            zerocast.comm.SingleRank(), names=list(shapes), amax_groups=groups,
        )  # fmt: skip

    def cast(self, masters: dict[str, torch.Tensor]) -> None:
        """Cast every master once."""
        if self.plan:
            self.plan.cast([masters[name] for name in self.weights])
            self.plan.post_all_gather_processing()
            return
        for name, weight in self.weights.items():
            quantize_into(weight.quantized_storage, masters[name])

    def assert_gathered(self, model: torch.nn.Module, when: str) -> None:
        """What is gathered has these bytes, in every buffer that a layer reads. Collective."""
        for name, parameter in gathered(model).items():
            local = isinstance(parameter, DTensor)
            tp_shard = tp_shard_of(name, parameter, is_fsdp_sharded=False) if local else None
            assert_unsharded_cast(
                multiplied(parameter), self.weights[name], f"{name}, {when}", with_state=False,
                tp_shard=tp_shard,
            )  # fmt: skip
        reshard(model)


def train_and_compare(
    model, x, expected, steps, *, microbatches=1, ahead=(1, 2), make=adamw
) -> None:
    """Steps of an optimizer with given gradients; what is gathered is compared in forward and
    backward, and cast ahead of the gathers after some of the steps.
    """
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for number in steps:
        expected.cast(whole_masters(model))
        for _ in range(microbatches):
            loss = model(x).float().square().mean()
            expected.assert_gathered(model, f"forward of step {number}")
            loss.backward()
        expected.assert_gathered(model, f"backward of step {number}")
        feed((p for p in model.parameters() if p.requires_grad), number)
        optimizer.step()
        optimizer.zero_grad()
        if number in ahead:
            zerocast.sharded.precompute_scales_for_fsdp(model)


def multiplied(parameter: torch.Tensor) -> zerocast.QuantizedTensor:
    """The weight that a layer multiplies with, of a parameter as the layer has it: this rank's rows
    or columns, where tensor parallelism splits it.
    """
    local = to_local(parameter)
    if isinstance(local, zerocast.QuantizedTensor):
        return local
    return zerocast.QuantizedTensor(local.low_bit_all_gather.kept)


def assert_unsharded_casts(model, recipe=RECIPES["nvfp4"], when="", *, dtype=torch.bfloat16):
    """What is gathered are the bytes of one cast of the whole masters as they are. Collective."""
    expected = Unsharded(model, recipe, dtype)
    expected.cast(whole_masters(model))
    expected.assert_gathered(model, when)


def assert_converted_casts(model, recipe, count: int) -> None:
    """Of a model with other parameters: ``count`` are gathered in codes, those of the unsharded
    cast of what servers fuse, and the others are the masters. Collective.
    """
    masters, weights = whole_masters(model), gathered(model)
    converted = {n: w.dtype for n, w in weights.items() if isinstance(w, zerocast.QuantizedTensor)}
    assert len(converted) == count
    (dtype,) = set(converted.values())
    own = {name: masters[name] for name in converted}
    whole = masters | cast_as_served(own, recipe, dtype)
    for name, weight in weights.items():
        assert_unsharded_cast(weight, whole[name], name)
    reshard(model)


def whole_masters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter of a sharded model, gathered in high precision. Collective."""
    return {name: whole(p).clone() for name, p in model.named_parameters()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's whole gradient. Collective."""
    return {name: whole(p.grad) for name, p in model.named_parameters()}


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


def everything(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Masters, and what is gathered of them. Collective."""
    masters = {f"master {name}": master for name, master in whole_masters(model).items()}
    found = masters | stored(gathered(model))
    reshard(model)
    return found


def remembered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the recipes of all masters remember now."""
    return {
        f"{name} {key}": tensor.clone()
        for name, parameter in model.named_parameters()
        for key, tensor in gather_of(parameter).state.items()
    }


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Masters, what is gathered of them, and what the recipes remember then. Collective."""
    return everything(model) | remembered(model)
