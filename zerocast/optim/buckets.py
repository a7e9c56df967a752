"""Bucket: weights of one storage kind in flat buffers, of which each rank owns a range.

See "Note: columns" in :mod:`zerocast.optim.shards`, which combines buckets and masters.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.comm import Communicator
from zerocast.layout import Extent, FlatLayout
from zerocast.optim.pending_all_gather import PendingAllGather
from zerocast.optim.stepped_weights import StorageKind, Weight, restart_plain_master
from zerocast.tensors import QuantizedTensor, replace_raw_data

BUCKET_SIZE = 1 << 23
"""The default number of elements of a separately gathered bucket: 4 MiB of 4-bit codes. With larger
buckets the first layers wait for codes of later layers; smaller ones are bound by latency."""


@dataclass(frozen=True, slots=True)
class PlacedShard:
    """The part of one weight that one rank owns.

    Attributes:
        extent: the elements of the weight, possibly empty.
        columns: their positions in the rank's columns.
    """

    extent: Extent
    columns: slice


class Bucket:
    """Weights of one storage kind, stored end to end.

    Attributes:
        kind: the storage kind.
        members: the indices of the weights in the optimizer's list.
        layout: the offset of each weight and the range of each rank, in elements.
        first_column: the start of a rank's range in its columns.
        sizes: the number of entries of each of :attr:`flats`.
        flats: one buffer of ``kind.dtype`` for each plane, whole on every rank. Those of all code
            buckets are in one allocation.
        pending: the all-gather that uses of the weights wait for; None if the step waits.
    """

    def __init__(
        self,
        kind: StorageKind,
        members: Sequence[int],
        weights: Sequence[Weight],
        comm: Communicator,
        first_column: int,
    ) -> None:
        self.kind = kind
        self.pending: PendingAllGather | None = None
        self.members = members
        self.layout = FlatLayout(
            tuple(weights[i].param.numel() for i in members), comm.size, kind.alignment
        )
        self.first_column = first_column
        self.sizes = [kind.entries(self.layout.numel)] * kind.planes
        self.flats: list[torch.Tensor] = []
        self._member_sizes: torch.Tensor | None = None  # of one rank's range, computed when needed

    def shards(self, rank: int) -> list[PlacedShard]:
        """Return the shard of each member that ``rank`` owns."""
        first, places = self.first_column, self.layout.shard_slices(rank)
        return [
            PlacedShard(extent, slice(first + place.start, first + place.stop))
            for extent, place in zip(self.layout.shards(rank), places, strict=True)
        ]

    def adopt(self, weights: Sequence[Weight]) -> None:
        """Move the members into :attr:`flats`, keeping their values."""
        for i, extent in zip(self.members, self.layout.weight_extents(), strict=True):
            param = weights[i].param
            entries = slice(self.kind.entries(extent.start), self.kind.entries(extent.end))
            places = [flat[entries] for flat in self.flats]
            if isinstance(param, QuantizedTensor):
                replace_raw_data(param, *places)
            else:
                places[0].copy_(param.detach().reshape(-1))
                param.data = _with_own_storage(places[0]).view(param.shape)

    @property
    def plain_values(self) -> list[torch.Tensor]:
        """The flat values of each member of a bucket of plain weights."""
        return [self.flats[0][e.start : e.end] for e in self.layout.weight_extents()]

    def _ranges(self, rank: int, masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range of ``rank`` in the buffer, and in its ``masters``, FP32 [columns]."""
        own = masters[self.first_column :][: self.layout.rank_numel]
        return self.flats[0].view(self.layout.world_size, -1)[rank], own

    def store(self, rank: int, masters: torch.Tensor) -> None:
        """Round the ``masters`` of ``rank``, FP32 [columns], into its range. This is the cast of
        plain weights.
        """
        values, own = self._ranges(rank, masters)
        values.copy_(own)

    def restart(self, rank: int, masters: torch.Tensor, is_written: torch.Tensor) -> None:
        """Restart the ``masters`` of ``rank``, FP32 [columns], from its range, for plain members
        with ``is_written``, bool [len(members)].
        """
        if self._member_sizes is None:
            sizes = [extent.size for extent in self.layout.shards(rank)]
            sizes[-1] += self.layout.rank_numel - sum(sizes)  # padding is never written
            self._member_sizes = torch.tensor(sizes, dtype=torch.int64, device=masters.device)
        values, own = self._ranges(rank, masters)
        of_columns = is_written.repeat_interleave(self._member_sizes, output_size=len(own))
        restart_plain_master(own, values, of_columns)

    def all_gather(self, comm: Communicator) -> None:
        """All-gather the ranges of all ranks in place, with one collective for each buffer. With
        :attr:`pending`, only begin it.
        """
        if self.pending is not None:
            self.pending.begin(map(comm.start_all_gather_, self.flats))
            return
        for flat in self.flats:
            comm.all_gather_(flat)


def fill_buckets(
    weights: Sequence[Weight], size: int | None
) -> list[tuple[StorageKind, list[int]]]:
    """Return the storage kind and the indices of the weights of each bucket, in order.

    A bucket is closed when it holds ``size`` elements, or never if ``size`` is None. A weight of
    ``size`` elements or more gets a separate bucket, so that no other weight waits for it. Plain
    weights come first, so that a step can wait for them without waiting for codes.
    """
    buckets: list[tuple[StorageKind, list[int]]] = []
    filling: dict[StorageKind, list[int]] = {}
    held = Counter[StorageKind]()
    for i, weight in enumerate(weights):
        if size is not None and weight.param.numel() >= size:
            buckets.append((weight.kind, [i]))
            continue
        if weight.kind not in filling:
            filling[weight.kind] = []
            buckets.append((weight.kind, filling[weight.kind]))
        filling[weight.kind].append(i)
        held[weight.kind] += weight.param.numel()
        if size is not None and held[weight.kind] >= size:
            del filling[weight.kind], held[weight.kind]
    return sorted(buckets, key=lambda bucket: bucket[0].is_codes)


def _with_own_storage(piece: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory whose storage covers only that memory. Programs that save
    weights (safetensors, accelerate) treat tensors of one storage as copies of each other.
    """
    return torch.from_dlpack(piece) if piece.numel() else piece
