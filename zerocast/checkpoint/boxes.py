"""Boxes: the elements of a tensor that a rank has, as ``torch.distributed.checkpoint`` counts them.

A shard of a weight begins and ends anywhere in it. DCP knows *chunks*, boxes that lie in the tensor
in its own shape. So a flat range is cut into boxes, three for a matrix: the rest of a row, whole
rows, the beginning of a row. Each of them is contiguous in memory. A tensor that is saved by other
ranks, or as a DTensor, has other boxes, and what they have in common is a box again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from zerocast.layout import Extent
from zerocast.sharded.placement import is_sharded, to_local


class Box(NamedTuple):
    """Elements of a tensor: the first of them and how many, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class Share:
    """The part of a tensor that this rank has.

    Attributes:
        shape: the shape of the whole tensor.
        dtype: the dtype of its elements.
        pieces: tensors of the sizes of boxes, by box; none where this rank has no element.
        flat: of :meth:`like` and :meth:`of_range` the tensor that the pieces are views of, in
            order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: dict[Box, torch.Tensor] = field(default_factory=dict)
    flat: torch.Tensor | None = None

    @classmethod
    def of_range(cls, shape: Sequence[int], extent: Extent, values: torch.Tensor) -> Share:
        """Return the share that consists of elements ``extent``, which are ``values``, flat."""
        share = cls(tuple(shape), values.dtype, flat=values)
        start = 0
        for box in boxes_of(share.shape, extent):
            end = start + math.prod(box.sizes)
            share.pieces[box] = values[start:end].view(box.sizes)
            start = end
        return share

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Share:
        """Return the share of a DTensor, or of a tensor that this rank has whole."""
        local = to_local(tensor).detach()
        share = cls(tuple(tensor.shape), tensor.dtype)
        if not is_sharded(tensor):
            share.pieces[Box((0,) * tensor.dim(), share.shape)] = local
        elif local.numel():
            made: Any = tensor
            for chunk in made.__create_chunk_list__():
                share.pieces[Box(tuple(chunk.offsets), tuple(chunk.sizes))] = local
        return share

    def like(self) -> Share:
        """Return the same share, of new memory on the CPU that holds nothing yet: one piece after
        the other in one tensor.
        """
        sizes = [math.prod(box.sizes) for box in self.pieces]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device="cpu")
        parts = zip(self.pieces, flat.split(sizes), strict=True)
        return Share(self.shape, self.dtype, {b: part.view(b.sizes) for b, part in parts}, flat)

    def copied(self, boxes: Iterable[Box]) -> Share:
        """Return a share of copies of the pieces ``boxes``, on the CPU."""
        copies = {box: self.pieces[box].detach().to("cpu", copy=True) for box in boxes}
        return Share(self.shape, self.dtype, copies)

    @property
    def only(self) -> torch.Tensor:
        """The one piece of :meth:`of`; no elements where this rank has none."""
        return next(iter(self.pieces.values()), torch.empty(0, dtype=self.dtype, device="cpu"))


def boxes_of(shape: Sequence[int], extent: Extent) -> Iterator[Box]:
    """Yield the boxes of a tensor of ``shape`` that are its elements ``extent``, in their order."""
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
    """Say whether ``boxes`` are all elements of a tensor of ``shape``, each once."""
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        return False
    if len({box.offsets for box in boxes}) < len(boxes):  # by which they are found
        return False
    spans = []
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape):
            return False
        span = [(o, o + size) for o, size in zip(*box, strict=True)]
        if any(end > size for (_, end), size in zip(span, shape, strict=True)):
            return False
        if all(box.sizes):  # others overlap nothing
            spans.append(span)
    along = max(range(len(shape)), key=shape.__getitem__, default=0)  # where boxes lie in a row
    spans.sort(key=lambda span: span[along : along + 1])
    for i, span in enumerate(spans):
        for j in range(i + 1, len(spans)):
            if shape and spans[j][along][0] >= span[along][1]:
                break
            if all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(span, spans[j], strict=True)):
                return False
    return True
