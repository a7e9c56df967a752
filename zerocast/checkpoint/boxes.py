"""Boxes: which elements of a tensor a rank has, as ``torch.distributed.checkpoint`` counts them.

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
    """What this rank has of a tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        pieces: by box, tensors of the box's sizes; none where this rank has no element.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: dict[Box, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of_range(cls, shape: Sequence[int], extent: Extent, values: torch.Tensor) -> Share:
        """Return the share that consists of elements ``extent``, which are ``values``, flat."""
        share = cls(tuple(shape), values.dtype)
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
        """Return the same share, of new tensors on the CPU that hold nothing yet."""
        empty = {box: torch.empty(box.sizes, dtype=self.dtype, device="cpu") for box in self.pieces}
        return Share(self.shape, self.dtype, empty)

    def copied(self, boxes: Iterable[Box]) -> Share:
        """Return a share of copies of the pieces ``boxes``, on the CPU."""
        copies = {box: self.pieces[box].detach().to("cpu", copy=True) for box in boxes}
        return Share(self.shape, self.dtype, copies)

    @property
    def flat(self) -> torch.Tensor:
        """The elements of :meth:`of_range`, flat, in order."""
        if not self.pieces:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        return torch.cat([piece.reshape(-1) for piece in self.pieces.values()])

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
