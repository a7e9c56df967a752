"""Cuts the weights of a launch into tiles, and says which parts of them a launch visits."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from zerocast.backends.cuda import tiling
from zerocast.backends.cuda.tiling import Cut
from zerocast.errors import BackendError
from zerocast.layout import BlockGrid, Extent, ScaleLayout, ceil_div
from zerocast.numerics import (
    Float8Numerics,
    MXNumerics,
    Numerics,
    NVFP4Numerics,
    Operands,
    PlaneBuffers,
    TensorOperand,
)

ONE_READ: dict[type[Numerics], int] = {MXNumerics: 32, Float8Numerics: 128}
"""The columns of the blocks that one pass measures and casts."""

TILE, ROW_BLOCK_TILE = "Tile", "Tile32x256"
"""The shapes of tiles that kernels are compiled for: structs of ``tiles.h``."""


WeightCuts = tuple[Cut, ...]
"""All cuts of one weight."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The distinct cuts of the weights of a launch, and for each weight their index.

    So thousands of equal weights are few objects.
    """

    distinct: tuple[WeightCuts, ...]
    of_weights: array[int]

    @classmethod
    def of(cls, weights: Iterable[WeightCuts]) -> Cuts:
        """Collect the cuts of each weight."""
        places: dict[WeightCuts, int] = {}
        of_weights = array("q", (places.setdefault(cuts, len(places)) for cuts in weights))
        return cls(tuple(places), of_weights)

    def tiles(self) -> torch.Tensor:
        """Return the tiles of all weights, of each in the order of its cuts; int64 [tiles, 4].

        The cuts of one launch are made by one function, all at once.
        """
        made = [(place, *cut) for place, cuts in enumerate(self.distinct) for cut in cuts]
        if not made:
            return torch.empty(0, 4, dtype=torch.int64, device="cpu")
        places, functions, *arguments = zip(*made, strict=True)
        (function,) = set(functions)
        tiles: torch.Tensor = function(places, *arguments)
        if len(self.distinct) == len(self.of_weights):
            return tiles
        # So far the tiles have the index of the distinct cuts in place of the weight's number.
        counts = torch.bincount(tiles[:, 0] & 0xFFFFFFFF, minlength=len(self.distinct))
        index = torch.frombuffer(self.of_weights, dtype=torch.int64)
        weight, within = tiling.numbered(counts[index])
        tiles = tiles[(counts.cumsum(0) - counts)[index[weight]] + within]
        tiles[:, 0] += weight - index[weight]
        return tiles


def reads_once(numerics: Numerics, grids: Sequence[BlockGrid]) -> bool:
    """Say whether partial_amax_cast.cu takes planes in these blocks, or a kernel that chooses
    scales casts them.
    """
    (first, *others), side = grids, ONE_READ.get(type(numerics))
    if isinstance(numerics, NVFP4Numerics):
        return numerics.four_over_six is not None and not numerics.stochastic_rounding
    if first.block_w != side or first.block_h not in (1, side) or first.cols >= tiling.MAX_COLS:
        return False
    seconds = [(grid.block_h, grid.block_w) for grid in others]
    return not others or (first.block_h == 1 and side == 32 and seconds == [(32, 1)])


def by_blocks(
    operands: Operands,
) -> dict[tuple[int, int], list[TensorOperand]]:
    """Return those with rows of whole blocks, by the height and width of a block."""
    found: dict[tuple[int, int], list[TensorOperand]] = {}
    for operand in operands:
        if operand.whole:
            blocks = operand.grid.block_h, operand.grid.block_w
            found.setdefault(blocks, []).append(operand)
    return found


def patch_template(blocks: tuple[int, int]) -> tuple[tuple[str, str], int]:
    """Return the template's arguments of partial_amax_cast.cu for blocks of this height and width,
    beside the numerics; and the threads of a block.
    """
    height, side = blocks
    template = str(side), "true" if height == side else "false"
    return template, 512 if blocks == (128, 128) else 128


def tiled(
    planes: Sequence[tuple[BlockGrid, BlockGrid | None, Sequence[Extent]]],
) -> tuple[str, list[BlockGrid], list[WeightCuts]]:
    """Return the shape of tiles, a struct of tiles.h, the grids as tiles see them, and the cuts.

    One launch has one shape of tiles, so that the number of launches does not depend on the
    weights.

    Args:
        planes: for each weight its grid, its second one, and the elements that are visited. Weights
            that are equal in all three are given only once.
    """
    for grid, _, _ in planes:
        if grid.num_blocks > 1 and grid.cols >= tiling.MAX_COLS:
            raise BackendError(
                f"the cuda backend takes rows of fewer than {tiling.MAX_COLS} elements in blocks, "
                f"got {grid}; cast this weight under use_backend('reference')."
            )
    others = [(g, second) for g, second, _ in planes if not tiling.has_row_blocks(g, second)]
    alone = all(second is None for _, second, _ in planes)
    if others and not alone:
        grid, second = others[0]
        raise BackendError(
            "the cuda backend casts two planes if one has blocks of one column, the other of one "
            "row, 16, 32, 64, 128, a multiple of 256 or all columns wide, got "
            f"{grid} and {second}; cast this weight under use_backend('reference')."
        )
    cuts: list[WeightCuts] = []
    if others or (alone and all(grid.num_blocks == 1 for grid, _, _ in planes)):
        grids = [tiling.tiled_grid(grid) for grid, _, _ in planes]
        for grid, (_, _, extents) in zip(grids, planes, strict=True):
            cuts.append(tuple((tiling.shard_tiles, grid, extent) for extent in extents))
        return TILE, grids, cuts
    for grid, second, extents in planes:
        block_h = grid.rows if second is None else second.block_h
        cuts.append(tuple((tiling.row_block_tiles, grid, block_h, each) for each in extents))
    return ROW_BLOCK_TILE, [grid for grid, _, _ in planes], cuts


def all_of(shard: TensorOperand) -> tuple[Extent, ...]:
    """Return the elements of a shard."""
    return (shard.extent,)


def not_whole(shard: TensorOperand) -> tuple[Extent, ...]:
    """Return the elements of a shard that one pass does not measure and cast: those before and
    after.
    """
    extent, whole = shard.extent, shard.whole
    if not whole:
        return (extent,)
    return Extent(extent.start, whole.start), Extent(whole.end, extent.end)


def second_grid(shard: TensorOperand) -> BlockGrid | None:
    """Return the blocks of a second plane that is cast."""
    planes = shard.cast_planes
    return planes[1].plane.grid if len(planes) > 1 else None


def scale_cuts(planes: Sequence[PlaneBuffers]) -> WeightCuts:
    """Say how the stored planes of a weight are cut."""
    return tuple(scale_cut(i, each.plane.scales) for i, each in enumerate(planes))


def scale_cut(plane: int, layout: ScaleLayout) -> Cut:
    """Say how a stored plane is cut: by the stored rows of a block."""
    down, right = layout.row_repeat, layout.col_repeat
    repeat, beside = (right, down) if layout.transposed else (down, right)
    assert beside == 1 or beside % 4 == 0, "a thread takes four stored columns of one block"
    rows, cols = layout.shape
    tile = tiling.scale_tile(cols, repeat)
    return tiling.plane_tiles, plane, (ceil_div(rows, repeat), cols), tile
