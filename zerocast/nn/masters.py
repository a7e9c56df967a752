"""Layers whose weight is a master (:mod:`zerocast.sharded`): how it is made, saved and loaded."""

from __future__ import annotations

import torch

from zerocast.errors import InputError
from zerocast.layout import Source
from zerocast.nn.saved_state import pack, unpack
from zerocast.recipes import Recipe
from zerocast.sharded import LowBitAllGather, MasterWeight
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.casts import AmaxGroup
from zerocast.sharded.placement import replicated_like, to_local

WEIGHT_STATE = "weight_state"
"""The entry of a layer's state dict that holds the recipe's state of its master."""


def master_parameter(weight: torch.Tensor, recipe: Recipe, *, name: str) -> torch.nn.Parameter:
    """Return ``weight`` as a master: the same memory, shape and dtype."""
    gather = LowBitAllGather(weight.shape, recipe, name)
    return torch.nn.Parameter(MasterWeight(weight.detach(), gather), weight.requires_grad)


def check_gathers(recipe: Recipe) -> None:
    """Raise :class:`InputError` if ``recipe`` cannot cast a weight from shards of its
    master.
    """
    if recipe.columnwise_source is Source.TRANSPOSED_MASTER:
        raise InputError(
            f"a weight that is all-gathered in codes needs a recipe whose columnwise copy follows "
            f"from shards of the master, got {recipe}, which casts the transposed tensor; give "
            f"weights blocks of two dimensions."
        )


def reserve_state(layer: torch.nn.Linear) -> None:
    """Reserve an entry of the state dict for the recipe's state of the layer's master.

    torch's functions for state dicts of sharded models look for each entry among parameters and
    buffers. This buffer stands for that one and is empty: what is saved is made then.
    """
    empty = torch.empty(0, dtype=torch.uint8, device=layer.weight.device)
    layer.register_buffer(WEIGHT_STATE, empty)


def state_to_save(weight: torch.Tensor, group: AmaxGroup | None) -> torch.Tensor:
    """Return the recipe's state of a master, of an amax ``group`` or none, as one tensor
    (:mod:`zerocast.nn.saved_state`) for a state dict that holds the master, too.
    """
    master = to_local(weight)
    assert isinstance(master, MasterWeight)
    gather = master.low_bit_all_gather
    is_due = gather.is_due(master.value) or (group is not None and group.is_due)
    return replicated_like([weight], pack({}, gather.state_before_cast(is_due=is_due)))


def load_saved_state(weight: torch.Tensor, state: torch.Tensor) -> None:
    """Resume from what :func:`state_to_save` returned; ignore it for a weight that is no master.

    Raises:
        InputError: if it was saved under another recipe, or is no state at all. Nothing has
            been changed.
    """
    gather = gather_of(weight)
    if gather is not None:
        gather.load_state(unpack(state, gather.name).tensors)
