"""ScaleGather: the all-gather of the scales that the owners of blocks made.

One scale per block is sent, without the repeats and padding of stored planes; ``expand_scales``
makes these after the gather. Rank r's part is its scales, weight by weight and plane by
plane; parts are in rank order. If one rank owns all blocks of a plane, its scales are read from the
gather buffer. If several ranks own them, they are first copied together.

Each part consists of aligned segments, one per plane, so that one buffer holds scales of any dtype:
one all-gather for all planes of a group.
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
"""In bytes: what a kernel stores at once."""

_Part: TypeAlias = "tuple[range, torch.Tensor]"
"""Blocks of a plane that one rank owns, and the part of the gather buffer with their scales."""


def scale_gathers(
    specs: Sequence[ShardSpec],
    members: Mapping[Communicator, Sequence[int]],
    owners: Mapping[Communicator, Owners],
    by_owner: Sequence[Sequence[Plane]],
) -> list[ScaleGather]:
    """Return the gathers of the groups in which owners of blocks make scales for the other ranks.

    Scales that the caller gathers (:class:`OwnedShard`) are left out.

    Args:
        specs: the weights.
        members: for each group the indices of its weights.
        owners: for each group the owners of its members.
        by_owner: for each weight the planes whose scales are made by the owners of their blocks.
    """
    pairs = zip(specs, by_owner, strict=True)
    planes = [[] if isinstance(spec.storage, OwnedShard) else own for spec, own in pairs]
    return [
        ScaleGather(comm, {i: (specs[i].storage, planes[i]) for i in indices}, owners[comm])
        for comm, indices in members.items()
        if any(planes[i] for i in indices)
    ]


class ScaleGather:
    """The gather of the scales of one group's weights, one per block.

    Args:
        comm: the group.
        weights: the group's weights in order, by index in the plan, with the planes whose scales
            are gathered.
        owners: the owners of these weights, counted from 0.
        is_kept: allocate :attr:`compact` now, for every gather; otherwise after the first gather.

    Attributes:
        own: by index in the plan and plane name, the scales that this rank makes.
        compact: by the same keys, all scales of the plane, once gathered.
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
        # For each plane the ranks that own blocks, the blocks, and the first byte of their scales.
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
        """Return the part of the gather buffer with ``count`` scales from byte ``first``."""
        begin = first // dtype.itemsize
        return self._typed[dtype][begin : begin + count]

    def _make_room(self) -> None:
        """Allocate the tensors in which scales of several parts are copied together, once.

        The scales of a plane with a single part are read from the gather buffer.
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
        """All memory of the gather."""
        return [self._gathered, *(each for of in self.compact.values() for each in of.values())]

    def start(self) -> Callable[[], None]:
        """Start the gather of all ranks' scales; return the function that ends it."""
        wait = self._comm.start_all_gather_(self._gathered, self._counts)

        def finish() -> None:
            wait()
            self._make_room()
            if self._pieces[0]:
                torch._foreach_copy_(*self._pieces)

        return finish
