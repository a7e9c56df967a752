"""Wrapper classes in inference mode, where torch leaves to them what it does itself elsewhere.

Operations that are made of others (``to``, ``view_as``, ``narrow``) arrive whole, and a class that
knows only the others would take them for unknown ones. And a view of a tensor that was made outside
must not become a tensor of inference, which a wrapper that is made inside is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def decomposed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``func`` gives as the operations that it is made of; NotImplemented where it is not made
    of others, and outside of inference mode.
    """
    return func.decompose(*args, **kwargs) if torch.is_inference_mode_enabled() else NotImplemented


def inference_mode_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """The mode in which views of ``tensor`` have to be made: of inference if it was."""
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(tensor.is_inference())
