"""Exchange holds what ranks reduce before codes are cast: amaxes, and the errors of 4-over-6.

Both lie in one buffer each, group after group and weight after weight, so that a group's entries
are one contiguous tensor: one all-reduce. Of tensor-parallel shards some amaxes belong to the
other shards, too; these few are reduced once more, over the ranks that hold the shards, in a buffer
of their own.

Note: a rank in trouble
~~~~~~~~~~~~~~~~~~~~~~~
A rank that cannot cast (a master was resized, a launch failed) still takes part in the reduction of
amaxes, and gives :data:`TROUBLE` for every one of its own. That is larger than any amax, so every
rank of its groups finds it in the first entry, where it would otherwise find an amax: nobody waits
for a rank that has left, and while all is well nothing is sent for it. Ranks of a group that does
not meet a rank in trouble hear of it from those who do, in the reductions that follow.

Where the host takes no part in a reduction (NCCL on a GPU) it does not wait to read that entry. The
other ranks' scales and codes become NaN there, and the rank in trouble raises by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from zerocast.comm import Communicator
from zerocast.layout import Owners, SharedBlocks
from zerocast.numerics import FourOverSixErrors
from zerocast.tensors import QuantizedStorage

TROUBLE = 2**31 - 1
"""Every amax of a rank that cannot cast: the bits of a NaN, and above those of any amax."""


class Exchange:
    """The buffers of one plan.

    Args:
        storages: the plan's weights.
        members: by group the places of its weights, all weights once.
        owners: by group of its members.
        tp_shards: by tensor-parallel group the places of the weights whose shards it holds.
        amax_groups: by weight the label of its amax group, or None.
        device: where the buffers are.

    Attributes:
        amax: int32, every weight's amaxes.
        candidates: int32, what the blocks of 4-over-6 weights choose their scales by.
        amax_of: by weight, its range of ``amax``: int32 [storage.amax_slots].
        tensor_amax_of: by weight of an amax group, int32 [1]: the entry that its group shares.
        candidates_of: by weight that chooses scales, its range of ``candidates``.
        heard_by: the groups whose ranks all hear of a rank in trouble.
    """

    def __init__(
        self,
        storages: Sequence[QuantizedStorage],
        members: Mapping[Communicator, Sequence[int]],
        owners: Mapping[Communicator, Owners],
        tp_shards: Mapping[Communicator, Sequence[int]],
        amax_groups: Sequence[str | None],
        device: torch.device,
    ) -> None:
        cuts = {
            i: SharedBlocks.of(storages[i].grid, [e for _, e in owners[comm].of_weight(at)])
            for comm, indices in members.items()
            for at, i in enumerate(indices)
            if storages[i].recipe.chooses_scales
        }
        words = {i: FourOverSixErrors.words(storages[i].grid, cuts[i]) for i in cuts}
        self.amax, self.amax_of, self._amax_of_group = _laid_out(
            {i: storage.amax_slots for i, storage in enumerate(storages)}, members, device
        )
        leaders: dict[str, torch.Tensor] = {}
        self.tensor_amax_of = {
            i: leaders.setdefault(label, self.amax_of[i][-1:])
            for i, label in enumerate(amax_groups)
            if label is not None and storages[i].recipe.scales_tensor
        }
        self.candidates, carved, self._candidates_of_group = _laid_out(words, members, device)
        self.candidates_of = {
            i: FourOverSixErrors.carve(carved[i], storages[i].grid, cuts[i]) for i in cuts
        }
        shared = {
            comm: self._shared_entries(storages, indices) for comm, indices in tp_shards.items()
        }
        entries = list(itertools.chain.from_iterable(shared.values()))
        self._shared = torch.tensor(entries, dtype=torch.int64, device=device)
        groups = (*members.items(), *tp_shards.items())
        hearing = [
            comm
            for comm, indices in groups
            if (device.type == "cpu" or not comm.captures(device))
            and any(storages[i].amax_slots for i in indices)
        ]
        self.heard_by = hearing
        # Shards that share no amax share one entry that says whether a rank is in trouble.
        idle = [comm for comm, group in shared.items() if not group and comm in hearing]
        sizes = {comm: len(group) for comm, group in shared.items() if group}
        sizes |= dict.fromkeys(idle, 1)
        self._reduced = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        split = self._reduced.split(list(sizes.values()))
        self._reduced_of_group = list(zip(sizes, split, strict=True))
        self._streams: set[torch.cuda.Stream] = set()

    def _shared_entries(
        self, storages: Sequence[QuantizedStorage], indices: Sequence[int]
    ) -> list[int]:
        """The places in ``amax`` of what the shards ``indices`` have in common with the other
        shards.
        """
        entries: dict[int, None] = {}
        for i in indices:
            start = int(self.amax_of[i].storage_offset())
            for each in storages[i].shared_amaxes():
                entries |= dict.fromkeys(range(start + each.start, start + each.stop))
            if i in self.tensor_amax_of:
                entries[int(self.tensor_amax_of[i].storage_offset())] = None
        return list(entries)

    def follow_stream(self) -> None:
        """Tell torch which stream uses the buffers from now on, where it is another one: the memory
        of a plan that is dropped waits for all of them.
        """
        if not self.amax.is_cuda:
            return
        stream = torch.cuda.current_stream(self.amax.device)
        if stream not in self._streams:
            for buffer in (self.amax, self.candidates, self._reduced, self._shared):
                buffer.record_stream(stream)
            self._streams.add(stream)

    def tensor_amax(self, i: int) -> torch.Tensor:
        """int32 [1]: the entry of weight i's tensor amax."""
        return self.tensor_amax_of.get(i, self.amax_of[i][-1:])

    def reduce_amax(self, *, in_trouble: bool = False) -> bool:
        """Make every group's amaxes the largest of its ranks, and then those that
        tensor-parallel shards have in common the largest of all shards.

        Args:
            in_trouble: whether this rank cannot cast; its amaxes are of no matter then.

        Returns:
            Whether any rank is in trouble that this one has heard of.
        """
        heard = in_trouble
        for comm, entries in self._amax_of_group.items():
            heard = self._reduce(comm, entries, heard)
        if self._reduced_of_group:
            shared = self._reduced[: len(self._shared)]
            torch.index_select(self.amax, 0, self._shared, out=shared)
            self._reduced[len(self._shared) :].zero_()
            for comm, entries in self._reduced_of_group:
                heard = self._reduce(comm, entries, heard)
            self.amax.index_copy_(0, self._shared, shared)
        return heard

    def _reduce(self, comm: Communicator, entries: torch.Tensor, heard: bool) -> bool:
        if heard:
            entries.fill_(TROUBLE)
        comm.all_reduce_max_(entries)
        return heard or (comm in self.heard_by and int(entries[0]) == TROUBLE)

    def reduce_candidates(self) -> None:
        """Put every group's candidates together."""
        for comm, entries in self._candidates_of_group.items():
            if len(entries):
                comm.all_reduce_sum_(entries)


def _laid_out(
    sizes: Mapping[int, int],
    members: Mapping[Communicator, Sequence[int]],
    device: torch.device,
) -> tuple[torch.Tensor, dict[int, torch.Tensor], dict[Communicator, torch.Tensor]]:
    """A buffer of int32 zeros, its ranges by weight, and by group; ``sizes`` leaves out weights
    that have none.
    """
    whole = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
    by_weight: dict[int, torch.Tensor] = {}
    by_group: dict[Communicator, torch.Tensor] = {}
    end = 0
    for comm, indices in members.items():
        start = end
        for i in indices:
            if i in sizes:
                by_weight[i] = whole[end : end + sizes[i]]
                end += sizes[i]
        by_group[comm] = whole[start:end]
    return whole, by_weight, by_group
