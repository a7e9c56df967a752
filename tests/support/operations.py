"""Operands made by hand; and all five operations of a backend on one of them: what it writes, to be
compared byte for byte.
"""

from dataclasses import dataclass
from typing import Any

import torch

from zerocast.formats import byte_span, packed_columns
from zerocast.layout import BlockGrid, Extent, Plane, ScaleLayout, Source
from zerocast.numerics import (
    Backend,
    Float8Numerics,
    Masters,
    Numerics,
    NVFP4Numerics,
    PlaneBuffers,
    TensorOperand,
)


def plane(
    scales: ScaleLayout | BlockGrid,
    block_amax: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    source: Source = Source.MASTER,
) -> PlaneBuffers:
    """A plane under these blocks, or scales, and its buffers."""
    layout = ScaleLayout(scales) if isinstance(scales, BlockGrid) else scales
    block = layout.grid.block_h, layout.grid.block_w
    name = "rowwise" if source is Source.MASTER else "columnwise"
    return PlaneBuffers(Plane(name, source, block, layout), block_amax, codes, scale_inv)


def operand(
    scales: ScaleLayout | BlockGrid,
    block_amax: torch.Tensor | None = None,
    tensor_amax: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    *,
    second: PlaneBuffers | None = None,
    **others: Any,
) -> TensorOperand:
    """A tensor with this rowwise plane, and where it has one a second."""
    planes = (plane(scales, block_amax, codes, scale_inv), *([second] if second else []))
    return TensorOperand(planes, tensor_amax=tensor_amax, **others)


@dataclass(frozen=True)
class Case:
    """One weight under one numerics, and the part of it that one rank owns."""

    numerics: Numerics
    grid: BlockGrid
    extent: Extent
    round_to: torch.dtype = torch.float32
    own_codes: bool = False  # the shard's codes lie in a buffer of their own

    @property
    def scale_layout(self) -> ScaleLayout:
        """NVFP4's for its numerics, else one FP32 scale a block, columns padded to 4 with 1.0."""
        return self._layout(self.grid)

    @property
    def columnwise_scale_layout(self) -> ScaleLayout:
        """The same over the transposed grid."""
        return self._layout(self.grid.transposed())

    def _layout(self, grid: BlockGrid) -> ScaleLayout:
        if isinstance(self.numerics, NVFP4Numerics):
            return ScaleLayout(grid, row_repeat=grid.block_h, row_multiple=128, col_multiple=4)
        return ScaleLayout(grid, col_multiple=4, padding=1.0)

    def operand(self, codes: torch.Tensor, scale_inv: torch.Tensor | None = None,
                **others: Any) -> TensorOperand:  # fmt: skip
        """With amaxes of zero."""
        amax = torch.zeros(self.grid.amax_slots, dtype=torch.int32)
        start = self.extent.start
        codes_start = start - start % (8 // self.numerics.fmt.bits) if self.own_codes else 0
        return operand(self.scale_layout, amax[: self.grid.num_blocks], amax[-1:], codes, scale_inv,
                       extent=self.extent, round_to=self.round_to, codes_start=codes_start,
                       **others)  # fmt: skip

    def codes(self) -> torch.Tensor:
        """What the codes hold before the cast: bytes that differ from their neighbours."""
        if self.own_codes:
            first, last = byte_span(self.numerics.fmt, self.extent.start, self.extent.end)
        else:
            first, last = byte_span(self.numerics.fmt, 0, self.grid.numel)
        return (torch.arange(last - first) * 37 % 251).to(torch.uint8)


def run_operations(backend: Backend, case: Case, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cast ``master`` [case.extent.size] FP32; what each operation wrote, by name.

    A whole matrix of codes, rows of whole bytes, is also transposed and dequantized, whatever the
    codes outside the shard are.
    """
    numerics, grid, masters = case.numerics, case.grid, Masters(1)
    masters.bind([master])
    codes, columnwise = case.codes(), case.columnwise_scale_layout
    scale_inv = torch.empty(case.scale_layout.shape, dtype=numerics.scale_dtype)
    amax = torch.empty(1) if isinstance(numerics, NVFP4Numerics) else None
    copied = torch.empty(grid.cols, packed_columns(numerics.fmt, grid.rows), dtype=torch.uint8)
    copied_scales = torch.empty(columnwise.shape, dtype=numerics.scale_dtype)
    values = torch.empty(grid.rows, grid.cols)
    second = plane(columnwise, None, copied, copied_scales, Source.ROWWISE)
    made = case.operand(codes, scale_inv, second=second, amax=amax, values=values)
    backend.partial_amax([made], masters)()
    backend.compute_scale(numerics, [made])()
    backend.partial_cast(numerics, [made], masters)()
    written = {
        "block_amax": made.planes[0].block_amax,
        "tensor_amax": made.tensor_amax,
        "scale_inv": scale_inv,
        "codes": codes,
    }
    if amax is not None:
        written["amax"] = amax
    if not case.own_codes and packed_columns(numerics.fmt, grid.cols) * grid.rows == len(codes):
        backend.transpose(numerics, [made])()
        backend.dequantize(numerics, [made])()
        written |= {
            "columnwise_codes": copied,
            "columnwise_scale_inv": copied_scales,
            "values": values,
        }
    return written


def per_tensor(
    numerics: Float8Numerics, rows: int, cols: int, extent: Extent | None = None
) -> Case:
    """FP8 under one scale a tensor; the whole of it where no extent is given."""
    extent = Extent(0, rows * cols) if extent is None else extent
    return Case(numerics, BlockGrid(rows, cols, rows, cols), extent)


def nvfp4(rows: int, cols: int, extent: Extent | None = None) -> Case:
    """NVFP4 in 16x16 blocks; the whole of it where no extent is given."""
    extent = Extent(0, rows * cols) if extent is None else extent
    return Case(NVFP4Numerics(), BlockGrid(rows, cols, 16, 16), extent)
