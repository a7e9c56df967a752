"""What the ranks of a plan exchange before its codes are cast: amaxes, and 4-over-6's candidates.

Both lie in one buffer each, group after group and weight after weight, so that a group's entries
are one contiguous tensor: one all-reduce. Of weights that are parts of larger ones some amaxes
belong to the other parts, too; these few are reduced once more, over the ranks that hold the parts,
in a buffer of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from zerocast.comm import Communicator
from zerocast.layout import Cuts, Extent
from zerocast.ops import Candidates
from zerocast.tensors import QuantizedStorage


class Exchange:
    """The buffers of one plan.

    Args:
        storages: the plan's weights.
        members: by group the places of its weights, all weights once.
        extents: by group int64 [size, members, 2], who owns what.
        parts: by tensor-parallel group the places of the weights that it holds in parts.
        amax_groups: by weight the label of its amax group, or None.
        device: where the buffers are.

    Attributes:
        amax: int32, every weight's amaxes.
        candidates: int32, what the blocks of 4-over-6 weights choose their scales by.
        amax_of: by weight, its part of ``amax``: int32 [storage.amax_slots].
        tensor_amax_of: by weight of an amax group, int32 [1]: the entry that its group shares.
        candidates_of: by weight that chooses scales, its part of ``candidates``.
    """

    def __init__(
        self,
        storages: Sequence[QuantizedStorage],
        members: Mapping[Communicator, Sequence[int]],
        extents: Mapping[Communicator, torch.Tensor],
        parts: Mapping[Communicator, Sequence[int]],
        amax_groups: Sequence[str | None],
        device: torch.device,
    ) -> None:
        cuts = {
            i: Cuts.of(storages[i].grid, [Extent(*pair) for pair in extents[comm][:, at].tolist()])
            for comm, indices in members.items()
            for at, i in enumerate(indices)
            if storages[i].recipe.chooses_scales
        }
        words = {i: Candidates.words(storages[i].grid, cuts[i]) for i in cuts}
        self.amax, self.amax_of, self._amax_parts = _cut(
            {i: storage.amax_slots for i, storage in enumerate(storages)}, members, device
        )
        leaders: dict[str, torch.Tensor] = {}
        self.tensor_amax_of = {
            i: leaders.setdefault(label, self.amax_of[i][-1:])
            for i, label in enumerate(amax_groups)
            if label is not None and storages[i].recipe.scales_tensor
        }
        self.candidates, carved, self._candidate_parts = _cut(words, members, device)
        self.candidates_of = {
            i: Candidates.carve(carved[i], storages[i].grid, cuts[i]) for i in cuts
        }
        shared = {comm: self._shared_entries(storages, indices) for comm, indices in parts.items()}
        entries = list(itertools.chain.from_iterable(shared.values()))
        self._shared = torch.tensor(entries, dtype=torch.int64, device=device)
        self._reduced = torch.zeros(len(self._shared), dtype=torch.int32, device=device)
        split = self._reduced.split([len(group) for group in shared.values()])
        self._reduced_parts = [
            (comm, part) for comm, part in zip(shared, split, strict=True) if len(part)
        ]

    def _shared_entries(
        self, storages: Sequence[QuantizedStorage], indices: Sequence[int]
    ) -> list[int]:
        """The places in ``amax`` of what the parts ``indices`` share with the other parts."""
        entries: dict[int, None] = {}
        for i in indices:
            start = int(self.amax_of[i].storage_offset())
            for each in storages[i].shared_amaxes():
                entries |= dict.fromkeys(range(start + each.start, start + each.stop))
            if i in self.tensor_amax_of:
                entries[int(self.tensor_amax_of[i].storage_offset())] = None
        return list(entries)

    def tensor_amax(self, i: int) -> torch.Tensor:
        """int32 [1]: the entry of weight i's tensor amax."""
        return self.tensor_amax_of.get(i, self.amax_of[i][-1:])

    def reduce_amax(self) -> None:
        """Make every group's amaxes the largest of its ranks, and then those that parts share the
        largest of all parts.
        """
        for comm, part in self._amax_parts.items():
            comm.all_reduce_max_(part)
        if self._reduced_parts:
            torch.index_select(self.amax, 0, self._shared, out=self._reduced)
            for comm, part in self._reduced_parts:
                comm.all_reduce_max_(part)
            self.amax.index_copy_(0, self._shared, self._reduced)

    def reduce_candidates(self) -> None:
        """Put every group's candidates together."""
        for comm, part in self._candidate_parts.items():
            if len(part):
                comm.all_reduce_sum_(part)


def _cut(
    sizes: Mapping[int, int],
    members: Mapping[Communicator, Sequence[int]],
    device: torch.device,
) -> tuple[torch.Tensor, dict[int, torch.Tensor], dict[Communicator, torch.Tensor]]:
    """A buffer of int32 zeros, its parts by weight, and by group; ``sizes`` leaves out weights that
    have no part.
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
