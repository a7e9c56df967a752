"""NVFP4: E2M1 codes, one E4M3 scale for each 16x16 block, one FP32 amax for the tensor.

Square blocks let one scale serve the weight and its transpose, so the columnwise copy is a
re-packing of the gathered rowwise one and never a second quantization. The law is
:class:`zerocast.ops.NVFP4Law`.

The random Hadamard transform of NVFP4 training belongs to activations and gradients, never to
weights; it has no switch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.errors import InputError
from zerocast.layout import BlockGrid, ScaleLayout
from zerocast.ops import NVFP4Law
from zerocast.recipes.recipe import BufferSpec, Recipe, require_elements

BLOCK = 16
"""Elements along both sides of a block."""

# The block-scaled GEMMs of cuBLAS read scales in tiles of 128 rows by 4 columns, so the stored
# planes are whole tiles.
TILE_ROWS, TILE_COLS = 128, 4


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4 weights in 16x16 blocks.

    The weight is a matrix [M, K] with K a multiple of 16; M is free. Stored are ``rowwise_data``
    uint8 [M, K / 2], ``rowwise_scale_inv`` (E4M3 codes) uint8 [M padded to 128, K / 16 padded to
    4], ``amax`` FP32 [1], and as derived copies ``columnwise_data`` [K, ceil(M / 2)] and
    ``columnwise_scale_inv`` [K padded to 128, ceil(M / 16) padded to 4]. Padding is 0.
    """

    @property
    def law(self) -> NVFP4Law:
        return NVFP4Law()

    def check_shape(self, shape: Sequence[int]) -> None:
        require_elements("NVFP4BlockScaling", shape, "shape [M, K]")
        if len(shape) != 2:
            raise InputError(
                f"NVFP4BlockScaling needs a 2-D weight [M, K], got shape {tuple(shape)}; reshape "
                "it to a matrix first."
            )
        if shape[1] % BLOCK:
            raise InputError(
                f"NVFP4BlockScaling needs K, the last dimension, to be a multiple of {BLOCK} (a "
                f"row is whole blocks and whole bytes), got K = {shape[1]} in shape "
                f"{tuple(shape)}; pad the weight or leave it in high precision."
            )

    def grid(self, shape: Sequence[int]) -> BlockGrid:
        return BlockGrid(*self._matrix(shape), BLOCK, BLOCK)

    def scale_layout(self, shape: Sequence[int]) -> ScaleLayout:
        return ScaleLayout(
            self.grid(shape), row_repeat=BLOCK, row_multiple=TILE_ROWS, col_multiple=TILE_COLS
        )

    def columnwise_scale_layout(self, shape: Sequence[int]) -> ScaleLayout:
        return ScaleLayout(
            self.grid(shape).transposed(),
            row_repeat=BLOCK,
            row_multiple=TILE_ROWS,
            col_multiple=TILE_COLS,
        )

    def buffers(self, shape: Sequence[int], *, columnwise: bool) -> dict[str, BufferSpec]:
        specs = self._code_buffers(shape, columnwise=columnwise)
        specs["rowwise_scale_inv"] = BufferSpec(self.scale_layout(shape).shape, torch.uint8)
        if columnwise:
            specs["columnwise_scale_inv"] = BufferSpec(
                self.columnwise_scale_layout(shape).shape, torch.uint8
            )
        specs["amax"] = BufferSpec((1,), torch.float32)
        return specs
