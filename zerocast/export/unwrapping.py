"""Removes wrappers from a model, since servers know its weights by the names without them."""

from typing import TypeVar

import torch

from zerocast.errors import UnsupportedError
from zerocast.tensors.wrapped_names import INNER

_Source = TypeVar("_Source")

REPLICAS = {"DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine"}
"""Classes, of torch and others, whose ``module`` is the module that they wrap."""


def unwrapped(source: _Source) -> _Source | torch.nn.Module:
    """Return a model without wrappers. Modules that contain a wrapper become shallow copies with
    the same parameters. A source that is not a module is returned as it is.

    Raises:
        UnsupportedError: for a model with adapters of peft, or flat parameters of FSDP1.
    """
    if not isinstance(source, torch.nn.Module):
        return source
    for kind in (kind for module in source.modules() for kind in type(module).__mro__):
        if kind.__module__.startswith("peft.") or kind.__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                f"a model with a {kind.__name__} has weights that servers do not support. With "
                "peft call model = model.merge_and_unload(); replace FSDP1 by fully_shard."
            )
    return _unwrapped(source, {})


def _unwrapped(module: torch.nn.Module, seen: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """Return ``module`` without wrappers; a module that occurs twice is converted once."""
    if id(module) not in seen:
        is_replica = any(kind.__name__ in REPLICAS for kind in type(module).__mro__)
        own = {n: child for n, child in module._modules.items() if child is not None}
        children = {n: _unwrapped(child, seen) for n, child in own.items()}
        inner = [children[n] for n in (*INNER, *["module"] * is_replica) if n in children]
        found = inner[0] if inner else module
        if not inner and any(children[n] is not own[n] for n in own):
            found = object.__new__(type(module))
            vars(found).update(vars(module), _modules=module._modules | children)
        seen[id(module)] = found
    return seen[id(module)]
