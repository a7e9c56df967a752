"""Stores scales in their layout, and reads them for the blocks and elements that they belong to."""

from __future__ import annotations

import torch

from zerocast.layout import BlockGrid, ScaleLayout


def write_plane(stored: torch.Tensor, layout: ScaleLayout, plane: torch.Tensor) -> None:
    """Scales by block, in any shape -> the whole of ``plane``: repeats, order and padding as
    ``layout`` says.
    """
    by_block = stored.reshape(layout.grid.blocks_h, layout.grid.blocks_w)
    entries = by_block.repeat_interleave(layout.row_repeat, dim=0)[: layout.rows]
    entries = entries.repeat_interleave(layout.col_repeat, dim=1)[:, : layout.cols]
    if layout.transposed:
        entries = entries.t()
    padded = torch.full(layout.shape, layout.padding, dtype=plane.dtype, device=plane.device)
    padded[: entries.shape[0], : entries.shape[1]] = entries
    plane.copy_(padded.view_as(plane))


def read_plane(plane: torch.Tensor, layout: ScaleLayout) -> torch.Tensor:
    """Return a stored plane -> [blocks_h, blocks_w]: the scale of every block."""
    entries = plane.view(layout.shape)
    if layout.transposed:
        entries = entries.t()
    return entries[: layout.rows : layout.row_repeat, : layout.cols : layout.col_repeat]


def by_elements(by_block: torch.Tensor, grid: BlockGrid) -> torch.Tensor:
    """[blocks_h, blocks_w] -> [rows, cols]: for each element the scale of its block."""
    by_row = by_block.repeat_interleave(grid.block_h, dim=0)[: grid.rows]
    return by_row.repeat_interleave(grid.block_w, dim=1)[:, : grid.cols]
