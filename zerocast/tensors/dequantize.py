"""Codes to values, as an operation that torch.compile can keep in a graph.

A backend may call a native library, which a tracing compiler cannot look into; a registered torch
operation it takes as one opaque call with known output. The recipe crosses that border as text, by
which it is found again here.
"""

from __future__ import annotations

import torch

from zerocast.backends import backend_for
from zerocast.recipes import Recipe
from zerocast.tensors.storage import QuantizedStorage

_recipes: dict[str, Recipe] = {}


def dequantize(storage: QuantizedStorage) -> torch.Tensor:
    """[storage.shape] FP32: the values that the present codes mean."""
    recipe = storage.recipe
    key = repr(recipe)
    _recipes.setdefault(key, recipe)
    names = recipe.buffers(storage.shape, columnwise=False)
    return _dequantize([storage.buffers[name] for name in names], storage.shape, key)


@torch.library.custom_op(
    "zerocast::dequantize",
    mutates_args=(),
    schema="(Tensor[] buffers, int[] shape, str recipe) -> Tensor",
)
def _dequantize(buffers: list[torch.Tensor], shape: list[int], key: str) -> torch.Tensor:
    recipe = _recipes[key]
    device = buffers[0].device
    out = torch.empty(shape, dtype=torch.float32, device=device)
    named = dict(zip(recipe.buffers(shape, columnwise=False), buffers, strict=True))
    recipe.dequantize(
        backend_for(device), [recipe.dequantize_target(shape, named, out.view(-1, shape[-1]))]
    )()
    return out


@_dequantize.register_fake
def _(buffers: list[torch.Tensor], shape: list[int], key: str) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=buffers[0].device)
