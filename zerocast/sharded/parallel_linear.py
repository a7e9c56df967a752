"""resolve: returns the forward of a linear layer whose weight is distributed.

FSDP2 gives a layer its gathered codes as an ordinary weight. Under tensor parallelism the weight is
a DTensor. Each rank multiplies its local input by its local weight, as any other layer does. The
placement of the result follows from the placements of the operands:

    weight      input       output      gradient of input, weight
    Shard(0)    Replicate   Shard(-1)   Partial, Shard(0)             ``ColwiseParallel``
    Shard(1)    Shard(-1)   Partial     Shard(-1), Shard(1)           ``RowwiseParallel``
    Replicate   Replicate   Replicate   Replicate, Replicate
    Replicate   Shard(d)    Shard(d)    Shard(d), Partial             d is not the last dimension

An input with another placement is redistributed first. Placements and parallel styles are torch's;
the styles also define how input and output are converted around the layer.

The codes of a tensor-parallel shard are those of the whole weight's cast
(:class:`zerocast.tensors.TensorParallelShard`). A master that FSDP2 does not gather is cast by the
layer (:class:`CastMaster`). Each rank quantizes its local inputs and gradients, as under data
parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from zerocast.comm import SingleRank
from zerocast.errors import InputError, UnsupportedError
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.casts import CastGroup, cast_group_of, codes_to_send
from zerocast.sharded.master_weight import MasterWeight, not_gathered
from zerocast.sharded.placement import distributed, is_sharded, to_local, tp_shard_of
from zerocast.tensors import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Multiply: TypeAlias = Callable[..., torch.Tensor]
"""``(input, weight, bias, tp_shard=...)``: returns the product of this rank's local tensors."""

DistributedLinear: TypeAlias = Callable[[torch.Tensor, Multiply], "DTensor"]


def resolve(layer: Any) -> DistributedLinear | None:
    """Return the distributed forward of ``layer``, a :class:`zerocast.nn.Linear`.

    It is None if this rank holds the whole weight, which the layer uses unchanged. Otherwise it is
    a function of the input and of ``multiply``, which computes the local product.

    Raises:
        UnsupportedError: if the weight should have been gathered in codes and is not.
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
    # torch.compile can neither trace that cast nor represent masters in a graph.
    run = parallel_linear if gather is None else torch._disable_dynamo(parallel_linear)
    return functools.partial(run, layer)


class CastMaster(torch.autograd.Function):
    """``CastMaster.apply(master, cast_group)``: the codes of a :class:`MasterWeight` [M, K] that
    FSDP2 does not gather; the gradient passes through unchanged (straight-through).

    The codes are cast once for each value of the master, or before the forward by
    :func:`precompute_scales_for_fsdp`.
    """

    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, cast_group: CastGroup) -> torch.Tensor:
        return kept_weight(master, cast_group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def kept_weight(master: torch.Tensor, cast_group: CastGroup) -> QuantizedTensor:
    """Return the weight of ``master``, which FSDP2 does not shard, in the master's dtype. Cast it
    with its group if a cast is due. Collective over the tensor-parallel ranks.
    """
    gather = gather_of(master)
    assert gather is not None
    codes, shards = codes_to_send(gather, cast_group, SingleRank(), master.dtype, master.device)
    if gather.kept is None:
        gather.kept = gather.gathered_weight(codes, shards)[0].quantized_storage
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
        InputError: if the input is not a DTensor on the weight's mesh.
        UnsupportedError: if the weight is split other than by rows or by columns.
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
    """Return ``input`` if it is a DTensor on the weight's mesh, else raise :class:`InputError`."""
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
    """Return the placements of the tensors of the product of ``input`` and ``weight``."""
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
    """Return the local tensor of ``tensor`` in ``placement``, with its gradient in ``grad``."""
    if tensor.placements != (placement,):
        tensor = tensor.redistribute(placements=(placement,))
    return tensor.to_local(grad_placements=(grad,))
