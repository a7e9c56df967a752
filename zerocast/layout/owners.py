"""Owners: the elements of each weight that each rank owns, as the shards that are not empty.

A rank of many owns a few of the weights, so this follows what ranks hold, and not the number of
ranks times the number of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.layout.extent import Extent


@dataclass(frozen=True, slots=True)
class Owners:
    """The shards of some weights that are not empty: weight by weight, in the order of elements.

    Attributes:
        weight, rank, start, end: int64 [shards], on the CPU: the place of the weight, the rank that
            owns the shard, and its elements.
        first_of: int64 [weights + 1], on the CPU: the place of each weight's first shard among
            these; then their number.
    """

    weight: torch.Tensor
    rank: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    first_of: torch.Tensor

    @classmethod
    def of(cls, weights: int, shards: torch.Tensor) -> Owners:
        """Return the owners of so many weights.

        Args:
            weights: the number of weights.
            shards: int64 [shards, 4] on the CPU, in any order, some of them empty: weight, rank,
                start and end.
        """
        shards = shards[shards[:, 2] < shards[:, 3]]
        for field in (2, 0):
            shards = shards[shards[:, field].sort(stable=True).indices]
        weight, rank, start, end = (field.contiguous() for field in shards.unbind(1))
        numbers = torch.arange(weights + 1, dtype=torch.int64, device="cpu")
        first_of = torch.searchsorted(weight, numbers)
        return cls(weight, rank, start, end, first_of)

    @classmethod
    def of_extents(cls, extents: torch.Tensor) -> Owners:
        """Make owners of int64 [size, weights, 2] on the CPU: every rank's start and end."""
        size, weights, _ = extents.shape
        rank, weight = (
            torch.arange(count, dtype=torch.int64, device="cpu") for count in (size, weights)
        )
        places = weight.repeat(size), rank.repeat_interleave(weights)
        return cls.of(weights, torch.stack([*places, *extents.view(-1, 2).unbind(1)], dim=1))

    def of_weights(self, weights: Sequence[int]) -> Owners:
        """Return the owners of some of the weights, in this order."""
        shards = [
            (place, rank, extent.start, extent.end)
            for place, weight in enumerate(weights)
            for rank, extent in self.of_weight(weight)
        ]
        fields = torch.tensor(shards, dtype=torch.int64, device="cpu").view(-1, 4)
        return Owners.of(len(weights), fields)

    def __len__(self) -> int:
        return len(self.weight)

    def of_weight(self, weight: int) -> list[tuple[int, Extent]]:
        """Return the ranks that own elements of a weight, each with these, in their order."""
        one = slice(int(self.first_of[weight]), int(self.first_of[weight + 1]))
        fields = self.rank[one].tolist(), self.start[one].tolist(), self.end[one].tolist()
        return [(rank, Extent(start, end)) for rank, start, end in zip(*fields, strict=True)]

    def by_rank(self) -> list[tuple[int, int, int, int]]:
        """Weight, rank, start and end of each shard: rank by rank, weight by weight."""
        order = self.rank.sort(stable=True).indices
        fields = (self.weight, self.rank, self.start, self.end)
        return list(zip(*(field[order].tolist() for field in fields), strict=True))

    def first_wrong(self, numels: Sequence[int]) -> int | None:
        """Return the place of the first weight that its shards do not cover exactly once, or None.

        All weights, of so many elements each, are tested at once.
        """
        numel = torch.tensor(numels, dtype=torch.int64, device="cpu")
        begins = torch.ones_like(self.weight, dtype=torch.bool)  # a weight
        begins[1:] = self.weight[1:] != self.weight[:-1]
        wrong = torch.zeros_like(numel, dtype=torch.bool)
        reached = torch.where(begins, 0, self.end.roll(1))  # by the shard before
        wrong[self.weight[self.start != reached]] = True
        ends = begins.roll(-1)
        wrong[self.weight[ends & (self.end != numel[self.weight])]] = True
        wrong |= (numel > 0) & (self.first_of.diff() == 0)
        return int(wrong.nonzero()[0]) if wrong.any() else None
