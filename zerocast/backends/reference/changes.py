"""Finds the changed elements of a tensor, in plain torch:
:meth:`zerocast.numerics.Backend.changed_runs`.
"""

from __future__ import annotations

import torch

from zerocast.backends.reference.digest_formula import digest_of
from zerocast.numerics import ChangedRuns, Comparison

_BITS = 64
"""Flags in a word."""

_MOST_GAP, _MOST_LENGTH, _ENTRY_BYTES = (1 << 16) - 1, (1 << 8) - 1, 3


class Changes:
    """The changed elements of one comparison, which starts without any.

    Attributes:
        flags: int64 [elements / 64, rounded up]: a bit for each element.
        digest: int64 []: what the changes add to the digest of the whole tensor.
        count: int64 []: the number of changed elements; after ``digest`` in memory.
    """

    def __init__(self, target: Comparison) -> None:
        words = -(-len(target.values) // _BITS)
        memory = torch.zeros(words + 2, dtype=torch.int64, device=target.values.device)
        self.flags, self.digest, self.count = memory[2:], memory[0], memory[1]


def changed_runs(target: Comparison) -> ChangedRuns:
    """Compare one tensor with what is held; return the changed elements as they travel."""
    changes = Changes(target)
    compare(target, changes)
    return *runs(target, changes), changes.digest


def compare(target: Comparison, changes: Changes) -> None:
    """Flag what differs of one comparison, and store it."""
    held, values = target.held, target.values
    places = (held != values).nonzero().view(-1)
    changes.flags.scatter_add_(0, places // _BITS, torch.ones_like(places) << places % _BITS)
    change = digest_of(values[places], places + target.first, held[places])
    changes.digest.add_(change)
    changes.count.add_(len(places))
    held.copy_(values)


def runs(target: Comparison, changes: Changes) -> tuple[int, int, torch.Tensor]:
    """Return entries, elements, and the data of the flagged elements as they travel, uint8."""
    values = target.values
    places = _flagged(changes.flags)
    if not len(places):
        return 0, 0, values.new_empty(0, dtype=torch.uint8)
    closed = 1 + _ENTRY_BYTES // values.itemsize
    begins = torch.cat([torch.ones_like(places[:1], dtype=torch.bool), places.diff() > closed])
    starts = places[begins]
    ends = places[begins.roll(-1)] + 1  # begins[0] is set, so the last place ends a run
    elements = values[places_in(starts, ends - starts)]
    gaps = starts - torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    gaps, lengths = _entries(gaps, ends - starts)
    parts = (gaps.to(torch.int16), lengths.to(torch.uint8), elements)
    data = torch.cat([part.view(torch.uint8) for part in parts])
    return len(gaps), len(elements), data


def most_runs(target: Comparison, changes: Changes) -> tuple[int, int]:
    """Return the most entries and elements that :func:`runs` may give: each run has a change, and
    unchanged elements separate it from the next run.
    """
    size, changed = len(target.values), int(changes.count)
    closed = 1 + _ENTRY_BYTES // target.values.itemsize
    elements, count = min(changed * closed, size), min(changed, size // (closed + 1) + 1)
    return count + size // _MOST_GAP + elements // _MOST_LENGTH, elements


def places_in(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the places in all runs, int64."""
    before = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - before, lengths) + torch.arange(
        int(lengths.sum()), dtype=torch.int64, device=starts.device
    )


def _flagged(flags: torch.Tensor) -> torch.Tensor:
    """Return the places of the flags that are set, int64, ascending."""
    words = flags.nonzero().view(-1)
    bits = torch.arange(_BITS, dtype=torch.int64, device=flags.device)
    places = words.unsqueeze(1) * _BITS + bits
    return places[(flags[words].unsqueeze(1) >> bits & 1).bool()]


def _entries(gaps: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries of runs: of a gap that is too long for one, empty runs before it; of a
    run, more runs without a gap.
    """
    skips, more = gaps // _MOST_GAP, (lengths - 1) // _MOST_LENGTH
    counts = skips + 1 + more
    if int(counts.max()) == 1:
        return gaps, lengths
    numbers = torch.arange(int(counts.sum()), dtype=torch.int64, device=gaps.device)
    run = torch.repeat_interleave(numbers[: len(gaps)], counts)
    at = numbers - (counts.cumsum(0) - counts)[run] - skips[run]
    gap = torch.where(at < 0, _MOST_GAP, torch.where(at == 0, gaps[run] % _MOST_GAP, 0))
    left = lengths[run] - at * _MOST_LENGTH
    return gap, torch.where(at < 0, 0, left.clamp(max=_MOST_LENGTH))
