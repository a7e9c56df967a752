"""Chooses by 4-over-6 which of two scales each block takes, also where ranks share the block.

The errors of a block are summed in one fixed order, rows inside the block first, so that every rank
gets the same sum; see :class:`zerocast.numerics.FourOverSixErrors` for what is exchanged.
"""

from __future__ import annotations

import torch

from zerocast.arguments import present
from zerocast.backends.reference.arithmetic import divide
from zerocast.backends.reference.elements import amax_of, indices, rounded
from zerocast.backends.reference.planes import by_elements
from zerocast.backends.reference.scales import nvfp4_scales
from zerocast.layout import BlockGrid, round_up
from zerocast.numerics import Masters, NVFP4Numerics, TensorOperand, decode, encode


def write_own_part(numerics: NVFP4Numerics, shard: TensorOperand, masters: Masters) -> None:
    """Write the choices of the blocks that this rank owns alone; of the others its row errors, and
    its elements of the rows that are cut.
    """
    grid, candidates = shard.grid, present(shard.candidates)
    index = indices(shard)
    x = torch.zeros(grid.numel, dtype=torch.float32, device=index.device)
    x[index] = rounded(shard, masters)
    owned = torch.zeros_like(x)
    owned[index] = 1.0
    errors = _row_errors(numerics, shard, x)
    # [blocks_h, block_h, blocks_w], of each row of a block: how many of its elements this rank
    # owns, and how many there are.
    own = _in_blocks(grid, owned).sum(dim=-1)
    whole = own == _in_blocks(grid, torch.ones_like(owned)).sum(dim=-1)

    cut = candidates.cut.tolist()
    choices = _choose(errors)
    for i in range(grid.blocks_h):
        if i in cut:
            mine = whole[i] & (own[i] > 0)
            candidates.row_errors[cut.index(i)][mine] = errors[i][mine]
        elif own[i].any():
            candidates.choices[_row_of_blocks(shard, i)] = choices[i]
    for s, start in enumerate(candidates.segments.tolist()):
        width = _segment_width(grid, start)
        mine = owned[start : start + width] > 0
        candidates.elements[s, :width][mine] = x[start : start + width][mine]


def choose_in_cut_rows(numerics: NVFP4Numerics, operand: TensorOperand) -> None:
    """Choose for all blocks in cut rows of blocks, from what was exchanged."""
    grid, candidates = operand.grid, present(operand.candidates)
    cut = candidates.cut.tolist()
    x = torch.zeros(grid.numel, dtype=torch.float32, device=amax_of(operand).device)
    for s, start in enumerate(candidates.segments.tolist()):
        width = _segment_width(grid, start)
        x[start : start + width] = candidates.elements[s, :width]
    errors = _row_errors(numerics, operand, x)
    for start in candidates.segments.tolist():
        row, j = start // grid.cols, start % grid.cols // grid.block_w
        i, r = row // grid.block_h, row % grid.block_h
        candidates.row_errors[cut.index(i), r, j] = errors[i, r, j]
    for p, i in enumerate(cut):
        candidates.choices[_row_of_blocks(operand, i)] = _choose(candidates.row_errors[p : p + 1])[
            0
        ]


def _row_of_blocks(operand: TensorOperand, row: int) -> slice:
    """Return the slice of the choices of a row of blocks."""
    start = row * operand.grid.blocks_w - present(operand.candidates).first_block
    return slice(start, start + operand.grid.blocks_w)


def _segment_width(grid: BlockGrid, start: int) -> int:
    """Return the number of elements in the block's row that starts at the flat index ``start``."""
    return min(grid.block_w, grid.cols - start % grid.cols)


def _row_errors(numerics: NVFP4Numerics, operand: TensorOperand, x: torch.Tensor) -> torch.Tensor:
    """[numel] rounded elements -> [blocks_h, block_h, blocks_w, 2]: of each row of each block the
    summed errors under map4 and under map6; 0 for rows that the matrix does not have.
    """
    grid, block_amax = operand.grid, present(operand.planes[0].block_amax)
    tensor = amax_of(operand).view(torch.float32)
    block = torch.zeros(grid.num_blocks, dtype=torch.float32, device=block_amax.device)
    kept = slice(operand.planes[0].first_block, operand.planes[0].first_block + len(block_amax))
    block[kept] = block_amax.view(torch.float32)
    x = x.view(grid.rows, grid.cols)
    both = []
    for choice in (1, 0):
        choices = torch.full_like(block, choice)
        stored, multiplier = (
            by_elements(scale.view(grid.blocks_h, grid.blocks_w), grid)
            for scale in nvfp4_scales(numerics, block, tensor, choices)
        )
        code_value = decode(encode(x * multiplier, numerics.fmt), numerics.fmt)
        scaled = code_value * decode(stored, numerics.scale_fmt) * tensor
        error = (divide(scaled, numerics.fmt.max * numerics.scale_max) - x).abs()
        if numerics.four_over_six == "mse":
            error = error * error
        by_block = _in_blocks(grid, error)
        total = by_block[..., 0]
        for j in range(1, grid.block_w):
            total = total + by_block[..., j]
        both.append(total)
    return torch.stack(both, dim=-1)


def _in_blocks(grid: BlockGrid, x: torch.Tensor) -> torch.Tensor:
    """[rows, cols], or flat -> [blocks_h, block_h, blocks_w, block_w], 0 where the matrix ends."""
    height, width = grid.blocks_h * grid.block_h, grid.blocks_w * grid.block_w
    padded = x.new_zeros(height, width)
    padded[: grid.rows, : grid.cols] = x.view(grid.rows, grid.cols)
    return padded.view(grid.blocks_h, grid.block_h, grid.blocks_w, grid.block_w)


def _choose(row_errors: torch.Tensor) -> torch.Tensor:
    """[n, block_h, blocks_w, 2] -> uint8 [n, blocks_w]: 1 where the sum of map4 is smaller."""
    n, height, width, _ = row_errors.shape
    sums = row_errors.new_zeros(n, round_up(height, 16), width, 2)
    sums[:, :height] = row_errors
    for half in (8, 4, 2, 1):
        sums = sums[:, :half] + sums[:, half : 2 * half]
    return (sums[:, 0, :, 0] < sums[:, 0, :, 1]).to(torch.uint8)
