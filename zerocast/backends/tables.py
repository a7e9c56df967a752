"""The tables that compiled code is given: one row a weight, as laid out in
``cuda_src/include/zerocast/tables.h``.

Fields are int64, addresses included, in the order of the C structs. What a backend must check of a
tensor before it takes its address is said by the ``address`` that it passes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zerocast.errors import BackendError
from zerocast.formats import E2M1, E4M3, E5M2
from zerocast.layout import BlockGrid, ScaleLayout
from zerocast.ops import (
    CastShard,
    DequantizeTarget,
    Float8Law,
    Law,
    NVFP4Law,
    ScaleTarget,
    TransposeTarget,
)

Address = Callable[[torch.Tensor], int]
"""A tensor's address, or BackendError where the backend cannot take the tensor."""

# The numbers of the C side: FormatId and Nominal in tables.h.
FORMATS = {E2M1: 0, E4M3: 1, E5M2: 2}
NOMINALS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def law_fields(law: Law, backend: str) -> list[int]:
    """LawTable: format, power_2_scale, bits of amax_epsilon.

    Raises:
        BackendError: where compiled code has no such law; ``backend`` is named.
    """
    four_bits = law.fmt is E2M1 and law.scale_fmt is E4M3 if isinstance(law, NVFP4Law) else False
    eight_bits = law.fmt in (E4M3, E5M2) if isinstance(law, Float8Law) else False
    if not (four_bits or eight_bits):
        raise BackendError(
            f"the {backend} backend has no code for {law}; cast it under use_backend('reference')."
        )
    if isinstance(law, Float8Law):
        return [FORMATS[law.fmt], int(law.power_2_scale), float_bits(law.amax_epsilon)]
    return [FORMATS[law.fmt], 0, 0]


def grid_fields(grid: BlockGrid) -> list[int]:
    """Grid."""
    return [grid.rows, grid.cols, grid.block_h, grid.block_w]


def cast_row(shard: CastShard, grid: BlockGrid, master_slot: int, address: Address) -> list[int]:
    """CastShard, seen under ``grid``; ``master_slot`` is where the master's address will stand."""
    return [
        master_slot,
        shard.extent.start,
        shard.extent.end,
        *grid_fields(grid),
        NOMINALS[shard.round_to],
        address(shard.block_amax),
        address(shard.tensor_amax),
        address(shard.codes),
        shard.codes_start,
    ]


def scale_row(target: ScaleTarget, address: Address) -> list[int]:
    """ScaleTarget."""
    layout = target.layout
    return [
        *grid_fields(layout.grid),
        layout.row_repeat,
        layout.rows,
        layout.cols,
        *layout.shape,
        padding_bits(layout, target.scale_inv),
        address(target.block_amax),
        address(target.tensor_amax),
        address(target.scale_inv),
        0 if target.amax is None else address(target.amax),
    ]


def transpose_row(target: TransposeTarget, address: Address) -> list[int]:
    """TransposeTarget."""
    rowwise, columnwise = target.layout, target.columnwise_layout
    row = [
        FORMATS[target.fmt],
        rowwise.grid.rows,
        rowwise.grid.cols,
        address(target.codes),
        address(target.columnwise_codes),
    ]
    if target.columnwise_scale_inv is None:
        return row + [0] * 12
    return [
        *row,
        rowwise.grid.blocks_h,
        rowwise.grid.blocks_w,
        target.scale_inv.element_size(),
        rowwise.row_repeat,
        rowwise.shape[1],
        address(target.scale_inv),
        columnwise.row_repeat,
        columnwise.rows,
        *columnwise.shape,
        padding_bits(columnwise, target.columnwise_scale_inv),
        address(target.columnwise_scale_inv),
    ]


def dequantize_row(target: DequantizeTarget, grid: BlockGrid, address: Address) -> list[int]:
    """DequantizeTarget, seen under ``grid``."""
    return [
        *grid_fields(grid),
        target.layout.row_repeat,
        target.layout.shape[1],
        address(target.codes),
        address(target.scale_inv),
        0 if target.amax is None else address(target.amax),
        address(target.out),
    ]


def padding_bits(layout: ScaleLayout, plane: torch.Tensor) -> int:
    """The bit pattern of one padding entry of ``plane``: FP32, or a one-byte code."""
    return float_bits(layout.padding) if plane.dtype == torch.float32 else int(layout.padding)


def float_bits(value: float) -> int:
    """The bit pattern of ``value``, 0 or more, rounded to FP32."""
    if value < torch.finfo(torch.float32).tiny:
        # An integer multiple of the smallest subnormal, which this thread may be set to flush.
        return round(value * 2.0**149)
    return int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32))
