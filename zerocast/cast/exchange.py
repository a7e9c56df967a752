"""Exchange: what ranks reduce before codes are cast: amaxes, and the errors of 4-over-6.

Each is in one buffer, ordered by group and then by weight. A group's entries are contiguous, so
they take one all-reduce. Some amaxes of a tensor-parallel shard belong to other shards, too. These
few are reduced once more over the ranks that hold the shards, in a separate buffer. "Note: full and
boundary" in :mod:`zerocast.cast.amax_buffers` says which amaxes are reduced.

Note: a rank in trouble
~~~~~~~~~~~~~~~~~~~~~~~
A rank that cannot cast (a master was resized, a launch failed) still takes part in the reduction of
amaxes. It contributes :data:`TROUBLE` for all of its entries. That is larger than any amax and
step, so every rank of its groups reads it in place of the step. No rank waits for a rank that has
left. Without an error nothing more is sent. Other groups receive the error in later reductions,
from ranks that are also in a group of the failing rank.

If the host takes no part in a reduction (NCCL on a GPU), it does not wait to read an entry. Then
only the failing rank raises. The scales that the others compute from reduced amaxes become NaN, and
so do their codes.

Note: a rank at another step
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that skips or repeats a whole step calls the same collectives as the others, with the masters
of another step. So each group's entries end with the step number and its negative. Their
maxima give the highest and the lowest step number of all ranks; every rank that reads entries
checks that the two are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from zerocast.cast.amax_buffers import STEP_WORDS, AmaxBuffers
from zerocast.cast.consistency import raise_in_all
from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import Communicator
from zerocast.errors import RankMismatchError, ZerocastError
from zerocast.layout import Owners, Plane, SharedBlocks
from zerocast.numerics import FourOverSixErrors
from zerocast.tensors import QuantizedStorage

TROUBLE = 2**31 - 1
"""Every entry of a rank that cannot cast: the bits of a NaN, larger than any amax or step."""


class Exchange:
    """The buffers that the ranks of one plan reduce.

    Args:
        specs: the plan's weights, with what this rank owns of each.
        members: for each group the indices of its weights; every weight is in one group.
        owners: for each group the owners of its members.
        tp_shards: for each tensor-parallel group the indices of the weights whose shards it holds.
        by_owner: for each weight the planes whose scales are made by the owners of their blocks.

    Attributes:
        buffers: every weight's amaxes.
        candidates: int32, what ranks reduce so that blocks of 4-over-6 weights can choose scales.
        candidates_of: for each weight that chooses scales its part of ``candidates``.
        receiving: the groups whose ranks read the reduced entries and raise another rank's error.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        members: Mapping[Communicator, Sequence[int]],
        owners: Mapping[Communicator, Owners],
        tp_shards: Mapping[Communicator, Sequence[int]],
        by_owner: Sequence[Sequence[Plane]],
    ) -> None:
        self.buffers = AmaxBuffers(specs, members, owners, by_owner)
        device = self.buffers.reduced.device
        self._lay_out_candidates(specs, members, owners, by_owner)
        shared = {
            comm: self._shared_entries([(i, specs[i].storage) for i in indices])
            for comm, indices in tp_shards.items()
        }
        entries = [entry for group in shared.values() for entry in group]
        self._shared = torch.tensor(entries, dtype=torch.int64, device=device)
        self.receiving = [
            comm
            # In a tensor-parallel group one rank may have no matrix while others have some.
            for comm in (*(comm for comm, own in members.items() if len(own) > 0), *tp_shards)
            if comm.size > 1 and (device.type == "cpu" or not comm.captures(device))
        ]
        # For each group of several ranks its entries, and the words for the step if this rank
        # reads them.
        reads = [] if device.type == "meta" else self.receiving  # meta tensors hold no values
        self._groups = [
            (comm, entries, entries[-STEP_WORDS:] if comm in reads else None)
            for comm, entries in self.buffers.of_group.items()
            if comm.size > 1
        ]
        # Shards that share no amax share one entry, which carries TROUBLE.
        idle = [comm for comm, group in shared.items() if not group and comm in self.receiving]
        sizes = {comm: len(group) for comm, group in shared.items() if group}
        sizes |= dict.fromkeys(idle, 1)
        self._reduced = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        split = self._reduced.split(list(sizes.values()))
        self._reduced_of_group = list(zip(sizes, split, strict=True))
        self._streams: set[torch.cuda.Stream] = set()

    def _lay_out_candidates(
        self,
        specs: Sequence[ShardSpec],
        members: Mapping[Communicator, Sequence[int]],
        owners: Mapping[Communicator, Owners],
        by_owner: Sequence[Sequence[Plane]],
    ) -> None:
        cuts = {
            i: SharedBlocks.of(specs[i].storage.grid, [e for _, e in owners[comm].of_weight(at)])
            for comm, indices in members.items()
            for at, i in enumerate(indices)
            if specs[i].storage.recipe.chooses_scales
        }
        # If a block's owner makes its scale, no other rank needs its choice.
        words = {
            i: FourOverSixErrors.words(specs[i].storage.grid, cut, choices=not by_owner[i])
            for i, cut in cuts.items()
        }
        device = self.buffers.reduced.device
        self.candidates = torch.zeros(sum(words.values()), dtype=torch.int32, device=device)
        self.candidates_of: dict[int, FourOverSixErrors] = {}
        self._candidates_of_group: dict[Communicator, torch.Tensor] = {}
        end = 0
        for comm, indices in members.items():
            start = end
            for i in indices:
                if i not in cuts:
                    continue
                grid, own = specs[i].storage.grid, self.candidates[end : end + words[i]]
                whole = FourOverSixErrors.carve(own, grid, cuts[i], choices=not by_owner[i])
                kept = grid.touched(specs[i].extent)
                self.candidates_of[i] = whole.of_blocks(grid, kept) if by_owner[i] else whole
                end += words[i]
            self._candidates_of_group[comm] = self.candidates[start:end]

    def _shared_entries(self, tp_shards: Iterable[tuple[int, QuantizedStorage]]) -> list[int]:
        """Return the indices, among the reduced amaxes, of those shared with other shards.

        ``tp_shards`` are this rank's shards with the indices of their weights.
        """
        entries: dict[int, None] = {}
        for i, storage in tp_shards:
            shared = [p.name for p in storage.cast_planes if storage.spans_tp_shards(p)]
            pieces = [self.buffers.amaxes[i].blocks[name] for name in shared]
            if storage.tp_shard is not None and storage.recipe.scales_tensor:
                pieces.append(self.buffers.tensor_amaxes[i])
            for piece in pieces:
                first = piece.storage_offset()
                entries |= dict.fromkeys(range(first, first + piece.numel()))
        return list(entries)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the exchange; some are views of others."""
        chosen = [candidates.choices for candidates in self.candidates_of.values()]
        own = self.candidates, *chosen, self._reduced, self._shared
        return [*self.buffers.tensors, *own]

    def follow_stream(self, others: Iterable[torch.Tensor] = ()) -> None:
        """Record the current stream as a user of the buffers and of ``others``, if it is new.

        The memory of a plan that is freed is then reused only after the work of all its streams.
        """
        if not self.candidates.is_cuda:
            return
        stream = torch.cuda.current_stream(self.candidates.device)
        if stream not in self._streams:
            for buffer in (*self.tensors, *others):
                buffer.record_stream(stream)
            self._streams.add(stream)

    def reduce_amax(self, step: int = 0, error: ZerocastError | None = None) -> None:
        """Reduce every group's amaxes, then those that tensor-parallel shards share, by MAX.

        Args:
            step: the step number, compared modulo :data:`TROUBLE`.
            error: why this rank cannot cast, or None; with an error its amaxes are ignored.

        Raises:
            ZerocastError: ``error``, on all ranks of :attr:`receiving`.
            RankMismatchError: on all ranks of :attr:`receiving`, if two are not at the same step.
        """
        failed, step = error is not None, step % TROUBLE
        self.buffers.give_cut()
        for comm, entries, words in self._groups:
            if words is not None:
                own = torch.tensor((step, -step), dtype=words.dtype, device="cpu")
                words.copy_(own)
            self._reduce(comm, entries, failed)
            if words is not None and not failed:
                largest, smallest_negated = words.tolist()
                failed = largest == TROUBLE
                if largest + smallest_negated and not failed:
                    failed, error = True, _other_steps(comm, step)
        if self._reduced_of_group:
            shared = self._reduced[: len(self._shared)]
            torch.index_select(self.buffers.reduced, 0, self._shared, out=shared)
            self._reduced[len(self._shared) :].zero_()
            for comm, entries in self._reduced_of_group:
                self._reduce(comm, entries, failed)
                if comm in self.receiving and not entries.is_meta and not failed:
                    failed = int(entries[0]) == TROUBLE
            self.buffers.reduced.index_copy_(0, self._shared, shared)
        self.buffers.take_cut()
        if failed:
            raise_in_all(self.receiving, error)

    def _reduce(self, comm: Communicator, entries: torch.Tensor, failed: bool) -> None:
        if failed:
            entries.fill_(TROUBLE)
        comm.all_reduce_max_(entries)

    def reduce_candidates(self) -> None:
        """Sum every group's candidates over its ranks."""
        for comm, entries in self._candidates_of_group.items():
            if len(entries):
                comm.all_reduce_sum_(entries)


def _other_steps(comm: Communicator, step: int) -> RankMismatchError:
    """Return the error that names the steps of all ranks of ``comm``. Collective."""
    steps = dict(enumerate(comm.all_gather_object(step)))
    return RankMismatchError(
        f"every rank must cast the masters of the same step, got steps {steps} by rank: a rank has "
        "skipped or repeated one. Load the last checkpoint on every rank."
    )
