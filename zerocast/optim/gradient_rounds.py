"""Rounds: assigns gradients to all-to-alls, with their dtype and position in the buffer.

A round covers some columns of all ranks (see "Note: columns" in :mod:`zerocast.optim.shards`). Its
buffer is a byte matrix [ranks, row], of which row r is sent to rank r. A row consists of sections,
each with columns of one bucket, in the dtype in which its gradients are sent::

    row of rank 0   [ bucket of codes, BF16 | bucket of FP32 weights | tail ]
    row of rank 1   [ bucket of codes, BF16 | bucket of FP32 weights | tail ]

The exchange is in place: afterwards row r is what rank r sent, and the rows are summed in FP32 in
rank order. So the sum has the same bits on every transport.

A weight's elements are in the rows of the ranks that own them: in one row, or in part of a first
row, whole rows and part of a last one. So a weight is copied in at most three pieces, on any number
of ranks.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zerocast.comm import Communicator
from zerocast.comm.communicator import Wait
from zerocast.layout.block_grid import round_up
from zerocast.optim.buckets import Bucket
from zerocast.optim.shards import ShardedWeights

BUFFER_BYTES = 1 << 25
"""The default buffer size of a round in bytes, 32 MiB. Larger messages are not faster."""

_ALIGNMENT = 8
"""The alignment of sections in bytes: a tail may hold int64."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Columns ``start`` to ``end`` of one bucket, and the dtype in which gradients are sent."""

    bucket: Bucket
    start: int
    end: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return round_up((self.end - self.start) * self.dtype.itemsize, _ALIGNMENT)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a gradient and their place in the buffer.

    Row i of ``place``, a view of the buffer [rows, columns], holds the elements from
    ``start + i * stride``.
    """

    start: int
    stride: int
    place: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Section:
    """A span in the buffer: ``rows`` is a view [ranks, columns] in its dtype, ``columns`` the
    matching columns of this rank.
    """

    columns: slice
    rows: torch.Tensor


class Round:
    """One all-to-all.

    Args:
        spans: the spans that are sent.
        size: the number of ranks.
        tail_bytes: bytes at the end of each row that the caller fills and reads.

    Attributes:
        spans: the spans that are sent.
        nbytes: the size of the buffer in bytes.
        pieces: the pieces of gradients, by weight index.
        tail: uint8 [ranks, tail_bytes], a view of the buffer.
    """

    buffer: torch.Tensor
    tail: torch.Tensor
    sections: list[_Section]

    def __init__(self, spans: Sequence[_Span], size: int, tail_bytes: int = 0) -> None:
        self.spans, self._size, self._tail_bytes = spans, size, tail_bytes
        self._row_bytes = sum(span.row_bytes for span in spans) + round_up(tail_bytes, _ALIGNMENT)
        self.nbytes = size * self._row_bytes
        self.pieces: dict[int, list[_Piece]] = {}

    def place(self, memory: torch.Tensor) -> None:
        """Use the beginning of ``memory``, at least :attr:`nbytes` of uint8, as the buffer."""
        self.buffer = memory[: self.nbytes]
        rows = self.buffer.view(self._size, self._row_bytes)
        self.sections, offset = [], 0
        for span in self.spans:
            nbytes = (span.end - span.start) * span.dtype.itemsize
            first = span.bucket.first_column
            columns = slice(first + span.start, first + span.end)
            section = rows[:, offset : offset + nbytes].view(span.dtype)
            self.sections.append(_Section(columns, section))
            offset += span.row_bytes
        self.tail = rows[:, offset : offset + self._tail_bytes]

    def pack(self, index: int, gradient: torch.Tensor | None) -> None:
        """Copy one weight's ``gradient`` into the buffer, rounded to the sent dtype; zeros if it is
        None.
        """
        if gradient is None:
            for piece in self.pieces[index]:
                piece.place.zero_()
            return
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1).contiguous()
        first = flat.storage_offset()
        for piece in self.pieces[index]:
            shape, strides = piece.place.shape, (piece.stride, 1)
            piece.place.copy_(flat.as_strided(shape, strides, first + piece.start))

    def begin(self, comm: Communicator) -> Wait:
        """Begin the exchange and return a callable that waits for it."""
        return comm.start_all_to_all(self.buffer, self.buffer)

    def sum_into(self, sums: torch.Tensor, *, replaces: bool) -> None:
        """Add the received rows, in rank order, to ``sums``, FP32 [num_columns]. With ``replaces``,
        the first row overwrites the sums.
        """
        for section in self.sections:
            total, rows = sums[section.columns], section.rows.unbind(0)
            if replaces:
                total.copy_(rows[0])
            for row in rows[1:] if replaces else rows:
                total.add_(row)


def plan_rounds(
    shards: ShardedWeights, dtype: torch.dtype | None, tail_bytes: int, buffer_bytes: int | None
) -> list[Round]:
    """Return the rounds of :func:`cut_rounds`, with two alternating buffers and the pieces of the
    gradients.
    """
    rounds = cut_rounds(shards, dtype, tail_bytes, buffer_bytes)
    device = shards.masters.device
    buffers = [torch.zeros(n, dtype=torch.uint8, device=device) for n in buffer_sizes(rounds)]
    for i, each in enumerate(rounds):
        each.place(buffers[i % 2])
    _lay_out(shards, rounds)
    return rounds


def buffer_sizes(rounds: Sequence[Round]) -> list[int]:
    """Return the sizes in bytes of the alternating buffers: two, or one for a single round."""
    return [max(each.nbytes for each in rounds[i::2]) for i in range(min(2, len(rounds)))]


def cut_rounds(
    shards: ShardedWeights, dtype: torch.dtype | None, tail_bytes: int, buffer_bytes: int | None
) -> list[Round]:
    """Return the rounds that send all gradients, in order and without buffers. The last has a tail.

    Args:
        shards: the weights and their buckets.
        dtype: the dtype in which gradients are sent; None for that of a bucket's weights, or FP32
            if these differ.
        tail_bytes: the size in bytes of the tail of each row of the last round.
        buffer_bytes: the maximum size of a round in bytes, with as few rounds as possible. With
            None, each bucket is one round, in the order in which backward completes them, and the
            tail is a separate round.
    """
    size = shards.comm.size
    dtypes = {bucket.first_column: dtype or _common_dtype(shards, bucket)
              for bucket in shards.buckets}  # fmt: skip
    if buffer_bytes is None:
        held = [bucket for bucket in shards.buckets if bucket.layout.rank_numel]
        order = sorted(held, key=lambda bucket: bucket.members[0], reverse=True)
        rounds = [
            Round([_Span(b, 0, b.layout.rank_numel, dtypes[b.first_column])], size) for b in order
        ]
        return [*rounds, Round([], size, tail_bytes)]
    spans = _cut(shards.buckets, dtypes, buffer_bytes // size)
    return [Round(each, size, tail_bytes * (each is spans[-1])) for each in spans]


def _common_dtype(shards: ShardedWeights, bucket: Bucket) -> torch.dtype:
    found = {shards.weights[i].param.dtype for i in bucket.members}
    return found.pop() if len(found) == 1 else torch.float32


def _cut(
    buckets: Sequence[Bucket], dtypes: dict[int, torch.dtype], row_bytes: int
) -> list[list[_Span]]:
    """Return the spans of each round: all columns of all buckets, in rows of at most ``row_bytes``,
    but at least one element.
    """
    rounds, room = [list[_Span]()], row_bytes
    for bucket in buckets:
        start, dtype = 0, dtypes[bucket.first_column]
        while start < bucket.layout.rank_numel:
            fitting = room // _ALIGNMENT * _ALIGNMENT // dtype.itemsize
            if not fitting and rounds[-1]:
                rounds.append([])
                room = row_bytes
                continue
            end = min(start + max(fitting, 1), bucket.layout.rank_numel)
            rounds[-1].append(_Span(bucket, start, end, dtype))
            room -= rounds[-1][-1].row_bytes
            start = end
    return rounds


def _lay_out(shards: ShardedWeights, rounds: Sequence[Round]) -> None:
    """Set the pieces of every round. A weight has pieces only in rounds that hold its elements."""
    spans: dict[int, list[tuple[int, _Section, Round]]] = {}  # by bucket, ascending
    for each in rounds:
        for span, section in zip(each.spans, each.sections, strict=True):
            spans.setdefault(span.bucket.first_column, []).append((span.start, section, each))
    for bucket in shards.buckets:
        places = spans.get(bucket.first_column, [])  # empty for weights without elements
        starts = [start for start, *_ in places]
        width = bucket.layout.rank_numel
        for i, extent in zip(bucket.members, bucket.layout.weight_extents(), strict=True):
            for row, rows, start, end in _rows(extent.start, extent.end, width):
                at = bisect_right(starts, start) - 1
                while at < len(places) and starts[at] < end:
                    first, section, each = places[at]
                    left = max(start - first, 0)
                    right = min(end - first, section.rows.shape[1])
                    elements = row * width + first + left - extent.start
                    view = section.rows[row : row + rows, left:right]
                    each.pieces.setdefault(i, []).append(_Piece(elements, width, view))
                    at += 1


def _rows(start: int, end: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Split elements ``start`` to ``end`` of a bucket with rows of ``width`` elements.

    Yield the first row, the number of rows, the first column and the end column of each part.
    """
    while start < end:
        row, column = divmod(start, width)
        whole = (end - start) // width if column == 0 else 0
        stop = width if whole else min(width, column + end - start)
        yield row, max(whole, 1), column, stop
        start += max(whole, 1) * (stop - column)
