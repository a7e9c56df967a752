"""Exchange holds what ranks reduce before codes are cast: amaxes, and the errors of 4-over-6.

Both lie in one buffer each, group after group and weight after weight, so that a group's entries
are one contiguous tensor: one all-reduce. Of tensor-parallel shards some amaxes belong to the
other shards, too; these few are reduced once more, over the ranks that hold the shards, in a buffer
of their own. Which amaxes are reduced at all is said in "Note: full and boundary" in
:mod:`zerocast.cast.amax_buffers`.

Note: a rank in trouble
~~~~~~~~~~~~~~~~~~~~~~~
A rank that cannot cast (a master was resized, a launch failed) still takes part in the reduction of
amaxes, and gives :data:`TROUBLE` for all of its entries. That is larger than any amax and any step,
so every rank of its groups finds it where it would otherwise find the step: nobody waits for a rank
that has left, and while all is well nothing is sent for it. Ranks of a group that does not meet a
rank in trouble hear of it from those who do, in the reductions that follow.

Where the host takes no part in a reduction (NCCL on a GPU) it does not wait to read an entry. There
the rank in trouble raises by itself, and the scales that others make of reduced amaxes become NaN,
and so do their codes.

Note: a rank at another step
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that leaves out a whole step, or makes one twice, calls the same collectives as the others,
who cast another step's masters with it. So each group's entries end in the number of the step and
in its negative: their maxima are the highest number and the lowest one of all ranks, and every rank
that reads entries sees whether the two are one.
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
"""Every entry of a rank that cannot cast: the bits of a NaN, above those of any amax or step."""


class Exchange:
    """The buffers of one plan.

    Args:
        specs: the plan's weights, with what this rank owns of each.
        members: by group the places of its weights, all weights once.
        owners: by group those of its members.
        tp_shards: by tensor-parallel group the places of the weights whose shards it holds.
        by_owner: by weight the planes whose scales their blocks' owners make.

    Attributes:
        buffers: every weight's amaxes.
        candidates: int32, what ranks exchange of what the blocks of 4-over-6 weights choose their
            scales by.
        candidates_of: by weight that chooses scales.
        heard_by: the groups whose ranks all hear of a rank in trouble.
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
        self.heard_by = [
            comm
            # Of tensor parallelism a rank may have no matrix where others have some.
            for comm in (*(comm for comm, own in members.items() if len(own) > 0), *tp_shards)
            if comm.size > 1 and (device.type == "cpu" or not comm.captures(device))
        ]
        # By group of several ranks its entries, and of these the words for the step where this rank
        # reads them.
        reads = [] if device.type == "meta" else self.heard_by  # which holds no values
        self._groups = [
            (comm, entries, entries[-STEP_WORDS:] if comm in reads else None)
            for comm, entries in self.buffers.of_group.items()
            if comm.size > 1
        ]
        # Shards that share no amax share one entry that says whether a rank is in trouble.
        idle = [comm for comm, group in shared.items() if not group and comm in self.heard_by]
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
        # Where its owner makes a block's scale, nobody else needs its choice.
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
        """The places among the reduced amaxes of what ``tp_shards``, with their places, have in
        common with the other shards.
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
        """All memory of the exchange, views among it."""
        chosen = [candidates.choices for candidates in self.candidates_of.values()]
        own = self.candidates, *chosen, self._reduced, self._shared
        return [*self.buffers.tensors, *own]

    def follow_stream(self, others: Iterable[torch.Tensor] = ()) -> None:
        """Tell torch which stream uses the buffers from now on, where it is another one: the memory
        of a plan that is dropped waits for all of them, and so does that of ``others``.
        """
        if not self.candidates.is_cuda:
            return
        stream = torch.cuda.current_stream(self.candidates.device)
        if stream not in self._streams:
            for buffer in (*self.tensors, *others):
                buffer.record_stream(stream)
            self._streams.add(stream)

    def reduce_amax(self, step: int = 0, error: ZerocastError | None = None) -> None:
        """Make every group's amaxes the largest of its ranks, and then those that
        tensor-parallel shards have in common the largest of all shards.

        Args:
            step: the number of the step, which is compared modulo :data:`TROUBLE`.
            error: why this rank cannot cast, if it cannot; its amaxes are of no matter then.

        Raises:
            ZerocastError: ``error``, on all ranks that hear of it.
            RankMismatchError: on all ranks that hear of it, where two are not at the same step.
        """
        heard, step = error is not None, step % TROUBLE
        self.buffers.give_cut()
        for comm, entries, words in self._groups:
            if words is not None:
                own = torch.tensor((step, -step), dtype=words.dtype, device="cpu")
                words.copy_(own)
            self._reduce(comm, entries, heard)
            if words is not None and not heard:
                largest, smallest_negated = words.tolist()
                heard = largest == TROUBLE
                if largest + smallest_negated and not heard:
                    heard, error = True, _other_steps(comm, step)
        if self._reduced_of_group:
            shared = self._reduced[: len(self._shared)]
            torch.index_select(self.buffers.reduced, 0, self._shared, out=shared)
            self._reduced[len(self._shared) :].zero_()
            for comm, entries in self._reduced_of_group:
                self._reduce(comm, entries, heard)
                if comm in self.heard_by and not entries.is_meta and not heard:
                    heard = int(entries[0]) == TROUBLE
            self.buffers.reduced.index_copy_(0, self._shared, shared)
        self.buffers.take_cut()
        if heard:
            raise_in_all(self.heard_by, error)

    def _reduce(self, comm: Communicator, entries: torch.Tensor, heard: bool) -> None:
        if heard:
            entries.fill_(TROUBLE)
        comm.all_reduce_max_(entries)

    def reduce_candidates(self) -> None:
        """Put every group's candidates together."""
        for comm, entries in self._candidates_of_group.items():
            if len(entries):
                comm.all_reduce_sum_(entries)


def _other_steps(comm: Communicator, step: int) -> RankMismatchError:
    """The error that names the steps of all ranks of ``comm``. Collective."""
    steps = dict(enumerate(comm.all_gather_object(step)))
    return RankMismatchError(
        f"every rank must cast the masters of the same step, got, by rank, {steps}: a rank has "
        f"left one out, or made one twice. Load the last checkpoint on every rank."
    )
