"""AmaxGroup: layers whose masters share one tensor amax under FSDP2."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from zerocast.errors import InputError
from zerocast.sharded.all_gather import LowBitAllGather, gather_of
from zerocast.sharded.placement import is_sharded

CastGroup: TypeAlias = Sequence[LowBitAllGather]
"""Weights that are cast together: one, or those of an amax group."""


class AmaxGroup:
    """Layers whose masters share one tensor amax, and are therefore cast together.

    FSDP2 gathers one parameter after the other, and a shared amax takes all of them. So the first
    of a group that is gathered while a cast is due casts them all: every rank has its rows of each
    then, because FSDP2 shards its parameters between a step and the gathers that follow. The
    others find their codes made. It follows that the members of a group are sharded over the same
    ranks and gathered in one dtype, in one FSDP module or in several.

    A group is known by its layers, and a layer knows its group, so copies of a model have groups of
    their own.

    Args:
        dissolves: whether the group ends, and nothing is raised, where its layers are not sharded
            or gathered alike, because nobody has named it.

    Attributes:
        dissolves: as given.
        layers: one for each weight.
    """

    def __init__(self, *, dissolves: bool = False) -> None:
        self.dissolves = dissolves
        self.layers: list[torch.nn.Module] = []
        self._members: dict[int, LowBitAllGather] = {}  # by place in layers

    def members(self) -> CastGroup:
        """Return the all-gather of each weight; none if the group has dissolved.

        Raises:
            InputError: if the weights are not sharded alike. The ranks that share them find the
                same.
        """
        for i, layer in enumerate(self.layers):
            weight = layer.weight
            assert isinstance(weight, torch.Tensor)
            if (gather := gather_of(weight)) is not None:  # else gathered now, and found before
                gather.find(weight)
                self._members[i] = gather
        members = [self._members[i] for i in range(len(self.layers))]
        places = [_placement(member.parameter) for member in members]
        for member, place in zip(members, places, strict=True):
            if place is None or place != places[0]:
                if self.dissolves:
                    self.dissolve()
                    return []
                first, other = (f"over {p}" if p else "not at all" for p in (places[0], place))
                raise InputError(
                    f"weights of one amax group are cast together, when the first of them is "
                    f"gathered, so fully_shard must shard them over the same ranks, got "
                    f"{members[0].name} {first} and {member.name} {other}; call it on all their "
                    f"layers, or modules around them, with one mesh, or leave one out of "
                    f"amax_groups."
                )
        return members

    def dissolve(self) -> None:
        """End the group: each of its layers is cast alone from now on."""
        for layer in self.layers:
            vars(layer)["amax_group"] = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the layers, for copies and pickles."""
        return {"layers": self.layers, "_members": {}, "dissolves": self.dissolves}


def _placement(weight: torch.Tensor) -> object:
    """Return over which ranks a weight is sharded, and how; None if it is not."""
    return (weight.device_mesh, weight.placements) if is_sharded(weight) else None
