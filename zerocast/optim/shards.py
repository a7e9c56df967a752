"""Where the weights lie, and which rank owns what: flat buffers, FP32 masters, the all-gather.

Note: columns
~~~~~~~~~~~~~
Weights of one storage kind lie end to end in one flat buffer or in several (a :class:`Bucket`; one
buffer for each plane of codes), of which each rank owns one equal, contiguous range; a weight's
codes are a view into it, so the cast writes a byte where the all-gather moves it. What a rank owns
of all buckets, one range after the other, are its *columns*: its masters are one FP32 tensor
[columns], and so are its reduced gradients. Every rank has as many columns, so a gradient buffer is
a matrix [ranks, columns] and one reduce-scatter serves all kinds of weights::

    bucket of 4-bit codes   |  rank 0  |  rank 1  |        bucket of BF16   | rank 0 | rank 1 |
                                 |          |                                   |        |
    columns of rank 0       [  4-bit   | BF16  ]  <-----------------------------+        |
    columns of rank 1       [  4-bit   | BF16  ]  <--------------------------------------+
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zerocast.arguments import check_flag
from zerocast.cast.copied_digests import CopiesInPlace
from zerocast.cast.flat_plan import allocate_together, lay_together
from zerocast.comm import Communicator, raise_together
from zerocast.errors import InputError, ZerocastError
from zerocast.layout import Extent, FlatLayout
from zerocast.optim.pending_all_gather import PendingAllGather
from zerocast.optim.places import Places
from zerocast.optim.weights import StorageKind, Weight, restart_master, restart_plain_master
from zerocast.tensors import QuantizedStorage, QuantizedTensor, replace_raw_data
from zerocast.tensors.digest import TakenDigests

BUCKET_SIZE = 1 << 23
"""Elements of a bucket that is waited for by itself: 4 MiB of 4-bit codes. In larger ones the first
layers wait for codes of later ones; smaller ones are bound by latency."""


@dataclass(frozen=True, slots=True)
class Shard:
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
        copies: by buffer of codes what copies its parts, where the transport lets it.
        takes_digests: whether digests are taken on the way.
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
        self.takes_digests = False
        self.members = members
        self.layout = FlatLayout(
            tuple(weights[i].param.numel() for i in members), comm.size, kind.alignment
        )
        self.first_column = first_column
        self.sizes = [kind.entries(self.layout.numel)] * kind.planes
        self.flats: list[torch.Tensor] = []
        self.copies = [self._copies() for _ in self.sizes]
        self._member_sizes: torch.Tensor | None = None  # of one rank's range, when first asked

    def shards(self, rank: int) -> list[Shard]:
        """Return what ``rank`` owns of each member."""
        first, places = self.first_column, self.layout.shard_slices(rank)
        return [
            Shard(extent, slice(first + place.start, first + place.stop))
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
            self._member_sizes = torch.tensor(sizes, device=masters.device)
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
        for flat, copies in zip(self.flats, self.copies, strict=True):
            if copies is None:
                comm.all_gather_(flat)
            else:
                parts = copies.begin(flat, takes_digests=self.takes_digests)
                comm.start_all_gather_by(flat, None, parts)()

    def _copies(self) -> CopiesInPlace | None:
        """What copies codes from other ranks, but for what pads them."""
        if not self.kind.is_codes:
            return None
        entries = self.kind.entries
        ranges: list[list[tuple[slice, int]]] = [[] for _ in range(self.layout.world_size)]
        for extent in self.layout.weight_extents():
            for owner, part in self.layout.owners(extent):
                at = slice(entries(part.start), entries(part.end))
                ranges[owner].append((at, at.start - entries(extent.start)))
        return CopiesInPlace(ranges)


class ShardedWeights:
    """All weights of an optimizer: their buckets, and this rank's masters.

    Args:
        overlap_all_gather, bucket_size: as for :class:`ZeroOptimizer`.

    Attributes:
        comm: the ranks.
        weights: in the order of ``param_groups``.
        buckets: of each storage kind one or several, in the order of the weights; those that hold
            codes come last.
        num_columns: elements that a rank owns, padding included.
        masters: FP32 [num_columns], this rank's.
        own: what this rank owns of each weight.
        held: by the weight's place this rank's masters: FP32, flat, views, never empty, in order.
        whole: by the weight's place FP32 masters that this rank keeps beside them, in the weight's
            shape (:mod:`zerocast.optim.matrix_owners`); None where weights are stepped in shards.
        overlaps: whether uses of quantized weights wait for codes, and not the step.

    Raises:
        InputError: for a wrong argument.
    """

    def __init__(
        self,
        comm: Communicator,
        weights: Sequence[Weight],
        overlap_all_gather: bool = False,
        bucket_size: int | None = None,
    ) -> None:
        check_flag("overlap_all_gather", overlap_all_gather)
        if bucket_size is not None and not (type(bucket_size) is int and bucket_size > 0):
            raise InputError(
                f"bucket_size must be a positive number of elements, or None, got {bucket_size!r}."
            )
        self.comm = comm
        self.weights = weights
        self.overlaps = overlap_all_gather
        if overlap_all_gather and bucket_size is None:
            bucket_size = BUCKET_SIZE
        self.buckets: list[Bucket] = []
        self.num_columns = 0
        for kind, indices in fill_buckets(weights, bucket_size):
            bucket = Bucket(kind, indices, weights, comm, self.num_columns)
            self.buckets.append(bucket)
            self.num_columns += bucket.layout.rank_numel
        self.own = self._own_shards()
        device = weights[0].param.device
        sizes = [size for bucket in self.buckets if bucket.kind.is_codes for size in bucket.sizes]
        codes = iter(allocate_together(sizes, torch.uint8, device))
        for bucket in self.buckets:
            dtype, is_codes = bucket.kind.dtype, bucket.kind.is_codes
            bucket.flats = [
                next(codes) if is_codes else torch.zeros(size, dtype=dtype, device=device)
                for size in bucket.sizes
            ]
        self.masters = torch.zeros(self.num_columns, dtype=torch.float32, device=device)
        self.held = {i: self.master(i) for i, shard in enumerate(self.own) if shard.extent}
        self.whole: dict[int, torch.Tensor] | None = None
        self._places = Places(self.weights, self.code_flats)

    def _own_shards(self) -> list[Shard]:
        by_weight: dict[int, Shard] = {}
        self._in_buckets: dict[int, tuple[FlatLayout, Extent]] = {}
        for bucket in self.buckets:
            by_weight |= zip(bucket.members, bucket.shards(self.comm.rank), strict=True)
            for i, extent in zip(bucket.members, bucket.layout.weight_extents(), strict=True):
                self._in_buckets[i] = bucket.layout, extent
        return [by_weight[i] for i in range(len(self.weights))]

    def owners(self, index: int) -> list[tuple[int, Extent]]:
        """Return the ranks that own elements of one weight, ascending, and which elements."""
        layout, place = self._in_buckets[index]
        return [(rank, part.shifted(-place.start)) for rank, part in layout.owners(place)]

    def master(self, index: int) -> torch.Tensor:
        """Return this rank's master of one weight: FP32, flat, a view, empty where it owns none."""
        return self.masters[self.own[index].columns]

    def restart_masters(self, coded: Iterable[int]) -> None:
        """Let the masters of some quantized weights start from the weights as they are: from the
        value that a weight was made from, where it keeps that.
        """
        for i in coded:
            if self.own[i].extent:
                restart_master(self.weights[i], self.master(i), self.own[i].extent)
            if self.whole is not None and i in self.whole:
                whole = self.whole[i].view(-1)
                restart_master(self.weights[i], whole, Extent(0, whole.numel()))

    def restart_plain_masters(self, is_written: torch.Tensor) -> None:
        """Let the masters of those plain weights that are written, bool [len(plain)], start from
        the weights as they are. A master whose rounding a weight holds stays.
        """
        buckets = [bucket for bucket in self.buckets if not bucket.kind.is_codes]
        each = is_written.split([len(bucket.members) for bucket in buckets])
        for bucket, flags in zip(buckets, each, strict=True):
            bucket.restart(self.comm.rank, self.masters, flags)
        if self.whole is not None:
            for i, flag in zip(self.plain, is_written, strict=True):
                if i in self.whole:
                    values = self.weights[i].param.detach().view(-1)
                    restart_plain_master(self.whole[i].view(-1), values, flag)

    @property
    def plain(self) -> list[int]:
        """The places of plain weights, in the order of their buckets."""
        return [i for b in self.buckets if not b.kind.is_codes for i in b.members]

    def adopt(self) -> None:
        """Move every weight into its bucket, and what else quantized ones hold together."""
        lay_together(s for weight in self.weights if (s := weight.storage) is not None)
        for bucket in self.buckets:
            bucket.adopt(self.weights)
            if self.overlaps and bucket.kind.is_codes:
                storages = [self.weights[i].storage for i in bucket.members]
                bucket.pending = PendingAllGather([s for s in storages if s is not None])
        self._places = Places(self.weights, self.code_flats)

    @property
    def code_flats(self) -> list[torch.Tensor]:
        """The flat buffers of the buckets that hold codes, in one allocation."""
        return [f for bucket in self.buckets if bucket.kind.is_codes for f in bucket.flats]

    def moved_weight(self) -> InputError | None:
        """Return the error for a weight that no longer lies in its bucket, as after
        ``model.float()``.
        """
        return self._places.error()

    def store_plain(self, columns: torch.Tensor) -> None:
        """Round ``columns``, FP32 [num_columns], this rank's masters or what stands for them, into
        its range of the buffers that hold no codes.
        """
        for bucket in self.buckets:
            if not bucket.kind.is_codes:
                bucket.store(self.comm.rank, columns)

    def all_gather(self) -> list[TakenDigests]:
        """Gather every bucket that no use of a weight waits for; return the digests that were
        taken.
        """
        gathered = [bucket for bucket in self.buckets if bucket.pending is None]
        for bucket in gathered:
            bucket.all_gather(self.comm)
        every = [copies for bucket in gathered for copies in bucket.copies if copies is not None]
        return [digests for copies in every for digests in copies.copied]

    def wait(self) -> None:
        """Return when every weight is gathered."""
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()

    def raise_together(self, error: ZerocastError | None) -> None:
        """Raise on every rank if any has an ``error``; on a GPU, where asking the others would wait
        for it, on this rank. Collective on a CPU.
        """
        if self.masters.device.type == "cpu":
            raise_together(self.comm, error)
        elif error is not None:
            raise error

    # --- the state of recipes ---

    def recipe_states(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return the live tensors that recipes keep between casts, by the places of the weights."""
        return {
            i: {name: storage.buffers[name] for name in storage.recipe.state}
            for i, storage in self._stateful().items()
        }

    def share_recipe_states(self) -> None:
        """Give the recipes on every rank the state of those on rank 0. Collective.

        Masters are put together from every rank's values, so weights may differ before; the states
        of their recipes then differ, too, and cannot be put together.
        """
        for state in self.recipe_states().values():
            for tensor in state.values():
                self.comm.broadcast_(tensor)

    @contextmanager
    def repeating_the_latest_cast(self, due: Collection[int] = ()) -> Iterator[None]:
        """Within the context a cast of unchanged masters gives the codes that the weights have, or
        had when their state was saved; afterwards the state of recipes is as before, but for the
        weights ``due``, by their places, whose cast is not the latest but the next one.
        """
        stateful = {i: s for i, s in self._stateful().items() if i not in due}
        states = [s.buffers[name] for s in stateful.values() for name in s.recipe.state]
        kept = [t.clone() for t in states]
        for storage in stateful.values():
            storage.recipe.rewind(storage.buffers)
        try:
            yield
        finally:
            for tensor, value in zip(states, kept, strict=True):
                tensor.copy_(value)

    def _stateful(self) -> dict[int, QuantizedStorage]:
        """By their places, the weights whose recipes keep state between casts."""
        storages = {i: weight.storage for i, weight in enumerate(self.weights)}
        return {i: s for i, s in storages.items() if s is not None and s.recipe.state}

    def gather(self, index: int, columns: torch.Tensor) -> torch.Tensor:
        """Return one weight's elements in all ranks' ``columns``, FP32 [num_columns]: FP32, in the
        weight's shape. Collective.
        """
        own = self.own[index]
        counts = [0] * self.comm.size
        for rank, extent in self.owners(index):
            counts[rank] = extent.size
        whole = columns.new_empty(self.weights[index].param.numel())
        whole[own.extent.start : own.extent.end] = columns[own.columns]
        self.comm.all_gather_(whole, counts)
        return whole.view(self.weights[index].param.shape)


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
