"""Plane: one set of codes of a tensor, with its source and the layout of its scales.

A tensor is seen as the matrix [M, K], M the product of its leading dimensions. Its *rowwise* plane
holds the codes of that matrix. The product with the transposed matrix reads the *columnwise* plane.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from zerocast.layout.block_grid import BlockGrid, ScaleLayout, round_up

FULL = 0
"""A block's height or width that is the matrix's own, whatever its shape."""

Block = tuple[int, int]
"""Height and width of the blocks that share a scale; :data:`FULL` for those of the matrix."""


class Source(Enum):
    """The sources of the codes of a plane."""

    MASTER = "cast from the master"
    TRANSPOSED_MASTER = "cast from the transposed tensor"
    ROWWISE = "transposed from the rowwise codes"
    SHARED = "the rowwise codes, under separate scales"


@dataclass(frozen=True, slots=True)
class Plane:
    """One set of codes of a tensor.

    Attributes:
        name: which one it is.
        source: where its codes come from.
        block: the height and width of its blocks, over the matrix of :attr:`grid`.
        scales: the layout of its scales.
    """

    name: Literal["rowwise", "columnwise"]
    source: Source
    block: Block
    scales: ScaleLayout

    @property
    def grid(self) -> BlockGrid:
        """The blocks: over [K, M] where the plane is transposed, else over [M, K]."""
        return self.scales.grid

    @property
    def codes_name(self) -> str:
        """The name of the buffer of codes."""
        return f"{self.name}_data"

    @property
    def scales_name(self) -> str:
        """The name of the buffer of scales."""
        return f"{self.name}_scale_inv"

    @property
    def is_transposed(self) -> bool:
        """Whether its codes are stored as [K, M]."""
        return self.source in (Source.TRANSPOSED_MASTER, Source.ROWWISE)

    @property
    def is_cast(self) -> bool:
        """Whether its codes are cast, so that its blocks have amaxes."""
        return self.source in (Source.MASTER, Source.TRANSPOSED_MASTER)

    @property
    def is_gathered(self) -> bool:
        """Whether every rank casts its shard of the codes, and an all-gather moves them."""
        return self.source is Source.MASTER

    @property
    def is_derived(self) -> bool:
        """Whether post-all-gather processing makes its codes."""
        return self.source is Source.ROWWISE

    @property
    def stores_codes(self) -> bool:
        """Whether it has a buffer of codes."""
        return self.source is not Source.SHARED

    @property
    def stores_scales(self) -> bool:
        """Whether it has a buffer of scales: one scale of the whole tensor serves both planes."""
        return not (self.is_derived and self.block == (FULL, FULL))

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of its buffers."""
        stored = (self.codes_name, self.stores_codes), (self.scales_name, self.stores_scales)
        return tuple(name for name, is_stored in stored if is_stored)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the buffer of scales: a vector where each block is a whole row, a whole
        column or the whole matrix.
        """
        return (self.grid.num_blocks,) if FULL in self.block else self.scales.shape

    def spans(self, dim: int) -> bool:
        """Say whether a block spans all of the tensor's rows (``dim`` 0) or columns (1)."""
        return self.block[self.grid_dim(dim)] == FULL

    def in_whole_bytes(self, bits: int) -> Plane:
        """Return this plane with rows of whole bytes: an odd number of 4-bit codes is padded by
        one. Scales are stored as before.
        """
        grid = replace(self.grid, cols=round_up(self.grid.cols, 8 // bits))
        return replace(self, scales=replace(self.scales, grid=grid))

    def grid_dim(self, dim: int) -> int:
        """Return the dimension of :attr:`grid` that has the tensor's rows (``dim`` 0) or columns
        (1).
        """
        return 1 - dim if self.is_transposed else dim


def grid_of(rows: int, cols: int, block: Block) -> BlockGrid:
    """Return the blocks of a matrix [rows, cols]."""
    return BlockGrid(rows, cols, block[0] or rows, block[1] or cols)


ONE_BLOCK = Plane("rowwise", Source.MASTER, (FULL, FULL), ScaleLayout(BlockGrid(1, 1, 1, 1)))
"""The plane of a tensor under one scale, where only the scale is computed: it depends on the amax
and on no shape."""
