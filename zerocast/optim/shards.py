"""ShardedWeights: flat buffers of weights, their owners, FP32 masters, and the all-gather.

Note: columns
~~~~~~~~~~~~~
Weights of one storage kind are contiguous in one or more flat buffers (each in a
:class:`zerocast.optim.buckets.Bucket`, with one buffer for each plane of codes). Each rank owns one
contiguous range of equal size in each buffer. A weight's codes are a view of the buffer, so the
cast writes directly into the memory that is all-gathered. The ranges that a rank owns in all
buckets, concatenated, are its *columns*: its masters are one FP32 tensor [columns], and so are its
reduced gradients. All ranks have the same number of columns, so a gradient buffer is a matrix
[ranks, columns] and one reduce-scatter handles all kinds of weights::

    bucket of 4-bit codes   |  rank 0  |  rank 1  |        bucket of BF16   | rank 0 | rank 1 |
                                 |          |                                   |        |
    columns of rank 0       [  4-bit   | BF16  ]  <-----------------------------+        |
    columns of rank 1       [  4-bit   | BF16  ]  <--------------------------------------+
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from zerocast.arguments import check_flag
from zerocast.comm import Communicator, raise_together
from zerocast.errors import InputError, ZerocastError
from zerocast.layout import Extent, FlatLayout
from zerocast.optim.buckets import BUCKET_SIZE, Bucket, PlacedShard, fill_buckets
from zerocast.optim.pending_all_gather import PendingAllGather
from zerocast.optim.stepped_weights import Weight, restart_master, restart_plain_master
from zerocast.tensors import QuantizedStorage, QuantizedTensor
from zerocast.tensors.allocations import allocate_together, lay_together
from zerocast.tensors.ledger import WEIGHT, watch


class ShardedWeights:
    """All weights of an optimizer, their buckets, and this rank's masters.

    Args:
        overlap_all_gather, bucket_size: as for :class:`ZeroOptimizer`.

    Attributes:
        comm: the ranks.
        weights: the weights in the order of ``param_groups``.
        buckets: one or more buckets of each storage kind, in the order of the weights; those that
            hold codes come last.
        num_columns: the number of elements that a rank owns, including padding.
        masters: FP32 [num_columns], this rank's masters.
        own: this rank's shard of each weight.
        held: this rank's masters by weight index, in order: flat FP32 views, without empty ones.
        whole: additional FP32 masters by weight index, in the weight's shape
            (:mod:`zerocast.optim.matrix_owners`); None if weights are stepped in shards.
        overlaps: whether uses of quantized weights wait for codes, instead of the step.

    Raises:
        InputError: if an argument is invalid.
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
        self._watch()

    def _own_shards(self) -> list[PlacedShard]:
        by_weight: dict[int, PlacedShard] = {}
        self._in_buckets: dict[int, tuple[FlatLayout, Extent]] = {}
        for bucket in self.buckets:
            by_weight |= zip(bucket.members, bucket.shards(self.comm.rank), strict=True)
            for i, extent in zip(bucket.members, bucket.layout.weight_extents(), strict=True):
                self._in_buckets[i] = bucket.layout, extent
        return [by_weight[i] for i in range(len(self.weights))]

    def owners(self, index: int) -> list[tuple[int, Extent]]:
        """Return the ranks that own elements of one weight, ascending, with their extents."""
        layout, place = self._in_buckets[index]
        return [(rank, part.shifted(-place.start)) for rank, part in layout.owners(place)]

    def master(self, index: int) -> torch.Tensor:
        """Return this rank's master of one weight: a flat FP32 view, empty if it owns none."""
        return self.masters[self.own[index].columns]

    def restart_masters(self, coded: Iterable[int]) -> None:
        """Restart the masters of quantized weights from the weights, or from the values that these
        were made from, if kept.
        """
        for i in coded:
            if self.own[i].extent:
                restart_master(self.weights[i], self.master(i), self.own[i].extent)
            if self.whole is not None and i in self.whole:
                whole = self.whole[i].view(-1)
                restart_master(self.weights[i], whole, Extent(0, whole.numel()))

    def restart_plain_masters(self, is_written: torch.Tensor) -> None:
        """Restart the masters of plain weights with ``is_written``, bool [len(plain)], from the
        weights. Masters that round to the weight's value are kept.
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
        """The indices of plain weights, in the order of their buckets."""
        return [i for b in self.buckets if not b.kind.is_codes for i in b.members]

    def adopt(self) -> None:
        """Move weights into buckets, and the other buffers of quantized weights together."""
        lay_together(s for weight in self.weights if (s := weight.storage) is not None)
        for bucket in self.buckets:
            bucket.adopt(self.weights)
            if self.overlaps and bucket.kind.is_codes:
                storages = [self.weights[i].storage for i in bucket.members]
                bucket.pending = PendingAllGather([s for s in storages if s is not None])
        self._watch()

    @property
    def code_flats(self) -> list[torch.Tensor]:
        """The flat buffers of the buckets that hold codes, in one allocation."""
        return [f for bucket in self.buckets if bucket.kind.is_codes for f in bucket.flats]

    def moved_weight(self) -> InputError | None:
        """Return the error for a weight that is no longer in its bucket, as after
        ``model.float()``, because a step would write memory that nothing reads.
        """
        if not any(each.changed() for each in self._watched) and not self._codes.is_announced:
            return None
        for weight, now, before in zip(self.weights, self._places(), self._found, strict=True):
            if now != before:
                return InputError(
                    f"{weight.name} must stay in the buffer that ZeroOptimizer put it in, and is "
                    "no longer there; convert or move a model (model.to, model.float) before "
                    "making its optimizer, and write weights in place (copy_)."
                )
        self._codes.note_announced()
        return None

    def _watch(self) -> None:
        """Record the memory of the weights. Each weight is watched, because the model refers to
        them; the codes are in one allocation.
        """
        params = [weight.param for weight in self.weights]
        plain = [param for param in params if not isinstance(param, QuantizedTensor)]
        coded = [param for param in params if isinstance(param, QuantizedTensor)]
        self._codes = watch(self.code_flats, scope="storage")
        self._watched = [watch(coded, WEIGHT), watch(plain), self._codes]
        self._found = self._places()

    def _places(self) -> list[tuple[object, ...]]:
        """Return the storage of each weight, and the addresses of its codes or values."""
        return [(w.storage, *[plane.data_ptr() for plane in w.planes]) for w in self.weights]

    def store_plain(self, columns: torch.Tensor) -> None:
        """Round ``columns``, FP32 [num_columns], this rank's masters or their replacement, into its
        range of the buffers of plain weights.
        """
        for bucket in self.buckets:
            if not bucket.kind.is_codes:
                bucket.store(self.comm.rank, columns)

    def all_gather(self) -> None:
        """All-gather every bucket that the step itself waits for."""
        for bucket in self.buckets:
            if bucket.pending is None:
                bucket.all_gather(self.comm)

    def wait(self) -> None:
        """Wait until every weight is gathered."""
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()

    def raise_together(self, error: ZerocastError | None) -> None:
        """Raise on every rank if any has an ``error``. Collective on a CPU. On a GPU raise on this
        rank only, because asking the others would wait for the GPU.
        """
        if self.masters.device.type == "cpu":
            raise_together(self.comm, error)
        elif error is not None:
            raise error

    # --- the state of recipes ---

    def recipe_states(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return the live state tensors of recipes, by weight index."""
        return {
            i: {name: storage.buffers[name] for name in storage.recipe.state}
            for i, storage in self._stateful().items()
        }

    def share_recipe_states(self) -> None:
        """Broadcast the recipes' state from rank 0. Collective.

        Each rank contributes its shards to the masters, so the weights may differ before. The
        states of their recipes then differ, too, and cannot be combined.
        """
        for state in self.recipe_states().values():
            for tensor in state.values():
                self.comm.broadcast_(tensor)

    @contextmanager
    def repeating_the_latest_cast(self, due: Collection[int] = ()) -> Iterator[None]:
        """Rewind the recipes' state within the context, and restore it afterwards.

        Within it, a cast of unchanged masters gives the codes that the weights have, or had when
        their state was saved. The weights ``due``, by index, are excluded: they get the next cast.
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
        """Return the weights whose recipes keep state between casts, by index."""
        storages = {i: weight.storage for i, weight in enumerate(self.weights)}
        return {i: s for i, s in storages.items() if s is not None and s.recipe.state}

    def gather(self, index: int, columns: torch.Tensor) -> torch.Tensor:
        """Return one weight's elements of all ranks' ``columns``, FP32 [num_columns], in the
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
