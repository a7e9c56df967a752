"""Codes to values, also where torch.compile traces.

A backend may call a native library, which a tracing compiler cannot look into; a registered torch
operation it takes as one opaque call with known output. The recipe crosses that border as text,
and all of it: a compiled graph may be loaded from a cache by a process that never traced it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache

import torch

from zerocast.backends import backend_for
from zerocast.recipes import RECIPES, Recipe
from zerocast.tensors.storage import QuantizedStorage


def dequantize(storage: QuantizedStorage) -> torch.Tensor:
    """[storage.shape] FP32: the values that the present codes mean."""
    recipe = storage.recipe
    names = recipe.buffers(storage.shape, columnwise=False)
    buffers = [storage.buffers[name] for name in names]
    # A tracer's tensors are of a class of its own. Outside it, the operation's detour through
    # torch's dispatcher costs more than decoding a small weight, and loads the compiler at first.
    if type(buffers[0]) is torch.Tensor and not torch.compiler.is_compiling():
        return _decode(buffers, storage.shape, recipe)
    return _traceable_decode(buffers, storage.shape, _to_text(recipe))


def _decode(buffers: Sequence[torch.Tensor], shape: Sequence[int], recipe: Recipe) -> torch.Tensor:
    """``buffers`` are those of ``recipe.buffers(shape, columnwise=False)``, in that order."""
    device = buffers[0].device
    out = torch.empty(shape, dtype=torch.float32, device=device)
    named = dict(zip(recipe.buffers(shape, columnwise=False), buffers, strict=True))
    target = recipe.dequantize_target(shape, named, out.view(-1, shape[-1]))
    recipe.dequantize(backend_for(device), [target])()
    return out


@torch.library.custom_op(
    "zerocast::dequantize",
    mutates_args=(),
    schema="(Tensor[] buffers, int[] shape, str recipe) -> Tensor",
)
def _traceable_decode(buffers: list[torch.Tensor], shape: list[int], recipe: str) -> torch.Tensor:
    return _decode(buffers, shape, _from_text(recipe))


@_traceable_decode.register_fake
def _(buffers: list[torch.Tensor], shape: list[int], recipe: str) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=buffers[0].device)


def _to_text(recipe: Recipe) -> str:
    return json.dumps([type(recipe).__name__, asdict(recipe)])


@cache
def _from_text(text: str) -> Recipe:
    name, fields = json.loads(text)
    return {kind.__name__: kind for kind in RECIPES.values()}[name](**fields)
