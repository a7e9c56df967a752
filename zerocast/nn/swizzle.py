"""The 128x4 layout in which block-scaled GEMMs read scales, and the way back.

cuBLAS reads the scales of MXFP8 and NVFP4 operands in tiles of 128 rows by 4 columns. The tiles lie
one after the other as their plane reads, row of tiles by row of tiles; inside a tile of 512 bytes
the scale of row ``r`` and column ``c`` stands at::

    (r % 32) * 16 + (r // 32) * 4 + c

so 32 rows of 16 bytes, each of 4 groups of 4 scales (torch calls it ``SWIZZLE_32_4_4``). Stored
planes are compact, row by row, because they are also what checkpoints, transposes and decoding
read; a GEMM's copy of them is a 16th or a 32nd of the codes it multiplies.

Source: NVIDIA's cuBLAS documentation, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

import torch

from zerocast.arguments import check_shape, check_tensor
from zerocast.errors import InputError

TILE_ROWS, TILE_COLS = 128, 4

_GROUPS, _GROUP_ROWS = 4, 32
"""A tile's 128 rows are 4 groups of 32; rows of one number in their group stand side by side."""


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """A compact plane of scales in the order that a block-scaled GEMM reads.

    Args:
        scales: [R, C], whole tiles: R a multiple of 128, C of 4; any dtype and strides.

    Returns:
        [R * C], contiguous, of the same dtype.

    Raises:
        InputError: where the plane is not made of whole tiles.
    """
    rows, cols = _tiles(check_tensor("scales", scales).shape)
    tiles = scales.view(rows, _GROUPS, _GROUP_ROWS, cols, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The compact plane that :func:`swizzle` was given.

    Args:
        scales: [R * C], contiguous.
        shape: (R, C): R a multiple of 128, C of 4.

    Returns:
        [R, C], contiguous.

    Raises:
        InputError: where ``shape`` is not made of whole tiles, or holds another number of scales.
    """
    check_tensor("scales", scales)
    rows, cols = _tiles(check_shape("shape", shape))
    if scales.numel() != shape[0] * shape[1]:
        raise InputError(
            f"unswizzle into {tuple(shape)} needs {shape[0] * shape[1]} scales, got "
            f"{scales.numel()}; give the shape of the plane that was swizzled."
        )
    tiles = scales.reshape(rows, cols, _GROUP_ROWS, _GROUPS, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(shape)


def _tiles(shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """How many tiles a plane is high and wide."""
    if len(shape) != 2 or shape[0] % TILE_ROWS or shape[1] % TILE_COLS:
        raise InputError(
            f"the 128x4 layout holds planes of whole tiles, [a multiple of {TILE_ROWS}, a multiple "
            f"of {TILE_COLS}], got shape {tuple(shape)}; pad the plane with zeros."
        )
    return shape[0] // TILE_ROWS, shape[1] // TILE_COLS
