"""pack and unpack: a layer's recipe state as one tensor of bytes.

Code that shards, broadcasts, offloads or writes state dicts (torch's own, accelerate's,
safetensors) asks every entry for its shape, dtype and device, as a plain tensor has them, and
``torch.distributed.checkpoint`` loads into tensors of the saved size. So the tensors of a recipe's
state are saved as one, uint8 [n], behind a header that says what they are; n depends on recipe and
layer alone. As integers they keep their bits when a model changes its dtype.

    8 bytes               the length of the header, little-endian
    the header            JSON: what the state belongs to, and names, dtypes and shapes
    the tensors' bytes    one after the other
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zerocast.errors import InputError
from zerocast.recipes import QParams, Recipe
from zerocast.sharded.placement import is_sharded, to_local

_LENGTH = 8  # bytes
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.int32, torch.int64)}


class SavedState(NamedTuple):
    """What :func:`pack` put into a tensor: ``owner``, which JSON can say, and ``tensors``."""

    owner: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def pack(owner: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return one tensor, uint8 [n] on the CPU, of the state ``tensors`` of ``owner``."""
    specs = {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    header = json.dumps({"owner": owner, "tensors": specs}).encode()
    head = len(header).to_bytes(_LENGTH, "little") + header
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    parts += [t.detach().cpu().reshape(-1).view(torch.uint8) for t in tensors.values()]
    with torch.inference_mode(False):
        return torch.cat(parts)


def unpack(packed: Any, name: str) -> SavedState:
    """Return what :func:`pack` was given, on the CPU; ``name`` is the layer's, for errors.

    Raises:
        InputError: for anything that :func:`pack` does not make.
    """
    try:
        data = (to_local(packed) if is_sharded(packed) else packed).detach().cpu()
        head = bytes(data[:_LENGTH].tolist())
        end = _LENGTH + int.from_bytes(head, "little")
        header = json.loads(bytes(data[_LENGTH:end].tolist()))
        owner, tensors = dict(header["owner"]), {}
        for key, (dtype, shape) in header["tensors"].items():
            start, end = end, end + math.prod(shape) * _DTYPES[dtype].itemsize
            tensors[key] = data[start:end].clone().view(_DTYPES[dtype]).reshape(shape)
        if (data.dtype, tuple(data.shape)) != (torch.uint8, (end,)):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError):
        given = (
            f"{packed.dtype} {list(packed.shape)} on {packed.device}"
            if isinstance(packed, torch.Tensor)
            else type(packed).__name__
        )
        raise InputError(
            f"what recipes remember for {name} must be a tensor of bytes as its layer's state dict "
            f"has it, whole and unchanged, got {given} that is none; take this entry out of the "
            f"state dict to start anew."
        ) from None
    return SavedState(owner, tensors)


def recipe_to_values(recipe: Recipe) -> dict[str, Any]:
    """Return ``recipe`` as JSON values: the name of its class, and the fields that may have another
    value; a user's own function is given by its name.
    """
    values: dict[str, Any] = {"class": type(recipe).__name__}
    for field in dataclasses.fields(recipe):
        if not field.repr:  # fixed: TransformerEngine has it, and here it has one value
            continue
        value = getattr(recipe, field.name)
        if isinstance(value, QParams):
            value = vars(value)
        elif callable(value):
            value = getattr(value, "__qualname__", type(value).__qualname__)
        values[field.name] = value
    return json.loads(json.dumps(values))
