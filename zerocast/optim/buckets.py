"""Bucket: weights of one storage kind in flat buffers, of which each rank owns a range.

See "Note: columns" in :mod:`zerocast.optim.shards`, which puts buckets and masters together.
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
"""Elements of a bucket that is waited for by itself: 4 MiB of 4-bit codes. In larger ones the first
layers wait for codes of later ones; smaller ones are bound by latency."""


@dataclass(frozen=True, slots=True)
class PlacedShard:
    """What one rank owns of one weight.

    Attributes:
        extent: the elements of the weight, possibly none.
        columns: where they stand in the rank's columns.
    """

    extent: Extent
    columns: slice


class Bucket:
    """Weights of one storage kind, end to end.

    Attributes:
        kind: how they are stored.
        members: their places in the optimizer's list of weights.
        layout: where each lies and who owns what, in elements.
        first_column: where the owner's range begins in its columns.
        sizes: the entries of each of :attr:`flats`.
        flats: the buffers, one a plane, whole on every rank, of ``kind.dtype``; of the buckets
            that hold codes all in one allocation.
        pending: what uses of the weights wait for; None where the step does.
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
        self._member_sizes: torch.Tensor | None = None  # of one rank's range, when first asked

    def shards(self, rank: int) -> list[PlacedShard]:
        """Return what ``rank`` owns of each member."""
        first, places = self.first_column, self.layout.shard_slices(rank)
        return [
            PlacedShard(extent, slice(first + place.start, first + place.stop))
            for extent, place in zip(self.layout.shards(rank), places, strict=True)
        ]

    def adopt(self, weights: Sequence[Weight]) -> None:
        """Move the members into :attr:`flats`, values kept."""
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
        """Each member's values in a buffer that holds no codes, flat."""
        return [self.flats[0][e.start : e.end] for e in self.layout.weight_extents()]

    def _ranges(self, rank: int, masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``rank``'s range of the buffer, and of its masters, FP32 [columns]."""
        own = masters[self.first_column :][: self.layout.rank_numel]
        return self.flats[0].view(self.layout.world_size, -1)[rank], own

    def store(self, rank: int, masters: torch.Tensor) -> None:
        """Round ``rank``'s masters, FP32 [columns], into its range: the cast of plain weights."""
        values, own = self._ranges(rank, masters)
        values.copy_(own)

    def restart(self, rank: int, masters: torch.Tensor, is_written: torch.Tensor) -> None:
        """Let ``rank``'s masters, FP32 [columns], start from its range, of those plain members that
        are written, bool [len(members)].
        """
        if self._member_sizes is None:
            sizes = [extent.size for extent in self.layout.shards(rank)]
            sizes[-1] += self.layout.rank_numel - sum(sizes)  # what pads the range is never written
            self._member_sizes = torch.tensor(sizes, dtype=torch.int64, device=masters.device)
        values, own = self._ranges(rank, masters)
        of_columns = is_written.repeat_interleave(self._member_sizes, output_size=len(own))
        restart_plain_master(own, values, of_columns)

    def all_gather(self, comm: Communicator) -> None:
        """Gather every rank's range on every rank: in place, one collective a buffer. Where uses
        of the weights wait it is only begun.
        """
        if self.pending is not None:
            self.pending.begin(map(comm.start_all_gather_, self.flats))
            return
        for flat in self.flats:
            comm.all_gather_(flat)


def fill_buckets(
    weights: Sequence[Weight], size: int | None
) -> list[tuple[StorageKind, list[int]]]:
    """Return the places of the weights of each bucket, in order, and how they are stored.

    A bucket is closed as soon as it holds ``size`` elements; never where that is None. A weight
    that fills one has it alone, so that no other waits for it: an embedding among biases. Plain
    weights come first, so that a step that waits for them alone need not wait for codes.
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
    """Return the same memory as a tensor whose storage is no more than that: programs that save
    weights take tensors of one storage for copies of each other (safetensors, accelerate).
    """
    return torch.from_dlpack(piece) if piece.numel() else piece
