"""Which part of a weight a rank of tensor parallelism holds: read from its DTensor, here alone.

FSDP2 puts its dimensions of the mesh before those of tensor parallelism: one that shards, and
before it perhaps one that replicates. So behind the first dimension that shards come those of
tensor parallelism.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from zerocast.comm import as_communicator
from zerocast.errors import InputError, UnsupportedError
from zerocast.recipes import Recipe
from zerocast.sharded.dtensor import sharding_dimension
from zerocast.tensors import TensorParallelShard


def tp_shard_of(
    name: str, tensor: torch.Tensor, *, is_fsdp_sharded: bool
) -> TensorParallelShard | None:
    """What this rank holds of ``tensor``, a weight [M, K], once FSDP2 has gathered it; None where
    that is all.

    Args:
        name: the weight's, for messages.
        tensor: a DTensor, or one that is not distributed.
        is_fsdp_sharded: whether FSDP2 has sharded it.

    Raises:
        UnsupportedError: where it is split by something else than rows or columns, or twice.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    first = sharding_dimension(tensor) + 1 if is_fsdp_sharded else 0
    splits = [
        (dim, placement)
        for dim, placement in enumerate(tensor.placements)
        if dim >= first and not placement.is_replicate()
    ]
    if not splits:
        return None
    ((dim, placement), *more) = splits
    if more or type(placement) is not Shard:
        raise UnsupportedError(
            f"{name}: the weight of a tensor-parallel layer must be split by rows or by columns "
            f"over one dimension of the mesh, Shard(0) or Shard(1), got {tensor.placements}; "
            f"parallelize it by ColwiseParallel or RowwiseParallel."
        )
    return TensorParallelShard.chunk(
        tensor.shape, placement.dim, as_communicator(mesh.get_group(dim))
    )


@functools.lru_cache(maxsize=1024)
def all_tp_shards(tp_shard: TensorParallelShard) -> tuple[TensorParallelShard, ...]:
    """By rank, the parts of the weight of which ``tp_shard`` is one of
    :meth:`zerocast.TensorParallelShard.chunk`.
    """
    comm = tp_shard.require_comm()
    length = -(-tp_shard.lines // comm.size)
    starts = [min(rank * length, tp_shard.lines) for rank in range(comm.size)]
    ends = [*starts[1:], tp_shard.lines]
    return tuple(
        dataclasses.replace(tp_shard, start=start, size=end - start)
        for start, end in zip(starts, ends, strict=True)
    )


@functools.lru_cache(maxsize=1024)
def check_tp_boundaries(name: str, tp_shard: TensorParallelShard, recipe: Recipe) -> None:
    """Raise :class:`InputError` on every rank where any rank's part is empty, or begins or ends
    inside a block.
    """
    *_, last = all_tp_shards(tp_shard)
    if not last.size:
        raise InputError(
            f"{name}: each of {last.require_comm().size} tensor-parallel ranks must have a part of "
            f"the weight, got {last}; choose fewer ranks, or leave the weight uncut."
        )
    try:
        for other in all_tp_shards(tp_shard):
            other.check(recipe, other.shape)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
