"""What is asked of torch's FSDP2 and DTensor, which are imported when somebody asks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` on this rank; itself where it is not sharded."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor, as FSDP2 and tensor parallelism make of parameters."""
    # A layer asks in every forward, also where nobody has loaded this large package.
    loaded: Any = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def sharding_dimension(tensor: torch.Tensor) -> int:
    """The dimension of its mesh over which FSDP2 has sharded ``tensor``: the first that shards. One
    before it replicates; those behind it are of tensor parallelism.
    """
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    return next(i for i, placement in enumerate(placements) if not placement.is_replicate())


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether the ranks hold different parts of ``tensor``, a DTensor."""
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    return not all(placement.is_replicate() for placement in placements)


def ranks_that_shard(tensor: torch.Tensor) -> int:
    """Over how many ranks FSDP2 has sharded ``tensor``."""
    return tensor.device_mesh.size(sharding_dimension(tensor))  # type: ignore[attr-defined]


def gathered_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of what FSDP2's gather of ``tensor`` gives a rank: under tensor parallelism that of
    the largest part.
    """
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    shape = list(tensor.shape)
    for dim in range(sharding_dimension(tensor) + 1, mesh.ndim):
        if not placements[dim].is_replicate():
            split = placements[dim].dim
            shape[split] = -(-shape[split] // mesh.size(dim))
    return torch.Size(shape)


def sharded_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local``, as the part on this rank of what is sharded as ``tensor`` is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def write_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor as ``tensor`` is, without memory, for :func:`counted_with`."""
    counter: Any = tensor.detach()
    counter._local_tensor = counter._local_tensor.new_empty(0)
    return counter


def counted_with(counter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, a DTensor, so that torch counts writes to it in ``counter._version``, too."""
    counted: Any = counter.detach()
    counted._spec = tensor._spec  # type: ignore[attr-defined]
    counted._local_tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return counted


def replicated_like(parameters: Iterable[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, which all ranks hold alike, over the mesh of the first sharded one of
    ``parameters``; where there is none, as it is.

    Code that loads state dicts of sharded models asks every entry for its mesh.
    """
    mesh: Any = next((p.device_mesh for p in parameters if is_sharded(p)), None)  # type: ignore[attr-defined]
    if mesh is None:
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def reshard(model: torch.nn.Module) -> None:
    """Let all parameters of ``model`` be the sharded ones."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keeps_a_part(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 keeps several ranks' rows of ``parameter``, a sharded one, after a forward: for
    an integer ``reshard_after_forward``.
    """
    # A parameter does not know the module that was given to fully_shard; torch knows all of those.
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            for group in _parameter_groups(module):
                if any(each.sharded_param is parameter for each in group.fsdp_params):
                    return group._use_post_forward_mesh
    return False


def _parameter_groups(module: Any) -> list[Any]:
    """FSDP2's groups of parameters that are gathered before ``module`` runs."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # in torch versions that know one for a module, or none
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def gather_dtypes(model: torch.nn.Module) -> dict[str, torch.dtype | None]:
    """By the name of each module that was given to ``fully_shard``, what its policy casts
    parameters to; None for no policy.
    """
    from torch.distributed.fsdp import FSDPModule

    return {
        name: module._get_fsdp_state()._mp_policy.param_dtype
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }
