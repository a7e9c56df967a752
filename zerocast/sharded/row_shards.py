"""RowShards: the rows that FSDP2 gives each rank, and the bytes that are sent for them.

FSDP2 gives each of D ranks ceil(M / D) rows of a weight [M, K], the last ones fewer or none, and
gathers equal chunks: a rank with fewer rows fills up. If M does not divide by D it asks that what
is sent present itself in the padded shape [ceil(M / D), K], also if an element is half a byte, and
splits all that was gathered into rows of K bytes. So then a rank's chunk is rounded up until D of
them are whole rows of bytes, which with 4-bit codes may leave some bytes unused between the chunks.

Of a stack [E, ..., M, K] the rows are the E entries of its first dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.layout import Extent, chunk, round_up
from zerocast.numerics import ElementFormat, packed_columns
from zerocast.recipes.recipe import Buffers


@dataclass(frozen=True, slots=True)
class RowShards:
    """The rows of a weight over ``world_size`` ranks, its codes in ``fmt``."""

    shape: torch.Size
    world_size: int
    fmt: ElementFormat

    @property
    def rows(self) -> int:
        """Rows of the rank that has most: those of the padded shape."""
        return chunk(self.shape[0], 0, self.world_size).size

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return self.shape[1:].numel()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of codes."""
        return self.shape[1:-1].numel() * packed_columns(self.fmt, self.shape[-1])

    @property
    def is_even(self) -> bool:
        """Whether every rank has the same number of rows."""
        return self.shape[0] % self.world_size == 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of codes that each rank sends."""
        return self.padded_bytes(self.rows * self.row_bytes)

    def padded_bytes(self, size: int) -> int:
        """Return ``size`` rounded up to what FSDP2 takes as the bytes of one tensor of a rank."""
        common = math.gcd(self.row_numel, self.world_size)
        return size if self.is_even else round_up(size, self.row_numel // common)

    @property
    def has_gaps(self) -> bool:
        """Whether what is gathered is not the codes as they lie in a weight."""
        return self.sent_bytes != self.rows * self.row_bytes

    def extent(self, rank: int) -> Extent:
        """Return the elements of ``rank``'s rows."""
        rows = chunk(self.shape[0], rank, self.world_size)
        return Extent(rows.start * self.row_numel, rows.end * self.row_numel)

    def code_bytes(self, rank: int) -> int:
        """Return the bytes of ``rank``'s codes, without what fills up."""
        return self.extent(rank).size // self.row_numel * self.row_bytes

    def to_send(self, sent: torch.Tensor) -> torch.Tensor:
        """Return ``sent``, uint8 of :meth:`padded_bytes`, in the shape in which FSDP2 takes it."""
        return sent if self.is_even else PaddedCodes(sent, (self.rows, *self.shape[1:]))

    def views(
        self, planes: Sequence[str], outputs: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return, by plane, the codes that were gathered as they lie in a weight."""
        if self.has_gaps:
            return {}
        size = self.shape[0] * self.row_bytes
        # On one rank FSDP2 hands over the first plane alone.
        return {p: out.view(-1)[:size] for p, out in zip(planes, outputs, strict=False)}

    def store(self, sent: Buffers, outputs: Sequence[torch.Tensor], weight: Buffers) -> None:
        """Copy the planes for which there is no view from what was gathered into ``weight``."""
        for i, (plane, own) in enumerate(sent.items()):
            if i < len(outputs) and not self.has_gaps:
                continue
            chunks = (outputs[i] if i < len(outputs) else own).view(self.world_size, -1)
            sizes = [self.code_bytes(rank) for rank in range(self.world_size)]
            places = weight[plane].view(-1).split(sizes)
            for place, codes, size in zip(places, chunks, sizes, strict=True):
                place.copy_(codes[:size])


class PaddedCodes(torch.Tensor):
    """Codes, or scales, that present themselves in the shape of the padded rows; flat they are
    bytes.
    """

    codes: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, codes: torch.Tensor, shape: Sequence[int]) -> PaddedCodes:
        padded = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=torch.uint8, device=codes.device
        )
        padded.codes = codes
        return padded

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert func is torch.ops.aten.view.default, func  # FSDP2 flattens it, and does nothing else
        return args[0].codes.view(-1)
