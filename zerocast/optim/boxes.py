"""Boxes: the elements of a tensor that a rank holds, as ``torch.distributed.checkpoint`` counts
them.

A shard of a weight begins and ends at any element. DCP uses *chunks*: boxes in the shape of the
tensor. So a flat range is split into boxes, for a matrix at most three: the rest of a row, whole
rows, and the beginning of a row. Each box is contiguous in memory. A tensor saved on another number
of ranks, or as a DTensor, has other boxes. The intersection of two boxes is a box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zerocast.layout import Extent
from zerocast.sharded.placement import is_sharded, to_local


class Box(NamedTuple):
    """A box of elements of a tensor: its offset and its size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def common(self, other: Box) -> Box | None:
        """Return the intersection of both boxes; None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [min(o + s, p + t) for o, s, p, t in zip(*self, *other, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: Box) -> Box:
        """Return the same box with offsets relative to ``outer``."""
        offsets = zip(self.offsets, outer.offsets, strict=True)
        return Box(tuple(own - first for own, first in offsets), self.sizes)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of these elements of a tensor."""
        for dim, (start, size) in enumerate(zip(*self, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


@dataclass
class Share:
    """The part of a tensor that this rank holds.

    Attributes:
        shape: the shape of the whole tensor.
        pieces: the tensor of each box, in the box's sizes; empty if this rank has no element.
        local: the tensor that the pieces are views of, in their order.
    """

    shape: tuple[int, ...]
    pieces: dict[Box, torch.Tensor]
    local: torch.Tensor

    @classmethod
    def of_range(cls, shape: Sequence[int], extent: Extent, values: torch.Tensor) -> Share:
        """Return the share of the elements ``extent``, whose flat ``values`` are given."""
        boxes = dict.fromkeys(boxes_of(tuple(shape), extent), values)
        return cls(tuple(shape), boxes, values).holding(values)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Share:
        """Return the share of a DTensor, or of a tensor that this rank holds whole."""
        local = to_local(tensor).detach()
        pieces = {Box((0,) * tensor.dim(), tuple(tensor.shape)): local}
        if is_sharded(tensor):
            made: Any = tensor
            chunks = made.__create_chunk_list__() if local.numel() else ()
            pieces = {Box(tuple(c.offsets), tuple(c.sizes)): local for c in chunks}
        return cls(tuple(tensor.shape), pieces, local)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.local.dtype

    def holding(self, values: torch.Tensor) -> Share:
        """Return the same share of another tensor, of which this rank holds ``values``."""
        values = values.detach()
        if [values.shape] == [box.sizes for box in self.pieces]:  # with any strides
            return Share(self.shape, dict.fromkeys(self.pieces, values), values)
        parts = values.reshape(-1).split([math.prod(box.sizes) for box in self.pieces])
        pieces = {b: part.view(b.sizes) for b, part in zip(self.pieces, parts, strict=True)}
        return Share(self.shape, pieces, values)

    def fill(self, source: Mapping[Box, torch.Tensor]) -> bool:
        """Copy the elements of another share's pieces into these pieces. Return whether they cover
        each element exactly once.
        """
        for box, piece in self.pieces.items():
            found = []
            for other, values in source.items():
                if common := box.common(other):
                    found.append(common.inside(box))
                    found[-1].of(piece).copy_(common.inside(other).of(values))
            if not are_whole(box.sizes, found):
                return False
        return True


def boxes_of(shape: Sequence[int], extent: Extent) -> Iterator[Box]:
    """Yield the boxes that form elements ``extent`` of a tensor of ``shape``, in order."""
    if not extent:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    first, last = extent.start // inner, (extent.end - 1) // inner
    row = first
    while row <= last:
        start, end = max(extent.start - row * inner, 0), min(extent.end - row * inner, inner)
        if (start, end) == (0, inner):
            rows = (extent.end - row * inner) // inner
            yield Box((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            row += rows
            continue
        for box in boxes_of(shape[1:], Extent(start, end)):
            yield Box((row, *box.offsets), (1, *box.sizes))
        row += 1


def are_whole(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether ``boxes`` cover each element of a tensor of ``shape`` exactly once."""
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        return False
    if len({box.offsets for box in boxes}) < len(boxes):  # offsets identify boxes
        return False
    spans = []
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape):
            return False
        span = [(o, o + size) for o, size in zip(*box, strict=True)]
        if any(end > size for (_, end), size in zip(span, shape, strict=True)):
            return False
        if all(box.sizes):  # empty boxes overlap nothing
            spans.append(span)
    along = max(range(len(shape)), key=shape.__getitem__, default=0)  # the dimension to sort along
    spans.sort(key=lambda span: span[along : along + 1])
    for i, span in enumerate(spans):
        for j in range(i + 1, len(spans)):
            if shape and spans[j][along][0] >= span[along][1]:
                break
            if all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(span, spans[j], strict=True)):
                return False
    return True
