"""Reads the placement of weights from torch's DTensor and FSDP2; no other module does.

FSDP2's mesh dimensions precede those of tensor parallelism: an optional one that replicates, then
one that shards. So the first sharding dimension is FSDP2's, and later ones are those of tensor
parallelism.

Layers call :func:`is_sharded` in every forward. torch's DTensor is a large package, so functions
import it when they need it; this module does not.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerocast.comm import as_communicator
from zerocast.errors import InputError, UnsupportedError
from zerocast.layout import chunk
from zerocast.recipes import Recipe
from zerocast.tensors import TensorParallelShard
from zerocast.tensors.wrapped_names import named_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from typing_extensions import TypeIs


# --- DTensors ---


def is_sharded(tensor: torch.Tensor) -> TypeIs[DTensor]:
    """Return whether ``tensor`` is a DTensor, as parameters of FSDP2 and tensor parallelism are."""
    loaded: Any = sys.modules.get("torch.distributed.tensor")  # else there is no DTensor yet
    # Another thread may be importing it: without the name DTensor, no DTensor exists yet.
    return isinstance(tensor, getattr(loaded, "DTensor", ()))


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor; any other tensor unchanged."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) else tensor


def sharded_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the placement of ``tensor`` and the local tensor ``local``."""
    if not is_sharded(tensor):
        return local
    from torch.distributed.tensor import DTensor

    places: Any = tensor.device_mesh, tensor.placements
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(local, *places, run_check=False, shape=shape, stride=stride)


def distributed(
    local: torch.Tensor, mesh: DeviceMesh, placement: Placement, shape: Sequence[int]
) -> DTensor:
    """Return a contiguous DTensor of ``shape`` over a 1-D ``mesh``, with the local tensor
    ``local``.
    """
    from torch.distributed.tensor import DTensor

    size = torch.Size(shape)
    stride = torch.empty(size, dtype=local.dtype, device="meta").stride()
    places = mesh, (placement,)
    return DTensor.from_local(local, *places, run_check=False, shape=size, stride=stride)


def replicated_like(parameters: Iterable[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Replicate ``tensor``, equal on all ranks, over the mesh of the first DTensor among
    ``parameters``. Return it unchanged if there is none.

    Code that loads state dicts of sharded models reads the mesh of every entry.
    """
    mesh = next((p.device_mesh for p in parameters if is_sharded(p)), None)
    if mesh is None:
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def write_counter(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor like ``tensor`` without memory, for :func:`counted_with`."""
    counter: Any = tensor.detach()
    counter._local_tensor = counter._local_tensor.new_empty(0)
    return counter


def counted_with(counter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of the DTensor ``tensor`` that shares the version counter of ``counter``."""
    counted: Any = counter.detach()
    counted._spec = tensor._spec  # type: ignore[attr-defined]
    counted._local_tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return counted


# --- FSDP2 ---


def fsdp_dimension(tensor: DTensor) -> int:
    """Return the mesh dimension over which FSDP2 has sharded ``tensor``."""
    return next(i for i, placement in enumerate(tensor.placements) if not placement.is_replicate())


def gather_size(tensor: DTensor) -> int:
    """Return the number of ranks over which FSDP2 has sharded ``tensor``."""
    return tensor.device_mesh.size(fsdp_dimension(tensor))


def gathered_shape(tensor: DTensor) -> torch.Size:
    """Return the shape that FSDP2's gather of ``tensor`` gives a rank. Under tensor parallelism
    return that of the largest shard.
    """
    mesh, shape = tensor.device_mesh, list(tensor.shape)
    for dim in range(fsdp_dimension(tensor) + 1, mesh.ndim):
        placement: Any = tensor.placements[dim]
        if not placement.is_replicate():
            shape[placement.dim] = chunk(shape[placement.dim], 0, mesh.size(dim)).size
    return torch.Size(shape)


def reshard(model: torch.nn.Module) -> None:
    """Reshard ``model``: free its gathered parameters and restore the sharded ones."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_dtypes(model: torch.nn.Module) -> dict[str, torch.dtype | None]:
    """Return the ``param_dtype`` of each module given to ``fully_shard``, by module name; None
    where the policy sets none.
    """
    from torch.distributed.fsdp import FSDPModule

    return {
        name: module._get_fsdp_state()._mp_policy.param_dtype
        for name, module in named_modules(model)
        if isinstance(module, FSDPModule)
    }


def check_placement(name: str, weight: torch.Tensor) -> None:
    """Raise :class:`UnsupportedError` if FSDP2 cannot gather ``weight``, a layer's parameter, in
    codes.

    A parameter cannot know the options of ``fully_shard`` before its first gather, in the first
    forward. All ranks get the same result, and raise before they communicate.
    """
    assert is_sharded(weight)  # by FSDP2, which gathers it
    if all(placement.is_replicate() for placement in weight.placements):
        raise UnsupportedError(
            f"{name}: a low-bit all-gather needs a master that FSDP2 shards over the ranks, got "
            f"one that every rank holds whole; call torch.distributed.fsdp.fully_shard, or convert "
            f"with weights='quantized' or 'high_precision'."
        )
    if _keeps_rows_of_several_ranks(weight):
        raise UnsupportedError(
            f"{name}: reshard_after_forward must be True or False for a weight that FSDP2 "
            "all-gathers in codes, got an int, which keeps the rows of several ranks after a "
            "forward; give fully_shard True or False."
        )


def _keeps_rows_of_several_ranks(parameter: torch.Tensor) -> bool:
    """Return whether ``reshard_after_forward`` is an integer."""
    # A parameter has no reference to its FSDP module; torch keeps a mapping of all of them.
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch 2.11 has one parameter group for a module, or none.
            one = getattr(state, "_fsdp_param_group", None)
            for group in filter(None, getattr(state, "_fsdp_param_groups", [one])):
                if any(each.sharded_param is parameter for each in group.fsdp_params):
                    return group._use_post_forward_mesh
    return False


# --- tensor parallelism ---


def tp_shard_of(
    name: str, tensor: torch.Tensor, *, is_fsdp_sharded: bool
) -> TensorParallelShard | None:
    """Return the shard of ``tensor``, a weight [M, K], that this rank holds after FSDP2's gather;
    None if it is whole.

    Args:
        name: the weight's name, for messages.
        tensor: a DTensor, or a tensor that is not distributed.
        is_fsdp_sharded: whether FSDP2 has sharded it.

    Raises:
        UnsupportedError: if it is split other than by rows or columns, or twice.
    """
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor import Shard

    first = fsdp_dimension(tensor) + 1 if is_fsdp_sharded else 0
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
    comm = as_communicator(tensor.device_mesh.get_group(dim))
    return TensorParallelShard.chunk(tensor.shape, placement.dim, comm)


@functools.lru_cache(maxsize=1024)
def all_tp_shards(tp_shard: TensorParallelShard) -> tuple[TensorParallelShard, ...]:
    """Return the shards of all ranks of the weight that ``tp_shard`` belongs to, by rank, as
    :meth:`zerocast.TensorParallelShard.chunk` splits it.
    """
    size, step = tp_shard.require_comm().size, tp_shard.step
    chunks = [chunk(tp_shard.lines // step, rank, size) for rank in range(size)]
    return tuple(
        dataclasses.replace(tp_shard, start=each.start * step, size=each.size * step)
        for each in chunks
    )


@functools.lru_cache(maxsize=1024)
def check_tp_boundaries(
    name: str, tp_shard: TensorParallelShard, recipe: Recipe, *, columnwise: bool = True
) -> None:
    """Raise :class:`InputError` on every rank if any rank's shard is empty, or cuts a block."""
    *_, last = all_tp_shards(tp_shard)
    if not last.size:
        raise InputError(
            f"{name}: each of {last.require_comm().size} tensor-parallel ranks must have a shard "
            f"of the weight, got {last}; choose fewer ranks, or do not split the weight."
        )
    try:
        for other in all_tp_shards(tp_shard):
            other.check(recipe, other.shape, columnwise=columnwise)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
