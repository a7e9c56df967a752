"""Layers whose weight is a master that FSDP2 all-gathers in codes (:mod:`zerocast.fsdp`)."""

from __future__ import annotations

import torch

from zerocast.errors import InputError
from zerocast.fsdp.low_bit_gather import LowBitGather
from zerocast.fsdp.master_weight import MasterWeight
from zerocast.recipes import Recipe


def master_parameter(weight: torch.Tensor, recipe: Recipe, *, name: str) -> torch.nn.Parameter:
    """``weight`` as a master: the same memory, shape and dtype."""
    gather = LowBitGather(weight.shape, recipe, name)
    return torch.nn.Parameter(MasterWeight(weight.detach(), gather), weight.requires_grad)


def check_gathers(recipe: Recipe) -> None:
    """Raise :class:`InputError` where ``recipe`` cannot cast a weight from shards of its
    master.
    """
    if recipe.casts_transpose:
        raise InputError(
            f"a weight that is all-gathered in codes needs a recipe whose columnwise copy follows "
            f"from shards of the master, got {recipe}, which casts the transposed tensor; give "
            f"weights blocks of two dimensions."
        )
