"""What travels of a tensor: all of it, or the elements that changed since a version, as runs.

Note: a delta
~~~~~~~~~~~~~
A delta is one uint8 tensor, so whatever moves named tensors moves deltas. It begins with a header
of 8-byte integers::

    magic   since   version   checksum   seal   bytes   dtype (3)   dimensions   segments
    the shape; of each segment: first element, runs, elements

``since`` is the version that it follows, or -1 for all of a tensor; ``checksum`` is that of the
tensor afterwards (:mod:`zerocast.tensors.digest`); ``bytes`` is the length of the delta, and
``seal`` its checksum with a seal of 0. Segments follow, one a rank: of each run the elements left
out before it (uint16) and its length (uint8), then the elements of all runs. A longer gap or run
takes several entries. A segment with runs = -1 is elements without gaps.

Elements are those of the stored tensor: a byte for two 4-bit codes, four bytes for an FP32 scale.
Runs that lie less than 4 bytes apart are one, which is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.backends.reference.digest import as_integers
from zerocast.errors import DeltaError
from zerocast.tensors.digest import digest

_MAGIC = 0x32746C6564637A  # "zcdelt2"
_SEAL = 4
_FIXED = 11  # words of the header before the shape
_WHOLE = -1
_MOST_GAP, _MOST_LENGTH = (1 << 16) - 1, (1 << 8) - 1
_RUN_BYTES = 3


@dataclass(frozen=True)
class Segment:
    """The changed elements of one rank's piece, as they travel.

    Attributes:
        first: the place of the piece in the whole tensor, in elements.
        runs: entries of gaps and lengths; -1 where ``count`` elements follow without gaps.
        count: elements.
        data: uint8: gaps, lengths, elements.
    """

    first: int
    runs: int
    count: int
    data: torch.Tensor


# --- what changed ---


def changed(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """int64: the places of the elements of ``new`` whose bytes are not those of ``old``, ascending;
    both flat and of one dtype.
    """
    old, new = _aligned(old), _aligned(new)
    whole = new.nbytes // 64 * 64 // new.itemsize
    words = [as_integers(each[:whole]).view(torch.int64) for each in (old, new)]
    differ = words[0] != words[1]
    # Eight words are looked at as one first: most have not changed.
    by_eight = differ.view(torch.int64)
    groups = by_eight.nonzero().view(-1)
    inside = by_eight[groups].view(torch.bool).nonzero().view(-1)
    at = (groups[inside >> 3] << 3) + (inside & 7)
    each = 8 // new.itemsize
    of_old, of_new = (word[at].view(as_integers(new).dtype) for word in words)
    inside = (of_old != of_new).nonzero().view(-1)
    tail = (as_integers(old[whole:]) != as_integers(new[whole:])).nonzero().view(-1) + whole
    return torch.cat([at[inside // each] * each + inside % each, tail])


def _aligned(values: torch.Tensor) -> torch.Tensor:
    """Return ``values``, which begin at a word of 8 bytes; copied where they do not."""
    return values.clone() if values.storage_offset() * values.itemsize % 8 else values


def segment_of(values: torch.Tensor, places: torch.Tensor, first: int) -> Segment:
    """Return the elements of ``values``, flat, at ``places``, as runs."""
    if not len(places):
        return Segment(first, 0, 0, torch.empty(0, dtype=torch.uint8, device=values.device))
    closed = max(1, 1 + _RUN_BYTES // values.itemsize)
    begins = torch.cat([torch.ones_like(places[:1], dtype=torch.bool), places.diff() > closed])
    starts = places[begins]
    ends = places[begins.roll(-1)] + 1  # begins[0] is set, so the last place ends a run
    elements = as_integers(values)[_places(starts, ends - starts)]
    gaps = starts - torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    gaps, lengths = _entries(gaps, ends - starts)
    parts = (gaps.to(torch.int16), lengths.to(torch.uint8), elements)
    data = torch.cat([part.view(torch.uint8) for part in parts])
    return Segment(first, len(gaps), len(elements), data)


def whole_segment(values: torch.Tensor) -> Segment:
    """Return all of a tensor."""
    return Segment(0, _WHOLE, values.numel(), values.contiguous().view(-1).view(torch.uint8))


def _places(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int64: the places in all runs."""
    before = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - before, lengths) + torch.arange(
        int(lengths.sum()), dtype=torch.int64, device=starts.device
    )


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


# --- as bytes ---


def packed(
    segments: Sequence[Segment],
    *,
    since: int | None,
    version: int,
    total: int,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the delta of a tensor, uint8; ``total`` is its checksum afterwards."""
    name = str(dtype).removeprefix("torch.").encode().ljust(24, b"\0")
    words = [int.from_bytes(name[at : at + 8], "little", signed=True) for at in (0, 8, 16)]
    words_of_header = _FIXED + len(shape) + 3 * len(segments)
    nbytes = 8 * words_of_header + sum(segment.data.nbytes for segment in segments)
    header = [_MAGIC, -1 if since is None else since, version, total, 0, nbytes, *words]
    header += [len(shape), len(segments), *shape]
    for segment in segments:
        header += [segment.first, segment.runs, segment.count]
    device = segments[0].data.device
    start = torch.tensor(header, dtype=torch.int64, device=device)
    delta = torch.cat([start.view(torch.uint8), *(segment.data for segment in segments)])
    delta[_SEAL * 8 : _SEAL * 8 + 8] = digest(delta).view(1).view(torch.uint8)
    return delta


@dataclass(frozen=True)
class Delta:
    """A delta that has been read.

    Attributes:
        since: the version that it follows; None where it is all of the tensor.
        version: that of the tensor afterwards.
        checksum: the tensor's afterwards.
        shape, dtype: the tensor's.
        places: int64, what changed; None for all.
        values: flat: the elements at ``places``.
    """

    since: int | None
    version: int
    checksum: int
    shape: torch.Size
    dtype: torch.dtype
    places: torch.Tensor | None
    values: torch.Tensor


def unpacked(name: str, data: torch.Tensor) -> Delta:
    """Read the delta of the tensor ``name``.

    Raises:
        DeltaError: where it is none, or was damaged on its way.
    """
    damaged = DeltaError(
        f"{name}: the delta of {data.nbytes} bytes was damaged on its way, or is none; ask for a "
        f"full sync, deltas(since=None)."
    )
    if data.dtype != torch.uint8 or data.dim() != 1 or data.nbytes < _FIXED * 8:
        raise damaged
    sealed = data.clone()
    sealed[_SEAL * 8 : _SEAL * 8 + 8] = 0
    seal = data[_SEAL * 8 : _SEAL * 8 + 8].clone().view(torch.int64)
    header = data[: _FIXED * 8].clone().view(torch.int64).tolist()
    magic, since, version, total, _, nbytes, *words, dimensions, segments = header
    if (magic, nbytes) != (_MAGIC, data.nbytes) or bool(digest(sealed) != seal):
        raise damaged
    dtype_name = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    dtype = getattr(torch, dtype_name.rstrip(b"\0").decode())
    begin, end = _FIXED * 8, (_FIXED + dimensions + 3 * segments) * 8
    rest = data[begin:end].clone().view(torch.int64).tolist()
    shape, described = torch.Size(rest[:dimensions]), rest[dimensions:]
    places, values = [], []
    for first, runs, count in zip(*(described[i::3] for i in range(3)), strict=True):
        if runs != _WHOLE:
            gaps = data[end : end + 2 * runs].clone().view(torch.int16).long() & _MOST_GAP
            lengths = data[end + 2 * runs : end + 3 * runs].long()
            starts = (gaps + lengths).cumsum(0) - lengths
            places.append(_places(starts, lengths) + first)
            end += 3 * runs
        values.append(data[end : end + count * dtype.itemsize])
        end += count * dtype.itemsize
    return Delta(
        None if since < 0 else since,
        version,
        total,
        shape,
        dtype,
        torch.cat(places) if places else None,
        torch.cat(values).view(dtype),
    )
