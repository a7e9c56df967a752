"""Extent: a half-open range of elements, the one offset system of zerocast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Elements ``[start, end)`` of one weight (row-major) or of one flat buffer; empty where both
    are equal.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.end, self

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.end - self.start

    def __bool__(self) -> bool:
        return self.end > self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"

    def intersect(self, other: Extent) -> Extent:
        """Return the elements in both; if there are none, an empty extent at the larger start."""
        start = max(self.start, other.start)
        return Extent(start, max(start, min(self.end, other.end)))

    def shifted(self, offset: int) -> Extent:
        """Return the same elements, counted from ``offset`` elements earlier (or later, where it is
        negative).
        """
        return Extent(self.start + offset, self.end + offset)


def chunk(length: int, rank: int, size: int) -> Extent:
    """Return what ``rank`` has of ``length`` rows, columns or entries over ``size`` ranks, as
    ``torch.chunk``, FSDP2 and DTensor divide them: ceil(length / size) each, later ranks fewer or
    none.
    """
    most = -(-length // size)
    return Extent(min(rank * most, length), min((rank + 1) * most, length))


NOTHING = Extent(0, 0)
"""The extent of no element."""
