"""The format in which a tensor is sent: whole, or as runs of elements that changed since a version.

Note: a delta
~~~~~~~~~~~~~
A delta is one uint8 tensor, so any transport of named tensors can send it. It begins with a header
of 8-byte integers::

    magic   since   version   checksum   seal   bytes   dtype (3)   dimensions   segments
    the shape; of each segment: first element, runs, elements

``since`` is the version that it follows, or -1 for a whole tensor. ``checksum`` is the checksum of
the tensor after the update (:mod:`zerocast.tensors.digest`). ``bytes`` is the length of the delta,
and ``seal`` its checksum computed with a seal of 0. Segments follow, one per rank: for each run the
number of elements skipped before it (uint16) and its length (uint8), then the elements of all runs.
A longer gap or run takes several entries. A segment with runs = -1 has elements without gaps.

Elements are those of the stored tensor: a byte for two 4-bit codes, four bytes for an FP32 scale.
Runs less than 4 bytes apart are merged, which is shorter.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.arguments import check_tensor, why_no_memory
from zerocast.backends import backend_for
from zerocast.backends.reference.changes import places_in
from zerocast.errors import DeltaError
from zerocast.numerics import Comparison
from zerocast.safe_files import MOST_DIMENSIONS
from zerocast.tensors.digest import digest

_MAGIC = 0x33746C6564637A  # "zcdelt3"
_SEAL = 4
_FIXED = 11  # words of the header before the shape
_WHOLE = -1
SENT = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip
"""The dtypes of tensors that can be sent: those that torch copies and compares byte by byte."""


@dataclass(frozen=True)
class Segment:
    """The changed elements of one rank's piece, as they are sent.

    Attributes:
        first: the index of the piece's first element in the whole tensor.
        runs: the number of entries of gaps and lengths; -1 for elements without gaps.
        count: the number of elements.
        data: uint8: gaps, lengths, elements.
    """

    first: int
    runs: int
    count: int
    data: torch.Tensor


# --- what changed ---


def changed_segments(
    comparisons: Sequence[Comparison],
) -> tuple[list[Segment], list[torch.Tensor]]:
    """Compare held values with new ones, and hold the new ones.

    There must be at least one comparison, and all must be on one device.

    Returns:
        The elements that changed, and what they add to the digests of the whole tensors.
    """
    found = backend_for(comparisons[0].values.device).changed_runs(comparisons)
    segments = [
        Segment(each.first, runs, count, data)
        for each, (runs, count, data, _) in zip(comparisons, found, strict=True)
    ]
    return segments, [digest for *_, digest in found]


def whole_segment(values: torch.Tensor) -> Segment:
    """Return a segment with all elements of a tensor."""
    return Segment(
        0, _WHOLE, values.numel(), values.contiguous().unsqueeze(-1).view(torch.uint8).view(-1)
    )


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
    """Return the uint8 delta of a tensor; ``total`` is the tensor's checksum after the update."""
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
        since: the version that it follows; None if it has the whole tensor.
        version: the version of the tensor after the update.
        checksum: the checksum of the tensor after the update.
        shape, dtype: the shape and dtype of the tensor.
        places: int64, the flat indices of the changed elements; None for all.
        values: the elements at ``places``, flat.
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
        DeltaError: if ``data`` is not a delta, or was damaged.
    """
    check_tensor("a delta", data)
    damaged = DeltaError(
        f"{name}: the delta of {data.nbytes} bytes was damaged in transfer, or is not a delta; ask "
        "for a full sync, deltas(since=None)."
    )
    if why_no_memory(data) or data.dtype != torch.uint8 or data.dim() != 1:
        raise damaged
    if data.nbytes < _FIXED * 8:
        raise damaged
    sealed = data.clone()
    sealed[_SEAL * 8 : _SEAL * 8 + 8] = 0
    seal = data[_SEAL * 8 : _SEAL * 8 + 8].clone().view(torch.int64)
    header = data[: _FIXED * 8].clone().view(torch.int64).tolist()
    magic, since, version, total, _, nbytes, *words = header
    if (magic, nbytes) != (_MAGIC, data.nbytes) or bool(digest(sealed) != seal):
        raise damaged
    try:
        shape, dtype, places, values = _unpacked(data, words)
    except (ValueError, AttributeError, RuntimeError) as error:  # not made by packed()
        raise damaged from error
    return Delta(None if since < 0 else since, version, total, shape, dtype, places, values)


def _unpacked(
    data: torch.Tensor, words: Sequence[int]
) -> tuple[torch.Size, torch.dtype, torch.Tensor | None, torch.Tensor]:
    """Return shape, dtype, places and values of a delta; ``words`` end its fixed header.

    Raises:
        ValueError, AttributeError, RuntimeError: if they are inconsistent.
    """
    *names, dimensions, segments = words
    name = b"".join(word.to_bytes(8, "little", signed=True) for word in names)
    dtype = getattr(torch, name.rstrip(b"\0").decode())
    if not isinstance(dtype, torch.dtype) or dtype not in SENT:
        raise ValueError(f"{dtype} is not a dtype of a delta")
    begin, end = _FIXED * 8, (_FIXED + dimensions + 3 * segments) * 8
    is_long = dimensions > MOST_DIMENSIONS
    if is_long or min(dimensions, segments) < 0 or end > data.nbytes:
        raise ValueError(f"{dimensions} dimensions and {segments} segments")
    rest = data[begin:end].clone().view(torch.int64).tolist()
    shape, described = torch.Size(rest[:dimensions]), rest[dimensions:]
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}")
    places, values, spans, numel = [], [], [(0, 0)], math.prod(shape)
    for first, runs, count in zip(*(described[i::3] for i in range(3)), strict=True):
        is_all = runs == _WHOLE
        size = count * dtype.itemsize + (0 if is_all else 3 * runs)
        if min(runs + 1, count, first) < 0 or end + size > data.nbytes:
            raise ValueError(f"a segment from {first} on of {runs} runs and {count} elements")
        if is_all and (segments, first, count) != (1, 0, numel):
            raise ValueError(f"{count} elements without gaps from {first} on")
        if not is_all:
            gaps = data[end : end + 2 * runs].clone().view(torch.int16).long() & 0xFFFF
            lengths = data[end + 2 * runs : end + 3 * runs].long()
            ends = (gaps + lengths).cumsum(0)
            spans.append((first, first + (int(ends[-1]) if runs else 0)))
            if int(lengths.sum()) != count:
                raise ValueError(f"runs of {count} elements from {first} on")
            places.append(places_in(ends - lengths, lengths) + first)
            end += 3 * runs
        values.append(data[end : end + count * dtype.itemsize])
        end += count * dtype.itemsize
    spans.sort()
    if end != data.nbytes or spans[-1][1] > numel:
        raise ValueError(f"{data.nbytes - end} bytes more, runs up to {spans[-1][1]} of {numel}")
    if any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
        raise ValueError("segments that overlap")
    flat = torch.cat(values).view(dtype)
    if not places:
        flat.view(shape)  # raises here if the values do not have this shape
    return shape, dtype, torch.cat(places) if places else None, flat
