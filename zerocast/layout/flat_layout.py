"""FlatLayout: weights end to end in one flat buffer, cut evenly over ranks.

This is how ZeRO optimizers own weights: concatenate them, give rank r the r-th of D equal ranges,
wherever those fall inside a weight. The ranges are equal (the end is padded) so that one in-place
all-gather moves them, and their length is a multiple of ``alignment`` elements. So no byte of
packed 4-bit codes is shared between two ranks, provided that every weight starts on a byte of the
buffer: give weights with an odd number of elements a separate layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from zerocast.layout.block_grid import ceil_div, round_up
from zerocast.layout.extent import Extent

ALIGNMENT = 128
"""Elements; 64 bytes of 4-bit codes, so every rank's range of every format starts on a cache
line."""


@dataclass(frozen=True)
class FlatLayout:
    """Weights of ``numels`` elements end to end, over ``world_size`` ranks.

    Attributes:
        numels: elements of each weight, in buffer order.
        world_size: ranks that the buffer is cut over.
        alignment: every rank's range is a multiple of this many elements.
    """

    numels: tuple[int, ...]
    world_size: int
    alignment: int = ALIGNMENT

    @cached_property
    def rank_numel(self) -> int:
        """The elements of one rank's range, padding included; the same on every rank."""
        return round_up(ceil_div(sum(self.numels), self.world_size), self.alignment)

    @property
    def numel(self) -> int:
        """The elements of the whole buffer, padding included."""
        return self.rank_numel * self.world_size

    def weight_extents(self) -> list[Extent]:
        """Return the range of each weight in the buffer."""
        ends = list(accumulate(self.numels))
        return [Extent(end - n, end) for n, end in zip(self.numels, ends, strict=True)]

    def rank_extent(self, rank: int) -> Extent:
        """Return the range of the buffer that ``rank`` owns, padding included."""
        return Extent(rank * self.rank_numel, (rank + 1) * self.rank_numel)

    def owners(self, extent: Extent) -> list[tuple[int, Extent]]:
        """Return the ranks that own elements of ``extent`` of the buffer, ascending, each with its
        own.
        """
        width = self.rank_numel
        ranks = range(extent.start // width, ceil_div(extent.end, width)) if extent else ()
        return [(r, extent.intersect(Extent(r * width, (r + 1) * width))) for r in ranks]

    def shards(self, rank: int) -> list[Extent]:
        """Return what ``rank`` owns of each weight, in elements of that weight; empty where it owns
        nothing.
        """
        owned = self.rank_extent(rank)
        return [owned.intersect(w).shifted(-w.start) if owned.intersect(w) else Extent(0, 0)
                for w in self.weight_extents()]  # fmt: skip

    def shard_slices(self, rank: int) -> list[slice]:
        """Return the slice, by weight, of ``rank``'s own range (its FP32 master, say) that
        :meth:`shards` names.
        """
        owned = self.rank_extent(rank)
        parts = [owned.intersect(w) for w in self.weight_extents()]
        return [
            slice(p.start - owned.start, p.end - owned.start) if p else slice(0, 0) for p in parts
        ]


def check_partition(numel: int, extents: Sequence[Extent], unit: str = "elements") -> str | None:
    """Return what is wrong with ``extents`` (by rank) as a partition of ``numel`` elements, or None
    where nothing is.

    A partition covers every element exactly once. Empty extents may be anywhere. ``unit`` is the
    name of the elements in messages.
    """
    reached, last_rank = 0, 0
    for rank, extent in sorted(enumerate(extents), key=lambda item: item[1]):
        if not extent:
            continue
        if extent.start < reached:
            return (
                f"{unit} {Extent(extent.start, min(reached, extent.end))} are owned twice: rank "
                f"{last_rank} holds {extents[last_rank]} and rank {rank} holds {extent}"
            )
        if extent.start > reached:
            return f"{unit} {Extent(reached, extent.start)} are owned by no rank"
        reached, last_rank = extent.end, rank
    if reached < numel:
        return f"{unit} {Extent(reached, numel)} are owned by no rank"
    if reached > numel:
        return f"rank {last_rank} holds {extents[last_rank]}, past the end of {numel} {unit}"
    return None
