"""Where the weights lie, and who owns which part: flat buffers, FP32 masters, the all-gather.

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

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.layout import Extent, FlatLayout
from zerocast.optim.pending_all_gather import PendingAllGather
from zerocast.optim.weights import StorageKind, Weight, planes
from zerocast.tensors import (
    QuantizedStorage,
    QuantizedTensor,
    replace_raw_data,
)

BUCKET_SIZE = 1 << 23
"""Elements of a bucket that is waited for by itself: 4 MiB of 4-bit codes. In larger ones the first
layers wait for codes of later ones; of smaller ones latency takes a part."""


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
        flats: the buffers, one a plane, whole on every rank, of ``kind.dtype``.
        arrival: what uses of the weights wait for; None where the step does.
    """

    def __init__(
        self,
        kind: StorageKind,
        members: Sequence[int],
        weights: Sequence[Weight],
        size: int,
        first_column: int,
    ) -> None:
        self.kind = kind
        self.pending: PendingAllGather | None = None
        self.members = members
        self.layout = FlatLayout(
            tuple(weights[i].param.numel() for i in members), size, kind.alignment
        )
        self.first_column = first_column
        entries, device = kind.entries(self.layout.numel), weights[0].param.device
        self.flats = [
            torch.zeros(entries, dtype=kind.dtype, device=device) for _ in range(kind.planes)
        ]

    @property
    def columns(self) -> slice:
        """The owner's range in its columns, padding included."""
        return slice(self.first_column, self.first_column + self.layout.rank_numel)

    def shards(self, rank: int) -> list[Shard]:
        """What ``rank`` owns of each member."""
        places = self.layout.shard_slices(rank)
        return [
            Shard(extent, slice(place.start + self.first_column, place.stop + self.first_column))
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
                param.data = _storage_of_its_own(places[0]).view(param.shape)

    def store(self, rank: int, masters: torch.Tensor) -> None:
        """Round ``rank``'s masters, FP32 [columns], into its range: the cast of plain weights."""
        self.flats[0].view(self.layout.world_size, -1)[rank].copy_(masters[self.columns])


class ShardedWeights:
    """All weights of an optimizer: their buckets, and this rank's masters.

    Attributes:
        comm: the ranks.
        weights: in the order of ``param_groups``.
        buckets: of each storage kind one or several, in the order of the weights; those that hold
            codes come last.
        num_columns: elements that a rank owns, padding included.
        masters: FP32 [num_columns], this rank's.
    """

    def __init__(
        self,
        comm: Communicator,
        weights: Sequence[Weight],
        *,
        overlaps: bool = False,
        bucket_size: int | None = None,
    ) -> None:
        self.comm = comm
        self.weights = weights
        self._overlaps = overlaps
        if overlaps and bucket_size is None:
            bucket_size = BUCKET_SIZE
        self.buckets: list[Bucket] = []
        self.num_columns = 0
        for kind, indices in fill_buckets(weights, bucket_size):
            bucket = Bucket(kind, indices, weights, comm.size, self.num_columns)
            self.buckets.append(bucket)
            self.num_columns += bucket.layout.rank_numel
        self.own = self.shards(comm.rank)
        device = weights[0].param.device
        self._addresses = [_addresses(weight) for weight in weights]
        self.masters = torch.zeros(self.num_columns, dtype=torch.float32, device=device)

    def shards(self, rank: int) -> list[Shard]:
        """What ``rank`` owns of each weight, in the order of :attr:`weights`."""
        by_weight = {
            i: shard
            for bucket in self.buckets
            for i, shard in zip(bucket.members, bucket.shards(rank), strict=True)
        }
        return [by_weight[i] for i in range(len(self.weights))]

    def master(self, index: int) -> torch.Tensor:
        """FP32, flat: this rank's master of one weight, a view; empty where it owns nothing."""
        return self.masters[self.own[index].columns]

    def start_masters(self) -> None:
        """Fill the masters: from the values that weights were made from, or else from theirs."""
        for i in range(len(self.weights)):
            self.restart_master(i)

    def restart_master(self, index: int) -> None:
        """Let one weight's master start from the weight as it is: from the value that it was made
        from, where it keeps that. A master whose rounding a plain weight holds stays.
        """
        param, master = self.weights[index].param, self.master(index)
        extent = self.own[index].extent
        if isinstance(param, QuantizedTensor):
            kept = param.quantized_storage.high_precision_init_val
            values = param.dequantize(torch.float32) if kept is None else kept
            master.copy_(values.reshape(-1)[extent.start : extent.end])
        else:
            values = param.detach().reshape(-1)[extent.start : extent.end]
            bits = torch.int16 if values.itemsize == 2 else torch.int32
            kept_here = master.to(values.dtype).view(bits) == values.contiguous().view(bits)
            master.copy_(torch.where(kept_here, master, values.float()))

    def adopt(self) -> None:
        """Move every weight into its bucket."""
        for bucket in self.buckets:
            bucket.adopt(self.weights)
            if self._overlaps and bucket.kind.is_codes:
                bucket.pending = PendingAllGather(self._codes(bucket))
        self._addresses = [_addresses(weight) for weight in self.weights]

    def moved_weight(self) -> InputError | None:
        """What is wrong where a weight no longer lies in its bucket, as after ``model.float()``."""
        for weight, addresses in zip(self.weights, self._addresses, strict=True):
            if _addresses(weight) != addresses:
                return InputError(
                    f"{weight.name} must stay in the buffer that ZeroOptimizer put it in, and no "
                    "longer lies there; convert or move a model (model.to, model.float) before "
                    "making its optimizer, and write weights in place (copy_)."
                )
        return None

    def store_plain(self, columns: torch.Tensor) -> None:
        """Round ``columns``, FP32 [num_columns], this rank's masters or what stands for them, into
        its range of the buffers that hold no codes.
        """
        for bucket in self.buckets:
            if not bucket.kind.is_codes:
                bucket.store(self.comm.rank, columns)

    def all_gather(self) -> None:
        """Bring every rank's part to every rank: in place, one collective a buffer. Where uses of
        the weights wait it is only begun.
        """
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.begin(self.comm.start_all_gather_(flat) for flat in bucket.flats)
            else:
                for flat in bucket.flats:
                    self.comm.all_gather_(flat)

    def wait(self) -> None:
        """Return when every weight is here."""
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()

    def _codes(self, bucket: Bucket) -> list[QuantizedStorage]:
        params = [self.weights[i].param for i in bucket.members]
        return [param.quantized_storage for param in params if isinstance(param, QuantizedTensor)]

    # --- what recipes remember ---

    def recipe_states(self) -> dict[int, dict[str, torch.Tensor]]:
        """By the places of the weights whose recipes remember something, the live tensors."""
        return {
            i: {name: storage.buffers[name] for name in storage.recipe.state}
            for i, storage in self._remembering().items()
        }

    def share_recipe_states(self) -> None:
        """Let recipes on every rank remember what those of rank 0 do. Collective.

        Masters are put together from every rank's values, so weights may differ before; what their
        recipes remember then differs, too, and cannot be put together.
        """
        tensors = [t for state in self.recipe_states().values() for t in state.values()]
        if not tensors or self.comm.size == 1:
            return
        everything = torch.cat([t.view(torch.uint8) for t in tensors])
        self.comm.broadcast_(everything)
        for tensor, part in zip(
            tensors, everything.split([t.nbytes for t in tensors]), strict=True
        ):
            tensor.view(torch.uint8).copy_(part)

    @contextmanager
    def repeating_the_latest_cast(self) -> Iterator[None]:
        """Within the context a cast of unchanged masters gives the codes that the weights have, or
        had when their state was saved; afterwards what recipes remember is as before.
        """
        states = self.recipe_states()
        kept = {i: {name: t.clone() for name, t in state.items()} for i, state in states.items()}
        for storage in self._remembering().values():
            storage.recipe.rewind(storage.buffers)
        try:
            yield
        finally:
            for i, state in states.items():
                for name, tensor in state.items():
                    tensor.copy_(kept[i][name])

    def _remembering(self) -> dict[int, QuantizedStorage]:
        """By their places, the weights whose recipes remember something between casts."""
        return {
            i: weight.param.quantized_storage
            for i, weight in enumerate(self.weights)
            if isinstance(weight.param, QuantizedTensor) and weight.param.recipe.state
        }

    def gather(self, index: int, columns: torch.Tensor) -> torch.Tensor:
        """FP32, in the weight's shape: its elements in all ranks' ``columns``, FP32 [num_columns].
        Collective.
        """
        part = columns[self.own[index].columns]
        owned = [self.shards(rank)[index].extent for rank in range(self.comm.size)]
        whole = part.new_empty(self.weights[index].param.numel())
        mine = owned[self.comm.rank]
        whole[mine.start : mine.end] = part
        self.comm.all_gather_(whole, [extent.size for extent in owned])
        return whole.view(self.weights[index].param.shape)


def fill_buckets(
    weights: Sequence[Weight], size: int | None
) -> list[tuple[StorageKind, list[int]]]:
    """The places of the weights of each bucket, in order, and how they are stored.

    A bucket is closed as soon as it holds ``size`` elements; never where that is None. Plain
    weights come first, so that a step that waits for them alone need not wait for codes.
    """
    buckets: list[tuple[StorageKind, list[int]]] = []
    filling: dict[StorageKind, list[int]] = {}
    held = Counter[StorageKind]()
    for i, weight in enumerate(weights):
        if weight.kind not in filling:
            filling[weight.kind] = []
            buckets.append((weight.kind, filling[weight.kind]))
        filling[weight.kind].append(i)
        held[weight.kind] += weight.param.numel()
        if size is not None and held[weight.kind] >= size:
            del filling[weight.kind], held[weight.kind]
    return sorted(buckets, key=lambda bucket: bucket[0].is_codes)


def _storage_of_its_own(part: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor whose storage is no more than that: those who save weights take
    tensors of one storage for copies of each other (safetensors, accelerate).
    """
    return torch.from_dlpack(part) if part.numel() else part


def _addresses(weight: Weight) -> list[int]:
    return [plane.data_ptr() for plane in planes(weight.param)]
