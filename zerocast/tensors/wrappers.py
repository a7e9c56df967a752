"""Functions for wrapper tensor classes: they make one, and find what an operation writes.

In inference mode torch leaves two tasks to wrappers. Composite operations (``to``, ``view_as``,
``narrow``) arrive without being decomposed. And a wrapper made in inference mode is an inference
tensor, but a view of a tensor that was made outside must not be one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def wrapper_of(cls: type[torch.Tensor], value: torch.Tensor) -> Any:
    """Return a tensor of the wrapper class ``cls`` with ``value`` as its attribute ``value``."""
    wrapper: Any = torch.Tensor._make_wrapper_subclass(
        cls,
        value.shape,
        strides=value.stride(),
        storage_offset=value.storage_offset(),
        dtype=value.dtype,
        device=value.device,
    )
    wrapper.value = value
    return wrapper


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that the operation ``func`` writes; for lists their elements."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))


def decomposed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a composite ``func`` as its component operations.

    Return NotImplemented if it is not a composite, and outside of inference mode.
    """
    return func.decompose(*args, **kwargs) if torch.is_inference_mode_enabled() else NotImplemented


def inference_mode_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return the mode for making views of ``tensor``: inference mode if it was made in it."""
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(tensor.is_inference())
