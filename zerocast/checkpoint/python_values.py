"""Converts values of Python to JSON and named tensors, and back: options, schedulers, a user's
values.

What JSON has no form for keeps its type by a tag: ``{"$tuple": [...]}``, ``{"$dict": [[key, value],
...]}`` where a key is not text, ``{"$counter": ...}`` likewise, ``{"$tensor": name}``, and of an
array of NumPy ``{"$array": name}``. Floats are written with all their digits, so that the same bits
are read again. NumPy is not imported here: who has one of its values has done so.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from zerocast.arguments import why_no_memory
from zerocast.errors import InputError


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return ``value`` as JSON values; tensors go into ``tensors``.

    Args:
        name: what the value is called in messages and, with a path, its tensors in ``tensors``.

    Raises:
        InputError: for anything but None, bool, int, float, str, tensors, numbers and arrays of
            NumPy, and lists, tuples, dicts and Counters of them; for a tensor without memory.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, torch.Tensor):
        if (problem := why_no_memory(value)) is not None:
            raise InputError(f"{name} must be a tensor that holds its values, got {problem}.")
        tensors[name] = value.detach()
        return {"$tensor": name}
    if numpy is not None and isinstance(value, numpy.ndarray):
        with suppress(TypeError, ValueError):  # of a dtype that torch has not
            tensors[name] = torch.from_numpy(value.copy())
            return {"$array": name}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = [
            [encode(key, f"a key of {name}", {}), encode(item, f"{name}.{key}", tensors)]
            for key, item in value.items()
        ]
        if isinstance(value, Counter):
            return {"$counter": pairs}
        is_plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs)
        return dict(pairs) if is_plain else {"$dict": pairs}
    raise InputError(
        f"{name} must be made of None, bool, int, float, str, tensors, values of NumPy, lists, "
        f"tuples and dicts to be saved without pickle, got a {type(value).__name__}; give what it "
        f"is made of."
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what :func:`encode` was given."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("$tuple", items)]:
            return tuple(decode(item, tensors) for item in items)
        case [("$tensor", str(name))]:
            return tensors[name]
        case [("$array", str(name))]:
            return tensors[name].numpy()
        case [("$dict" | "$counter" as kind, pairs)]:
            made = {_key(decode(key, tensors)): decode(item, tensors) for key, item in pairs}
            return Counter(made) if kind == "$counter" else made
    return {key: decode(item, tensors) for key, item in value.items()}


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
