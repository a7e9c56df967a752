"""Checks, on this rank alone, of the masters that a caller passes to a cast."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sized
from typing import Any, SupportsIndex

import torch

from zerocast.arguments import why_unusable
from zerocast.errors import InputError
from zerocast.layout import NOTHING, Extent
from zerocast.recipes import NOMINAL_DTYPES
from zerocast.tensors import QuantizedStorage


def check_list(argument: str, given: Any, weights: Sized) -> None:
    """Raise :class:`InputError` unless ``given`` is a list with one entry per weight."""
    is_list = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if not is_list or isinstance(given, str | bytes | Mapping):
        raise InputError(
            f"{argument} must be a list with one entry per weight, got {type(given).__name__}; "
            "wrap a single entry in [...], and an iterator in list(...)."
        )
    if len(given) != len(weights):
        raise InputError(
            f"{argument} must have one entry for each of the {len(weights)} model_weights, got "
            f"{len(given)} entries; give None where this rank owns nothing of a weight."
        )


def as_tensors(master_weights: Any) -> Any:
    """Return masters that support DLPack (CuPy arrays, say) as torch tensors of the same memory.

    Anything else is returned as it is.

    Raises:
        InputError: if the memory of a master cannot be shared.
    """
    if not isinstance(master_weights, list | tuple):
        return master_weights
    return [_as_tensor(i, master) for i, master in enumerate(master_weights)]


def _as_tensor(i: int, master: Any) -> Any:
    if isinstance(master, torch.Tensor) or not hasattr(master, "__dlpack__"):
        return master
    try:
        return torch.from_dlpack(master)
    except (BufferError, RuntimeError, TypeError) as error:
        raise InputError(
            f"master_weights[{i}] must be a torch tensor or share its memory by DLPack, got a "
            f"{type(master).__name__} that does not: {error}; pass a torch tensor."
        ) from error


def extent_of(
    name: str, storage: QuantizedStorage, master: torch.Tensor | None, given: SupportsIndex | None
) -> Extent:
    """Return the elements of the weight that ``master`` holds; ``given`` is the first one.

    Raises:
        InputError: if they are not inside the weight, or ``master`` cannot be read.
    """
    numel = storage.shape.numel()
    if master is None:
        if given is not None:
            raise InputError(
                f"{name}: start_offsets is {given} but there is no master weight; give both, or "
                "None for both where this rank owns nothing of the weight."
            )
        return NOTHING
    check_master_tensor(name, storage, master)
    if given is None and master.numel() == 0:
        return NOTHING
    start = _as_int(given)
    if start is None:
        raise InputError(
            f"{name}: start_offsets must say, as an int, at which element of the weight the "
            f"master of {master.numel()} elements starts, got {given!r}."
        )
    if start < 0 or start + master.numel() > numel:
        raise InputError(
            f"{name}: the master must lie inside the weight's {numel} elements, got start offset "
            f"{start} and {master.numel()} elements, so [{start}, {start + master.numel()}); "
            "offsets count elements of the flattened weight, not bytes."
        )
    return Extent(start, start + master.numel())


def _as_int(value: object) -> int | None:
    """Return ``value`` as an int, also if of numpy's or torch's types; None if it is not one."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # raises if it cannot
    except TypeError:
        return None


def check_master_tensor(name: str, storage: QuantizedStorage, master: torch.Tensor) -> None:
    """Raise :class:`InputError` if ``master`` cannot be read as a shard of the weight."""
    problem = why_unusable(master, NOMINAL_DTYPES, storage.device)
    if problem is not None:
        raise InputError(
            f"{name}: the master weight must be contiguous, with allocated storage on the weight's "
            f"device {storage.device}, and of torch.float32, torch.bfloat16 or torch.float16, got "
            f"{problem}."
        )
