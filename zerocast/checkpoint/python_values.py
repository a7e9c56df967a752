"""Converts Python values (options, scheduler state, a user's values) to JSON and tensors, and back.

Types that JSON lacks are marked by a tag: ``{"$tuple": [...]}``, ``{"$dict": [[key, value], ...]}``
if a key is not text or begins with "$", ``{"$counter": [[key, value], ...]}``,
``{"$tensor": name}`` and, for a NumPy array, ``{"$array": name}``. Floats are written with all
their digits, so the same bits are read. NumPy is not imported here: a program with a NumPy value
has imported it.
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
    """Return ``value`` as JSON values, and add its tensors to ``tensors``.

    Args:
        value: the value.
        name: the name of the value in messages; with a path appended, those of its tensors.
        tensors: the dict to add tensors to.

    Raises:
        InputError: for anything except None, bool, int, float, str, tensors, NumPy numbers and
            arrays, and lists, tuples, dicts and Counters of them; for a tensor without memory.
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
        with suppress(TypeError, ValueError):  # for a dtype that torch does not have
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
        f"{name} must consist of None, bool, int, float, str, tensors, values of NumPy, lists, "
        f"tuples and dicts to be saved without pickle, got a {type(value).__name__}; give its "
        "parts."
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that :func:`encode` was given, from its result and its tensors."""
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
