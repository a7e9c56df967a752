"""resolve: finds the operand and the placements for the forward of a linear layer whose weight is
distributed.

FSDP2 gives a layer the codes that it has gathered, as a weight like any other. Under tensor
parallelism the weight is a DTensor. A rank multiplies what it holds of input and weight as if that
were all, by the products of any other layer; how the result is placed follows from the placements:

    weight      input       output      gradient of input, weight
    Shard(0)    Replicate   Shard(-1)   Partial, Shard(0)             ``ColwiseParallel``
    Shard(1)    Shard(-1)   Partial     Shard(-1), Shard(1)           ``RowwiseParallel``
    Replicate   Replicate   Replicate   Replicate, Replicate
    Replicate   Shard(d)    Shard(d)    Shard(d), Partial             d is not the last dimension

An input that is placed otherwise is redistributed first. Placements are torch's, and so are the
styles that make them, which also say what happens to input and output around the layer.

The codes of a tensor-parallel shard are those of the whole weight's cast
(:class:`zerocast.tensors.TensorParallelShard`). A master that FSDP2 does not gather is cast by the
layer (:class:`CastMaster`). Each rank quantizes what it holds of inputs and gradients, as under
data parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from zerocast.comm import SingleRank
from zerocast.errors import InputError, UnsupportedError
from zerocast.sharded.all_gather import CodesState, gather_of
from zerocast.sharded.casts import CastGroup, cast_group_of, codes_to_send
from zerocast.sharded.master_weight import MasterWeight, not_gathered
from zerocast.sharded.placement import distributed, is_sharded, to_local, tp_shard_of
from zerocast.tensors import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Multiply: TypeAlias = Callable[..., torch.Tensor]
"""``(input, weight, bias, tp_shard=...)``: the product of what this rank holds."""

DistributedLinear: TypeAlias = Callable[[torch.Tensor, Multiply], "DTensor"]


def resolve(layer: Any) -> DistributedLinear | None:
    """Say what the forward of ``layer``, a :class:`zerocast.nn.Linear`, multiplies by: None for its
    weight as it is, whole on this rank; else a function of the input and of ``multiply``, which
    gives the product of what this rank holds.

    Raises:
        UnsupportedError: if the weight was to be gathered in codes and is not.
    """
    weight = layer.weight
    if not is_sharded(weight):
        if layer.low_bit_all_gather and not isinstance(weight, QuantizedTensor):
            raise not_gathered(layer.name)
        return None
    local = to_local(weight)
    gather = local.low_bit_all_gather if isinstance(local, MasterWeight) else None
    # A master that tensor parallelism alone distributes is cast by the layer.
    has_codes = isinstance(local, QuantizedTensor) if gather is None else not gather.is_gathered
    if layer.low_bit_all_gather and not has_codes:
        raise not_gathered(layer.name)
    # torch.compile can neither trace that cast nor have masters in a graph.
    run = parallel_linear if gather is None else torch._disable_dynamo(parallel_linear)
    return functools.partial(run, layer)


class CastMaster(torch.autograd.Function):
    """``CastMaster.apply(master, cast_group)``: the codes of a :class:`MasterWeight` [M, K] that
    FSDP2 does not gather; the gradient passes through unchanged (straight-through).

    They are cast once for each value of the master, and ahead of the forward if
    :func:`precompute_scales_for_fsdp` is called.
    """

    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, cast_group: CastGroup) -> torch.Tensor:
        return kept_weight(master, cast_group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def kept_weight(master: torch.Tensor, cast_group: CastGroup) -> QuantizedTensor:
    """Return the weight of ``master``, which FSDP2 does not shard, in its dtype; cast with its
    group if a cast is due. Collective over the group of tensor parallelism.
    """
    gather = gather_of(master)
    assert gather is not None
    codes, shards = codes_to_send(gather, cast_group, SingleRank(), master.dtype, master.device)
    if gather.kept is None:
        gather.kept = gather.gathered_weight(codes, shards)[0].quantized_storage
        gather.codes = CodesState.KEPT
    return QuantizedTensor(gather.kept)


class _Placed(NamedTuple):
    """The placements of the tensors of one product."""

    input: Placement
    grad_input: Placement
    output: Placement
    bias: Placement
    grad_bias: Placement
    grad_weight: Placement


def parallel_linear(layer: Any, input: torch.Tensor, multiply: Multiply) -> DTensor:
    """Return ``input @ weight.T + bias``, [..., K] -> [..., M], of DTensors on one mesh.

    Raises:
        InputError: for an input that is not a DTensor on the weight's mesh.
        UnsupportedError: for a weight that is split otherwise than by rows or by columns.
    """
    name, weight, bias = layer.name, layer.weight, layer.bias
    tp_shard = tp_shard_of(name, weight, is_fsdp_sharded=False)
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    own = _on_mesh(name, input, weight)
    where = _placed(name, own, weight)
    own_bias = None
    if bias is not None:
        assert isinstance(bias, DTensor)
        own_bias = _local(bias, where.bias, where.grad_bias)
        if where.output.is_partial() and weight.device_mesh.get_local_rank() != 0:
            own_bias = own_bias - own_bias.detach()  # one rank adds it; zeros have its gradient
    own_weight = weight.to_local(grad_placements=(where.grad_weight,))
    if isinstance(own_weight, MasterWeight):
        own_weight = CastMaster.apply(own_weight, cast_group_of(layer, weight))
    own_input = _local(own, where.input, where.grad_input)
    product = multiply(own_input, own_weight, own_bias, tp_shard=tp_shard)
    shape = (*input.shape[:-1], weight.shape[0])
    return distributed(product, weight.device_mesh, where.output, shape)


def _on_mesh(name: str, input: torch.Tensor, weight: DTensor) -> DTensor:
    """Return ``input`` if it is distributed over the ranks that the weight is; raise otherwise."""
    from torch.distributed.tensor import DTensor

    mesh = weight.device_mesh
    if isinstance(input, DTensor) and input.device_mesh == mesh:
        return input
    given = f"a {type(input).__name__}"
    if isinstance(input, DTensor):
        given = f"one on another mesh, of shape {tuple(input.device_mesh.shape)}"
    raise InputError(
        f"{name}: the weight is a DTensor on a mesh of shape {tuple(mesh.shape)}, so the input "
        f"must be a DTensor there, too, got {given}; parallelize the layer by ColwiseParallel or "
        f"RowwiseParallel, which make it one."
    )


def _placed(name: str, input: DTensor, weight: DTensor) -> _Placed:
    """Return how the tensors of the product of ``weight`` with ``input`` are placed."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    last = input.ndim - 1
    split = weight.placements[0] if weight.device_mesh.ndim == 1 else None
    if split == Shard(0):
        return _Placed(Replicate(), Partial(), Shard(last), Shard(0), Shard(0), Shard(0))
    if split == Shard(1):
        return _Placed(Shard(last), Shard(last), Partial(), Replicate(), Replicate(), Shard(1))
    if split == Replicate():
        given = input.placements[0]
        if isinstance(given, Shard) and given.dim % input.ndim != last:
            return _Placed(given, given, given, Replicate(), Partial(), Partial())
        return _Placed(*(Replicate(),) * 6)
    raise UnsupportedError(
        f"{name}: the weight of a tensor-parallel layer must be Shard(0), Shard(1) or Replicate() "
        f"over a mesh of one dimension, got {weight.placements} on a mesh of shape "
        f"{tuple(weight.device_mesh.shape)}; parallelize it by ColwiseParallel or RowwiseParallel."
    )


def _local(tensor: DTensor, placement: Placement, grad: Placement) -> torch.Tensor:
    """Return what this rank holds of ``tensor`` in ``placement``; its gradient is placed as
    ``grad`` says.
    """
    if tensor.placements != (placement,):
        tensor = tensor.redistribute(placements=(placement,))
    return tensor.to_local(grad_placements=(grad,))
