"""The hook that rebuilds stale derived copies before a module's forward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.hooks import RemovableHandle

from zerocast.errors import InputError
from zerocast.tensors import QuantizedStorage, QuantizedTensor, rebuild_derived


def rebuild_before_forward(
    module: torch.nn.Module, planned: Iterable[QuantizedStorage]
) -> RemovableHandle:
    """Register a hook on ``module`` that rebuilds the stale copies of its ``planned`` parameters.

    Raises:
        InputError: if it is not a module, or has none of these parameters.
    """
    if not isinstance(module, torch.nn.Module):
        raise InputError(
            f"post_all_gather_hook needs a torch.nn.Module, got {type(module).__name__}."
        )
    known = {id(storage) for storage in planned}
    storages = [
        p.quantized_storage
        for p in module.parameters()
        if isinstance(p, QuantizedTensor) and id(p.quantized_storage) in known
    ]
    if not storages:
        raise InputError(
            f"post_all_gather_hook needs a module with parameters of this plan, got "
            f"{type(module).__name__} with none of its {len(known)} weights."
        )

    def rebuild_stale(module: torch.nn.Module, args: object) -> None:
        rebuild_derived([storage for storage in storages if storage.is_stale])

    return module.register_forward_pre_hook(rebuild_stale)
