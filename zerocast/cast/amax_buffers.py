"""AmaxBuffers: the memory of the amaxes of a plan's weights, and which of them ranks reduce.

Note: full and boundary
~~~~~~~~~~~~~~~~~~~~~~~
A block, and its scale, belongs to the rank that owns the block's first element. First elements
ascend with block numbers, so the blocks of a plane that a rank owns are one range. A block
is *whole* if one rank owns all of its elements, and *cut* if two or more do.

The *full* exchange reduces all amaxes, and every rank makes every scale. The *boundary* exchange
reduces only those of tensors and of cut blocks. A rank keeps the amaxes of the blocks that its
shard touches (:meth:`BlockGrid.touched`), and makes the scales of the blocks that it owns
(:meth:`BlockGrid.owned`). These are gathered with the codes
(:class:`zerocast.cast.scale_gather.ScaleGather`). All ranks make the scales whose amaxes they
all have: of a tensor of one block, of blocks that span tensor-parallel shards, and of a weight
without elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from zerocast.arguments import check_choice
from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import Communicator
from zerocast.layout import BlockGrid, CutBlocks, Owners, Plane
from zerocast.tensors.owned_shard import OwnedShard
from zerocast.tensors.weight_operands import Amaxes

ExchangeKind = Literal["full", "boundary"]
"""What ranks exchange before a cast; see the note above."""

STEP_WORDS = 2
"""Words at the end of each group's entries; see "Note: a rank at another step" in
:mod:`zerocast.cast.exchange`."""


def is_boundary(exchange: ExchangeKind) -> bool:
    """Return whether the exchange is "boundary"; raise :class:`InputError` for an unknown one."""
    return check_choice("exchange", exchange, ("full", "boundary")) == "boundary"


def planes_by_owner(spec: ShardSpec) -> Sequence[Plane]:
    """Return a weight's planes whose scales the owners of blocks make in a boundary exchange."""
    storage = spec.storage
    if isinstance(storage, OwnedShard):
        return [plane for plane in storage.cast_planes if plane.name in storage.by_owner]
    return [plane for plane in storage.form.planes_by_block if not storage.spans_tp_shards(plane)]


class AmaxBuffers:
    """The amaxes that ranks reduce, ordered by group, and those that this rank keeps.

    Args:
        specs: the plan's weights, with what this rank owns of each.
        members: for each group the indices of its weights; every weight is in one group.
        owners: for each group the owners of its members.
        by_owner: for each weight the planes whose scales are made by the owners of their blocks.

    Attributes:
        amaxes: for each weight its amaxes.
        tensor_amaxes: for each weight the tensor's amax, int32 [1].
        reduced: int32, what ranks reduce. For each group: the amaxes of its weights (of each the
            planes whose scales all ranks make, then the tensor), then those of cut blocks, then
            :data:`STEP_WORDS` words for the step number.
        of_group: for each group its range of ``reduced``.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        members: Mapping[Communicator, Sequence[int]],
        owners: Mapping[Communicator, Owners],
        by_owner: Sequence[Sequence[Plane]],
    ) -> None:
        # The sizes of the amaxes of each plane and tensor, reduced and kept; and by weight and
        # plane the first block whose amax is kept.
        sizes, kept_sizes = list[int](), list[int]()
        first_blocks: dict[int, dict[str, int]] = {}
        group_sizes: list[int] = []
        place = kept = 0
        kept_cut, reduced_cut = [], []
        for comm, indices in members.items():
            begin, firsts = place, []
            grids: list[tuple[int, BlockGrid]] = []  # of planes in by_owner
            for at, i in enumerate(indices):
                storage = specs[i].storage
                for plane in storage.cast_planes:
                    if plane in by_owner[i]:
                        blocks = plane.grid.touched(specs[i].extent)
                        first_blocks.setdefault(i, {})[plane.name] = blocks.start
                        grids.append((at, plane.grid))
                        firsts.append(kept - blocks.start)
                        kept_sizes.append(len(blocks))
                        kept += len(blocks)
                    elif not storage.form.has_one_block:
                        sizes.append(plane.grid.num_blocks)
                        place += sizes[-1]
                sizes.append(1)
                place += 1
            cut = CutBlocks(grids, owners[comm])
            which, block, entry = cut.of_rank(comm.rank)
            kept_cut.append(torch.tensor(firsts, dtype=torch.int64, device="cpu")[which] + block)
            reduced_cut.append(entry + place)
            sizes.append(cut.count + (STEP_WORDS if indices else 0))
            place += sizes[-1]
            group_sizes.append(place - begin)
        device = specs[0].storage.device if specs else torch.device("cpu")
        self._entries = torch.zeros(place + kept, dtype=torch.int32, device=device)
        self.reduced, self._kept = self._entries.split([place, kept])
        self.of_group = dict(zip(members, self.reduced.split(group_sizes), strict=True))
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        self._kept_cut = torch.cat([nothing, *kept_cut]).to(device)
        self._reduced_cut = torch.cat([nothing, *reduced_cut]).to(device)
        self._has_cut = self._kept_cut.numel() > 0

        reduced, own = iter(self.reduced.split(sizes)), iter(self._kept.split(kept_sizes))
        leaders: dict[str, torch.Tensor] = {}
        tensors: dict[int, torch.Tensor] = {}
        found: dict[int, Amaxes] = {}
        none: dict[str, int] = {}
        for indices in members.values():
            for i in indices:
                storage, label = specs[i].storage, specs[i].amax_group
                kept_of = first_blocks.get(i, none)
                by_plane: dict[str, torch.Tensor] = {}
                for plane in () if storage.form.has_one_block else storage.cast_planes:
                    by_plane[plane.name] = next(own if plane.name in kept_of else reduced)
                tensor = next(reduced)
                if label is not None and storage.recipe.scales_tensor:
                    tensor = leaders.setdefault(label, tensor)
                if storage.form.has_one_block:
                    by_plane["rowwise"] = tensor
                tensors[i], found[i] = tensor, Amaxes(tensor, by_plane, kept_of)
            next(reduced)  # the amaxes of cut blocks, and the step
        self.tensor_amaxes = [tensors[i] for i in range(len(specs))]
        self.amaxes = [found[i] for i in range(len(specs))]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory of the buffers."""
        return [self._entries, self._kept_cut, self._reduced_cut]

    def clear(self) -> None:
        """Set all amaxes to 0."""
        self._entries.zero_()

    def give_cut(self) -> None:
        """Copy this rank's amaxes of cut blocks into those that are reduced."""
        if self._has_cut:
            self.reduced[self._reduced_cut] = self._kept[self._kept_cut]

    def take_cut(self) -> None:
        """Copy the reduced amaxes of cut blocks back."""
        if self._has_cut:
            self._kept[self._kept_cut] = self.reduced[self._reduced_cut]
