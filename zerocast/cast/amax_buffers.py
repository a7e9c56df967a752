"""AmaxBuffers: where the amaxes of a plan's weights are, and which of them ranks reduce.

Note: full and boundary
~~~~~~~~~~~~~~~~~~~~~~~
A scale belongs to a block, and a block to the rank that owns its first element. First elements
ascend as the numbers of blocks do, so the blocks of a plane that a rank owns are one range. A block
is *whole* where one rank owns all of its elements, and *cut* where two or more do.

The *full* exchange reduces all amaxes, and every rank makes every scale. The *boundary* exchange
reduces those of tensors and of cut blocks alone. A rank keeps the amaxes of the blocks around its
shard (:meth:`BlockGrid.touched`), makes the scales of the blocks that it owns
(:meth:`BlockGrid.owned`), and these travel with the codes
(:class:`zerocast.cast.scale_gather.ScaleGather`). Scales whose amaxes all ranks have anyway are
made by all ranks: that of a tensor of one block, those of blocks that reach across tensor-parallel
shards, and those of a weight without elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from zerocast.arguments import shown
from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.layout import BlockGrid, CutBlocks, Extent, Owners, Plane
from zerocast.tensors import QuantizedStorage
from zerocast.tensors.weight_operands import Amaxes

ExchangeKind = Literal["full", "boundary"]
"""What ranks exchange before a cast; see the note above."""

TENSOR = "tensor"
"""Stands for the tensor's amax where planes are named."""


def is_boundary(exchange: ExchangeKind) -> bool:
    """Whether the exchange is the boundary one; :class:`InputError` where it is none."""
    if exchange not in ("full", "boundary"):
        raise InputError(f"exchange must be 'full' or 'boundary', got {shown(exchange)}.")
    return exchange == "boundary"


def planes_by_owner(storage: QuantizedStorage) -> list[Plane]:
    """The planes whose scales their owners make in a boundary exchange."""
    if storage.recipe.has_one_block or not storage.shape.numel():
        return []
    return [plane for plane in storage.cast_planes if not storage.spans_tp_shards(plane)]


class AmaxBuffers:
    """The amaxes that ranks reduce, group after group, and those that this rank keeps.

    Args:
        storages: the plan's weights.
        extents: what this rank owns of each.
        members: by group the places of its weights, all weights once.
        owners: by group those of its members.
        labels: by weight that of its amax group, or None.
        device: where the buffers are.
        boundary: whether the exchange is the boundary one.

    Attributes:
        amaxes: by weight.
        tensor_amaxes: by weight int32 [1], that of the tensor.
        reduced: int32, what ranks reduce: of each group the amaxes of its weights (of each the
            planes that all ranks make scales of, then the tensor), then those of cut blocks.
        of_group: by group its range of ``reduced``.
        places: by weight, and by the name of a plane or :data:`TENSOR`, the ranges of ``reduced``.
    """

    def __init__(
        self,
        storages: Sequence[QuantizedStorage],
        extents: Sequence[Extent],
        members: Mapping[Communicator, Sequence[int]],
        owners: Mapping[Communicator, Owners],
        labels: Sequence[str | None],
        device: torch.device,
        *,
        boundary: bool,
    ) -> None:
        self.places: list[dict[str, range]] = [{} for _ in storages]
        # By weight and plane the blocks whose amaxes are kept, and where.
        kept_of: list[dict[str, tuple[range, int]]] = [{} for _ in storages]
        group_sizes: list[int] = []
        place = kept = 0
        kept_cut, reduced_cut = [], []
        for comm, indices in members.items():
            begin, firsts = place, []
            grids: list[tuple[int, BlockGrid]] = []  # of planes by owner
            for at, i in enumerate(indices):
                by_owner = planes_by_owner(storages[i]) if boundary else []
                for plane in storages[i].cast_planes:
                    if plane in by_owner:
                        blocks = plane.grid.touched(extents[i])
                        kept_of[i][plane.name] = blocks, kept
                        grids.append((at, plane.grid))
                        firsts.append(kept - blocks.start)
                        kept += len(blocks)
                    elif not storages[i].recipe.has_one_block:
                        self.places[i][plane.name] = range(place, place + plane.grid.num_blocks)
                        place += plane.grid.num_blocks
                self.places[i][TENSOR] = range(place, place + 1)
                place += 1
            cut = CutBlocks(grids, owners[comm])
            which, block, entry = cut.of_rank(comm.rank)
            kept_cut.append(torch.tensor(firsts, dtype=torch.int64, device="cpu")[which] + block)
            reduced_cut.append(entry + place)
            place += cut.count
            group_sizes.append(place - begin)
        self.reduced = torch.zeros(place, dtype=torch.int32, device=device)
        self.of_group = dict(zip(members, self.reduced.split(group_sizes), strict=True))
        self._kept = torch.zeros(kept, dtype=torch.int32, device=device)
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        self._kept_cut = torch.cat([nothing, *kept_cut]).to(device)
        self._reduced_cut = torch.cat([nothing, *reduced_cut]).to(device)

        leaders: dict[str, range] = {}
        for i, label in enumerate(labels):
            if label is not None and storages[i].recipe.scales_tensor:
                self.places[i][TENSOR] = leaders.setdefault(label, self.places[i][TENSOR])
        self.tensor_amaxes = [self.entries(places[TENSOR]) for places in self.places]
        self.amaxes = list(map(self._amaxes, storages, self.places, kept_of))

    def _amaxes(
        self,
        storage: QuantizedStorage,
        places: Mapping[str, range],
        kept_of: Mapping[str, tuple[range, int]],
    ) -> Amaxes:
        tensor = self.entries(places[TENSOR])
        if storage.recipe.has_one_block:
            return Amaxes(tensor, {"rowwise": tensor}, {})
        blocks = {name: self.entries(each) for name, each in places.items() if name != TENSOR}
        for name, (numbers, start) in kept_of.items():
            blocks[name] = self._kept[start : start + len(numbers)]
        return Amaxes(tensor, blocks, {name: each.start for name, (each, _) in kept_of.items()})

    def entries(self, places: range) -> torch.Tensor:
        """The entries of ``reduced`` at ``places``."""
        return self.reduced[places.start : places.stop]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory of the buffers."""
        return [self.reduced, self._kept, self._kept_cut, self._reduced_cut]

    def clear(self) -> None:
        """Set all amaxes to 0."""
        self.reduced.zero_()
        self._kept.zero_()

    def give_cut(self) -> None:
        """Put this rank's amaxes of cut blocks among those that are reduced."""
        if len(self._kept_cut):
            self.reduced[self._reduced_cut] = self._kept[self._kept_cut]

    def take_cut(self) -> None:
        """Take those that have been reduced."""
        if len(self._kept_cut):
            self._kept[self._kept_cut] = self.reduced[self._reduced_cut]
