"""All five operations of a backend on one shard: what it writes, to be compared byte for byte."""

from dataclasses import dataclass

import torch

from zerocast.formats import byte_span, packed_columns
from zerocast.layout import BlockGrid, Extent, ScaleLayout
from zerocast.ops import (
    Backend,
    CastShard,
    DequantizeTarget,
    Float8Law,
    Law,
    Masters,
    NVFP4Law,
    ScaleTarget,
    TransposeTarget,
)


@dataclass(frozen=True)
class Case:
    """One weight under one law, and the part of it that one rank owns."""

    law: Law
    grid: BlockGrid
    extent: Extent
    round_to: torch.dtype = torch.float32
    own_codes: bool = False  # the shard's codes lie in a buffer of their own

    @property
    def scale_layout(self) -> ScaleLayout:
        """NVFP4's for its law, else one FP32 scale a block, columns padded to 4 with 1.0."""
        return self._layout(self.grid)

    @property
    def columnwise_scale_layout(self) -> ScaleLayout:
        """The same over the transposed grid."""
        return self._layout(self.grid.transposed())

    def _layout(self, grid: BlockGrid) -> ScaleLayout:
        if isinstance(self.law, NVFP4Law):
            return ScaleLayout(grid, row_repeat=grid.block_h, row_multiple=128, col_multiple=4)
        return ScaleLayout(grid, col_multiple=4, padding=1.0)

    def shard(self, codes: torch.Tensor) -> CastShard:
        """The operand, with amaxes of zero."""
        amax = torch.zeros(self.grid.amax_slots, dtype=torch.int32)
        start = self.extent.start
        codes_start = start - start % (8 // self.law.fmt.bits) if self.own_codes else 0
        return CastShard(0, self.extent, self.grid, self.round_to, amax[: self.grid.num_blocks],
                         amax[-1:], codes, codes_start)  # fmt: skip

    def codes(self) -> torch.Tensor:
        """What the codes hold before the cast: bytes that differ from their neighbours."""
        if self.own_codes:
            first, last = byte_span(self.law.fmt, self.extent.start, self.extent.end)
        else:
            first, last = byte_span(self.law.fmt, 0, self.grid.numel)
        return (torch.arange(last - first) * 37 % 251).to(torch.uint8)


def run_operations(backend: Backend, case: Case, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cast ``master`` [case.extent.size] FP32; what each operation wrote, by name.

    A whole matrix of codes, rows of whole bytes, is also transposed and dequantized, whatever the
    codes outside the shard are.
    """
    law, layout = case.law, case.scale_layout
    shard, masters = case.shard(case.codes()), Masters(1)
    masters.bind([master])
    backend.partial_amax([shard], masters)()
    scale_inv = torch.empty(layout.shape, dtype=law.scale_dtype)
    amax = torch.empty(1) if isinstance(law, NVFP4Law) else None
    target = ScaleTarget(layout, shard.block_amax, shard.tensor_amax, scale_inv, amax)
    backend.compute_scale(law, [target])()
    backend.partial_cast(law, [shard], masters)()
    written = {
        "block_amax": shard.block_amax,
        "tensor_amax": shard.tensor_amax,
        "scale_inv": scale_inv,
        "codes": shard.codes,
    }
    if amax is not None:
        written["amax"] = amax
    row_bytes = packed_columns(law.fmt, case.grid.cols)
    if not case.own_codes and row_bytes * case.grid.rows == len(shard.codes):
        codes = shard.codes.view(case.grid.rows, row_bytes)
        written |= _read_back(backend, case, codes, scale_inv, amax)
    return written


def _read_back(
    backend: Backend,
    case: Case,
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    amax: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    law, grid, columnwise = case.law, case.grid, case.columnwise_scale_layout
    columnwise_codes = torch.empty(grid.cols, packed_columns(law.fmt, grid.rows), dtype=torch.uint8)
    columnwise_scale_inv = torch.empty(columnwise.shape, dtype=law.scale_dtype)
    values = torch.empty(grid.rows, grid.cols)
    backend.transpose([
        TransposeTarget(law.fmt, case.scale_layout, codes, scale_inv, columnwise,
                        columnwise_codes, columnwise_scale_inv)
    ])()  # fmt: skip
    backend.dequantize(law, [DequantizeTarget(case.scale_layout, codes, scale_inv, amax, values)])()
    return {
        "columnwise_codes": columnwise_codes,
        "columnwise_scale_inv": columnwise_scale_inv,
        "values": values,
    }


def per_tensor(law: Float8Law, rows: int, cols: int, extent: Extent | None = None) -> Case:
    """FP8 under one scale a tensor; the whole of it where no extent is given."""
    extent = Extent(0, rows * cols) if extent is None else extent
    return Case(law, BlockGrid(rows, cols, rows, cols), extent)


def nvfp4(rows: int, cols: int, extent: Extent | None = None) -> Case:
    """NVFP4 in 16x16 blocks; the whole of it where no extent is given."""
    extent = Extent(0, rows * cols) if extent is None else extent
    return Case(NVFP4Law(), BlockGrid(rows, cols, 16, 16), extent)
