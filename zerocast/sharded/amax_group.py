"""AmaxGroup: layers whose masters share one tensor amax under FSDP2."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from zerocast.errors import InputError
from zerocast.sharded.all_gather import LowBitAllGather, gather_of
from zerocast.sharded.placement import is_sharded

CastGroup: TypeAlias = Sequence[LowBitAllGather]
"""The weights that are cast together: a single one, or those of an amax group."""


class AmaxGroup:
    """Layers whose masters share one tensor amax, and are therefore cast together.

    FSDP2 gathers parameters one by one, but a shared amax needs all of them. So when a cast is due,
    the first gathered weight of a group casts all: every rank then has its rows of each, because
    FSDP2 shards its parameters between a step and the next gathers. The other gathers reuse these
    codes. Therefore the members of a group must be sharded over the same ranks and gathered in one
    dtype, in one FSDP module or in several.

    A group refers to its layers and each layer to its group, so copying a model copies its groups.

    Args:
        dissolves: whether the group ends, instead of raising, if its layers are not sharded or
            gathered alike. This is for groups that the user has not named.

    Attributes:
        dissolves: as given.
        layers: one layer for each weight.
    """

    def __init__(self, *, dissolves: bool = False) -> None:
        self.dissolves = dissolves
        self.layers: list[torch.nn.Module] = []
        self._members: dict[int, LowBitAllGather] = {}  # by place in layers

    def members(self) -> CastGroup:
        """Return the gather of each weight; an empty list if the group has dissolved.

        Raises:
            InputError: on all ranks that share them, if the weights are not sharded alike.
        """
        for i, layer in enumerate(self.layers):
            weight = layer.weight
            assert isinstance(weight, torch.Tensor)
            if (gather := gather_of(weight)) is not None:  # else it is gathered, and was noted
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
                    "weights of one amax group are cast together, when the first of them is "
                    "gathered, so fully_shard must shard them over the same ranks, got "
                    f"{members[0].name} {first} and {member.name} {other}; call it on all their "
                    "layers, or modules around them, with one mesh, or remove one from amax_groups."
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
    """Return the mesh and the placements of a sharded weight; None if it is not sharded."""
    return (weight.device_mesh, weight.placements) if is_sharded(weight) else None
