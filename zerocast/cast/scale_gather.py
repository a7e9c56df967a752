"""ScaleGather: the scales that their blocks' owners made, brought to every rank.

They travel one a block, and without the repeats and the padding of stored planes, which are made
after the gather (``expand_scales``). Rank r's part is its scales, weight by weight and plane by
plane; parts follow each other in rank order. Where one rank owns all blocks of a plane, its scales
are read where they arrive; those that several ranks own are put together first.

Each part is cut into segments of whole words, one a plane, so that scales of any dtype may stand in
one buffer: one all-gather for all planes of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import Communicator
from zerocast.layout import Extent, Owners, Plane, round_up
from zerocast.tensors import QuantizedStorage
from zerocast.tensors.owned_shard import OwnedShard, OwnScales

_ALIGNMENT = 16
"""Bytes: what a kernel stores at once."""

_Part: TypeAlias = "tuple[range, torch.Tensor]"
"""Blocks of a plane that one rank owns, and where their scales arrive."""


def scale_gathers(
    specs: Sequence[ShardSpec],
    members: Mapping[Communicator, Sequence[int]],
    owners: Mapping[Communicator, Owners],
    by_owner: Sequence[Sequence[Plane]],
) -> list[ScaleGather]:
    """The gathers of all groups of which any rank makes scales for the others, but for those that
    their caller gathers.

    Args:
        specs: the weights.
        members: by group the places of its weights.
        owners: by group those of its members.
        by_owner: by weight the planes whose scales their blocks' owners make.
    """
    pairs = zip(specs, by_owner, strict=True)
    planes = [[] if isinstance(spec.storage, OwnedShard) else own for spec, own in pairs]
    return [
        ScaleGather(comm, {i: (specs[i].storage, planes[i]) for i in indices}, owners[comm])
        for comm, indices in members.items()
        if any(planes[i] for i in indices)
    ]


class ScaleGather:
    """The scales of one group's weights, one a block, as they travel.

    Args:
        comm: the group.
        weights: by place in the plan those of the group, in order, and the planes whose scales
            travel.
        owners: of these, counted from 0.
        is_kept: whether :attr:`compact` has memory from now on, for every gather; else after one.

    Attributes:
        own: by place in the plan and name of a plane, what this rank makes.
        compact: by the same, all scales of the plane, once gathered.
    """

    def __init__(
        self,
        comm: Communicator,
        weights: Mapping[int, tuple[QuantizedStorage, Sequence[Plane]]],
        owners: Owners,
        *,
        is_kept: bool = True,
    ) -> None:
        self._comm = comm
        self.own: dict[int, dict[str, OwnScales]] = {i: {} for i in weights}
        self.compact: dict[int, dict[str, torch.Tensor]] = {i: {} for i in weights}
        planes = {i: of_weight for i, (_, of_weight) in weights.items()}
        places = list(weights)
        dtypes = {i: storage.form.numerics.scale_dtype for i, (storage, _) in weights.items()}
        # Of each plane the ranks that own blocks, which, and the first byte of their scales.
        segments: dict[tuple[int, str], list[tuple[int, range, int]]] = {
            (i, plane.name): [] for i in weights for plane in planes[i]
        }
        self._counts = [0] * comm.size
        end = 0
        for at, rank, start, stop in owners.by_rank():
            i = places[at]
            for plane in planes[i]:
                blocks = plane.grid.owned(Extent(start, stop))
                segments[i, plane.name].append((rank, blocks, end))
                nbytes = round_up(len(blocks) * dtypes[i].itemsize, _ALIGNMENT)
                self._counts[rank] += nbytes
                end += nbytes
        device = weights[places[0]][0].device
        self._gathered = torch.zeros(end, dtype=torch.uint8, device=device)
        self._typed = {each: self._gathered.view(each) for each in set(dtypes.values())}
        self._none = {each: OwnScales(range(0), all_[:0]) for each, all_ in self._typed.items()}
        self._pieces: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # to, from
        self._without_room: list[tuple[int, str, list[_Part], torch.dtype]] = []
        for (i, name), of_plane in segments.items():
            found = [
                (rank, blocks, self._arrived(first, len(blocks), dtypes[i]))
                for rank, blocks, first in of_plane
            ]
            self.own[i][name] = self._none[dtypes[i]]
            for rank, blocks, arrived in found:
                if rank == comm.rank:
                    self.own[i][name] = OwnScales(blocks, arrived)
            self._without_room.append((i, name, [part[1:] for part in found], dtypes[i]))
            if is_kept:
                self._make_room()

    def _arrived(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """So many scales from a byte on, as they arrive."""
        begin = first // dtype.itemsize
        return self._typed[dtype][begin : begin + count]

    def _make_room(self) -> None:
        """Make room where all scales of one plane are put together after a gather, for the planes
        that have none; a single part stays where it arrives.
        """
        while self._without_room:
            i, name, parts, dtype = self._without_room.pop()
            if len(parts) == 1:
                self.compact[i][name] = parts[0][1]
                continue
            total = sum(len(blocks) for blocks, _ in parts)
            whole = torch.empty(total, dtype=dtype, device=self._gathered.device)
            self.compact[i][name] = whole
            self._pieces[0].extend(whole[blocks.start : blocks.stop] for blocks, _ in parts)
            self._pieces[1].extend(arrived for _, arrived in parts)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory of the scales as they travel."""
        return [self._gathered, *(each for of in self.compact.values() for each in of.values())]

    def start(self) -> Callable[[], None]:
        """Begin to make every rank hold the scales of all of them; what is returned ends it."""
        wait = self._comm.start_all_gather_(self._gathered, self._counts)

        def finish() -> None:
            wait()
            self._make_room()
            if self._pieces[0]:
                torch._foreach_copy_(*self._pieces)

        return finish
