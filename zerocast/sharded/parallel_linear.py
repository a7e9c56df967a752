"""The product of a linear layer whose weight is a DTensor, as tensor parallelism makes it.

A rank multiplies what it holds of input and weight as if that were all, by the products of any
other layer; what the result is a part of follows from the placements:

    weight      input       output      gradient of input, weight
    Shard(0)    Replicate   Shard(-1)   Partial, Shard(0)             ``ColwiseParallel``
    Shard(1)    Shard(-1)   Partial     Shard(-1), Shard(1)           ``RowwiseParallel``
    Replicate   Replicate   Replicate   Replicate, Replicate
    Replicate   Shard(d)    Shard(d)    Shard(d), Partial             d is not the last dimension

An input that is placed otherwise is redistributed first. Placements are torch's, and so are the
styles that make them; what happens to input and output around the layer is theirs.

The codes of a weight's part are those of the whole weight's cast
(:class:`zerocast.tensors.TensorParallelShard`). Inputs and gradients are quantized by each rank by
itself, of what it holds, as under data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from zerocast.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Multiply: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class _Placed(NamedTuple):
    """Where the tensors of one product are."""

    input: Placement
    grad_input: Placement
    output: Placement
    bias: Placement
    grad_bias: Placement
    grad_weight: Placement


def parallel_linear(
    name: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    multiply: Multiply,
) -> DTensor:
    """``input @ weight.T + bias``, [..., K] -> [..., M], of DTensors on one mesh.

    Args:
        name: the layer's, for messages.
        multiply: gives the product of what this rank holds: input, weight, bias.

    Raises:
        InputError: for an input that is not a DTensor on the weight's mesh.
        UnsupportedError: for a weight that is split otherwise than by rows or by columns.
    """
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    distributed = _on_mesh(name, input, weight)
    where = _placed(name, distributed, weight)
    own_bias = None
    if bias is not None:
        assert isinstance(bias, DTensor)
        own_bias = _local(bias, where.bias, where.grad_bias)
        if where.output.is_partial() and weight.device_mesh.get_local_rank() != 0:
            own_bias = own_bias - own_bias.detach()  # one rank adds it; zeros have its gradient
    product = multiply(
        _local(distributed, where.input, where.grad_input),
        weight.to_local(grad_placements=(where.grad_weight,)),
        own_bias,
    )
    shape = torch.Size((*input.shape[:-1], weight.shape[0]))
    return DTensor.from_local(
        product,
        weight.device_mesh,
        (where.output,),
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, dtype=product.dtype, device="meta").stride(),
    )


def _on_mesh(name: str, input: torch.Tensor, weight: DTensor) -> DTensor:
    """``input``, if it is distributed over the ranks that the weight is."""
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
    """How the product of ``weight`` with ``input`` runs."""
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
    """What this rank holds of ``tensor`` once it is placed so; its gradient is placed as ``grad``
    says.
    """
    if tensor.placements != (placement,):
        tensor = tensor.redistribute(placements=(placement,))
    return tensor.to_local(grad_placements=(grad,))
