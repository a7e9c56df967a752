"""AmaxGroup: layers whose masters share one tensor amax, and are therefore cast together.

FSDP2 gathers one parameter after the other, and a shared amax takes all of them. So the first of a
group that is gathered while a cast is due casts them all: every rank has its rows of each then, for
FSDP2 shards its parameters between a step and the gathers that follow. The others find their codes
made. It follows that the members of a group are sharded over the same ranks and gathered in one
dtype, in one FSDP module or in several.

A group is known by its layers, and a layer knows its group, so copies of a model have groups of
their own.
"""

from __future__ import annotations

from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.sharded.casts import CastGroupMember
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.placement import is_sharded, to_local


class AmaxGroup:
    """Layers whose weights share one tensor amax.

    Attributes:
        layers: one for each weight.
    """

    def __init__(self) -> None:
        self.layers: list[torch.nn.Module] = []
        self._members: dict[int, CastGroupMember] = {}  # by place in layers, as they were seen last

    def members(self) -> list[CastGroupMember]:
        """This rank's rows of each master, of one that is gathered now as it was before.

        Raises:
            InputError: where the weights are not sharded alike. The ranks that share them find the
                same.
        """
        first: torch.Tensor | None = None
        for i, layer in enumerate(self.layers):
            weight = layer.weight
            assert isinstance(weight, torch.Tensor)
            rows = to_local(weight)
            if not isinstance(rows, MasterWeight):
                continue  # gathered
            first = weight if first is None else first
            if _place(weight) != _place(first) or not is_sharded(weight):
                raise _not_alike(first, weight)
            self._members[i] = CastGroupMember(rows.low_bit_all_gather, rows.value, weight)
        return [self._members[i] for i in range(len(self.layers))]

    @property
    def is_due(self) -> bool:
        """Whether this rank has written any of the masters since their latest cast."""
        return any(gather.is_due(master) for gather, master, _ in self.members())

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the layers."""
        return {"layers": self.layers, "_members": {}}


def _place(weight: torch.Tensor) -> object:
    """Over which ranks a weight is sharded, and how."""
    return (weight.device_mesh, weight.placements) if is_sharded(weight) else None


def _not_alike(*weights: torch.Tensor) -> InputError:
    given = []
    for weight in weights:
        master = to_local(weight)
        assert isinstance(master, MasterWeight)
        place = f"over {_place(weight)}" if is_sharded(weight) else "not at all"
        given.append(f"{master.low_bit_all_gather.name} {place}")
    return InputError(
        f"weights of one amax group are cast together, when the first of them is gathered, so "
        f"fully_shard must shard them over the same ranks, got {' and '.join(given)}; call it on "
        f"all their layers, or modules around them, with one mesh, or leave one out of amax_groups."
    )
