"""Layers whose weight is a master that FSDP2 all-gathers in codes (:mod:`zerocast.sharded`), or,
where tensor parallelism alone splits it, that the layer itself casts.
"""

from __future__ import annotations

from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.layout import Source
from zerocast.nn.saved_state import pack, unpack
from zerocast.recipes import Recipe
from zerocast.sharded.amax_group import AmaxGroup
from zerocast.sharded.casts import CastGroup, ungathered_weight
from zerocast.sharded.low_bit_all_gather import LowBitAllGather
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.placement import replicated_like, to_local

WEIGHT_STATE = "weight_state"
"""The entry of a layer's state dict that holds what its master's recipe remembers."""


class CastMaster(torch.autograd.Function):
    """``CastMaster.apply(master, unit)``: the codes of a :class:`MasterWeight` [M, K] that nobody
    gathers, cast with the others of its ``unit``; the gradient flows through as it is
    (straight-through).

    They are cast once for each value of the master, and ahead of the forward where
    :func:`zerocast.sharded.precompute_scales_for_fsdp` is called.
    """

    @staticmethod
    def forward(ctx: Any, master: MasterWeight, cast_group: CastGroup) -> torch.Tensor:
        return ungathered_weight(master.low_bit_all_gather, cast_group, master)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def master_parameter(weight: torch.Tensor, recipe: Recipe, *, name: str) -> torch.nn.Parameter:
    """``weight`` as a master: the same memory, shape and dtype."""
    gather = LowBitAllGather(weight.shape, recipe, name)
    return torch.nn.Parameter(MasterWeight(weight.detach(), gather), weight.requires_grad)


def check_gathers(recipe: Recipe) -> None:
    """Raise :class:`InputError` where ``recipe`` cannot cast a weight from shards of its
    master.
    """
    if recipe.columnwise_source is Source.TRANSPOSED_MASTER:
        raise InputError(
            f"a weight that is all-gathered in codes needs a recipe whose columnwise copy follows "
            f"from shards of the master, got {recipe}, which casts the transposed tensor; give "
            f"weights blocks of two dimensions."
        )


def reserve_state(layer: torch.nn.Linear) -> None:
    """Have an entry of the state dict for what the recipe of the layer's master remembers.

    torch's functions for state dicts of sharded models look for each entry among parameters and
    buffers. This buffer stands for that one and is empty: what is saved is made then.
    """
    empty = torch.empty(0, dtype=torch.uint8, device=layer.weight.device)
    layer.register_buffer(WEIGHT_STATE, empty)


def state_to_save(weight: torch.Tensor, group: AmaxGroup | None) -> torch.Tensor:
    """What the recipe of a master, of an amax ``group`` or none, remembers, as one tensor
    (:mod:`zerocast.nn.saved_state`) for a state dict that holds the master, too.
    """
    master = to_local(weight)
    assert isinstance(master, MasterWeight)
    gather = master.low_bit_all_gather
    is_due = gather.is_due(master.value) or (group is not None and group.is_due)
    return replicated_like([weight], pack({}, gather.state_before_cast(is_due=is_due)))


def load_saved_state(weight: torch.Tensor, state: torch.Tensor) -> None:
    """Go on from what :func:`state_to_save` gave. A weight that is no master has no use for it.

    Raises:
        InputError: where it was saved under another recipe, or is no state at all. Nothing has
            been changed.
    """
    master = to_local(weight)
    if isinstance(master, MasterWeight):
        gather = master.low_bit_all_gather
        gather.load_state(unpack(state, gather.name).tensors)
