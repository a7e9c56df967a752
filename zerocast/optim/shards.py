"""Where the weights lie, and which rank owns what: flat buffers, FP32 masters, the all-gather.

Note: columns
~~~~~~~~~~~~~
Weights of one storage kind lie end to end in one flat buffer or in several (each in a
:class:`zerocast.optim.buckets.Bucket`, one buffer for each plane of codes), of which each rank owns
one equal, contiguous range; a weight's codes are a view into it, so the cast writes a byte where
the all-gather moves it. What a rank owns of all buckets, one range after the other, are its
*columns*: its masters are one FP32 tensor [columns], and so are its reduced gradients. Every rank
has as many columns, so a gradient buffer is a matrix [ranks, columns] and one reduce-scatter serves
all kinds of weights::

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
        self._watch()

    @property
    def code_flats(self) -> list[torch.Tensor]:
        """The flat buffers of the buckets that hold codes, in one allocation."""
        return [f for bucket in self.buckets if bucket.kind.is_codes for f in bucket.flats]

    def moved_weight(self) -> InputError | None:
        """Return the error for a weight that no longer lies in its bucket, as after
        ``model.float()``: a step would write memory that nothing reads.
        """
        if not any(each.changed() for each in self._watched) and not self._codes.is_announced:
            return None
        for weight, now, before in zip(self.weights, self._places(), self._found, strict=True):
            if now != before:
                return InputError(
                    f"{weight.name} must stay in the buffer that ZeroOptimizer put it in, and no "
                    "longer lies there; convert or move a model (model.to, model.float) before "
                    "making its optimizer, and write weights in place (copy_)."
                )
        self._codes.note_announced()
        return None

    def _watch(self) -> None:
        """Note where the weights lie. The model has the weights themselves, so each is looked at;
        codes lie in one allocation.
        """
        params = [weight.param for weight in self.weights]
        plain = [param for param in params if not isinstance(param, QuantizedTensor)]
        coded = [param for param in params if isinstance(param, QuantizedTensor)]
        self._codes = watch(self.code_flats, scope="storage")
        self._watched = [watch(coded, WEIGHT), watch(plain), self._codes]
        self._found = self._places()

    def _places(self) -> list[tuple[object, ...]]:
        """Return which weight each is, and where its codes or values lie."""
        return [(w.storage, *[plane.data_ptr() for plane in w.planes]) for w in self.weights]

    def store_plain(self, columns: torch.Tensor) -> None:
        """Round ``columns``, FP32 [num_columns], this rank's masters or what stands for them, into
        its range of the buffers that hold no codes.
        """
        for bucket in self.buckets:
            if not bucket.kind.is_codes:
                bucket.store(self.comm.rank, columns)

    def all_gather(self) -> None:
        """Gather every bucket that no use of a weight waits for."""
        for bucket in self.buckets:
            if bucket.pending is None:
                bucket.all_gather(self.comm)

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
