"""The tables that are passed to compiled code: one row a weight, as laid out in
``cuda_src/arithmetic/tables.h``.

Fields are int64, addresses included, in the order of the C structs. Each backend passes a function
``address``, which checks a tensor and returns its address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache

import torch

from zerocast.errors import BackendError
from zerocast.layout import BlockGrid, ScaleLayout
from zerocast.numerics import (
    E2M1,
    E4M3,
    E5M2,
    NOMINALS,
    AdamWNumbers,
    AdamWUpdate,
    CodeCopy,
    Comparison,
    DigestedBytes,
    Float8DelayedNumerics,
    Float8Numerics,
    FourOverSixErrors,
    MXNumerics,
    Numerics,
    NVFP4Numerics,
    PlaneBuffers,
    TensorOperand,
)

Address = Callable[[torch.Tensor | None], int]
"""A tensor's address, 0 where there is none, or BackendError where the backend cannot take it."""

# The numbers of the C side: FormatId, NumericsKind, ErrorKind, ScaleFormula and
# ScaleRounding in tables.h.
FORMATS = {E2M1: 0, E4M3: 1, E5M2: 2}
NUMERICS: dict[type[Numerics], int] = {
    Float8Numerics: 0,
    Float8DelayedNumerics: 1,
    MXNumerics: 2,
    NVFP4Numerics: 3,
}
ERRORS = {None: 0, "mae": 1, "mse": 2}
SCALE_FORMULAS = {"reciprocal": 0, "quotient": 1, "inverse first": 2}
SCALE_ROUNDINGS = {"up": 0, "floor": 1, "even": 2}


def numerics_fields(numerics: Numerics, backend: str) -> list[int]:
    """Return the fields of NumericsTable.

    Raises:
        BackendError: where compiled code has no such numerics; ``backend`` is named.
    """
    if not _is_known(numerics):
        raise BackendError(
            f"the {backend} backend does not support {numerics}; cast it under "
            "use_backend('reference')."
        )
    float8, delayed, mx, nvfp4 = [0] * 3, [0] * 2, [0], [0] * 5
    if isinstance(numerics, Float8Numerics):
        formula = SCALE_FORMULAS[numerics.formula]
        float8 = [int(numerics.power_2_scale), float_bits(numerics.amax_epsilon), formula]
    elif isinstance(numerics, Float8DelayedNumerics):
        scaled_max = math.ldexp(numerics.fmt.max, -numerics.margin)
        delayed = [float_bits(scaled_max), int(numerics.amax_compute_algo == "most_recent")]
    elif isinstance(numerics, MXNumerics):
        mx = [SCALE_ROUNDINGS[numerics.scale_rounding]]
    elif isinstance(numerics, NVFP4Numerics):
        seed = numerics.seed % 2**64
        nvfp4 = [
            numerics.scale_max,
            ERRORS[numerics.four_over_six],
            int(numerics.stochastic_rounding),
            seed - 2**64 if seed >= 2**63 else seed,
            float_bits(numerics.one_level_amax) if numerics.one_level else 0,
        ]
    return [NUMERICS[type(numerics)], FORMATS[numerics.fmt], *float8, *delayed, *mx, *nvfp4]


def numerics_class(numerics: Numerics) -> str:
    """Return the class of ``scaling.h`` that computes these numerics."""
    if isinstance(numerics, NVFP4Numerics):
        return "NVFP4Numerics" if numerics.four_over_six is None else "FourOverSixNumerics"
    name = type(numerics).__name__.replace("Float8Delayed", "Delayed")
    return f"{name}<{numerics.fmt.name.upper()}>"


def _is_known(numerics: Numerics) -> bool:
    if isinstance(numerics, NVFP4Numerics):
        return numerics.fmt is E2M1 and numerics.scale_fmt is E4M3
    if numerics.fmt is E2M1:
        return isinstance(numerics, MXNumerics)
    return type(numerics) in NUMERICS and numerics.fmt in (E4M3, E5M2)


def grid_fields(grid: BlockGrid) -> list[int]:
    """Return the fields of Grid."""
    return [grid.rows, grid.cols, grid.block_h, grid.block_w]


def cast_row(
    shard: TensorOperand,
    grid: BlockGrid,
    master: int,
    address: Address,
    list_address: Callable[[torch.Tensor], int],
) -> list[int]:
    """Return the fields of CastShard, seen under ``grid``. ``master`` is the address of its Master,
    and ``list_address`` returns the address of a list of integers, given on the CPU, that compiled
    code can read.
    """
    first, *second = shard.cast_planes
    return [
        master,
        shard.extent.start,
        shard.extent.end,
        shard.whole.start,
        shard.whole.end,
        NOMINALS[shard.round_to],
        shard.codes_start,
        address(shard.tensor_amax),
        *code_fields(first, grid, address),
        *(code_fields(second[0], second[0].plane.grid, address) if second else [0] * 6),
        *delayed_fields(shard, address),
        *candidate_fields(shard.candidates, address, list_address),
        *draw_fields(shard, address),
    ]


def adamw_row(update: AdamWUpdate | None, address: Address) -> list[int]:
    """Return the fields of AdamWUpdate; zeros for none."""
    if update is None:
        return [0] * 15
    return [
        address(update.master),
        address(update.gradient),
        address(update.exp_avg),
        address(update.exp_avg_sq),
        address(update.max_exp_avg_sq),
        update.master.numel(),
        *adamw_numbers(update.numbers),
    ]


@lru_cache(maxsize=64)  # weights share them
def adamw_numbers(numbers: AdamWNumbers) -> tuple[int, ...]:
    """Return the numbers of AdamWUpdate: FP32 bit patterns, except ``from_gradient``."""
    values = (getattr(numbers, each.name) for each in fields(numbers))
    return tuple(each if isinstance(each, bool) else float_bits(each) for each in values)


def code_fields(buffers: PlaneBuffers, grid: BlockGrid, address: Address) -> list[int]:
    """Return the fields of CodePlane, seen under ``grid``."""
    amax = _from_block_0(address(buffers.block_amax), buffers.first_block, 4)
    return [*grid_fields(grid), amax, address(buffers.codes)]


def _from_block_0(address: int, first_block: int, nbytes: int) -> int:
    """Return the address that the entry of block 0 would have.

    The tensor at ``address`` begins with the entry, of ``nbytes`` bytes, of ``first_block``.
    """
    return address and address - first_block * nbytes


def delayed_fields(operand: TensorOperand, address: Address) -> list[int]:
    """Return the fields of DelayedState."""
    state = operand.delayed
    if state is None:
        return [0] * 4
    if not operand.advances:
        return [address(state.scale), 0, 0, 0]
    tensors = state.scale, state.cast_scale, state.amax_history
    return [*map(address, tensors), state.amax_history.numel()]


def candidate_fields(
    candidates: FourOverSixErrors | None,
    address: Address,
    list_address: Callable[[torch.Tensor], int],
) -> list[int]:
    """Return the fields of Candidates."""
    if candidates is None:
        return [0] * 7
    return [
        _from_block_0(address(candidates.choices), candidates.first_block, 1),
        list_address(candidates.cut),
        candidates.cut.numel(),
        address(candidates.row_errors),
        list_address(candidates.segments),
        candidates.segments.numel(),
        address(candidates.elements),
    ]


def draw_fields(shard: TensorOperand, address: Address) -> list[int]:
    """Return the fields of RandomBits."""
    rounding = shard.rounding
    if rounding is None:
        return [0] * 4
    return [address(rounding.counter), rounding.origin, rounding.skip, shard.grid.cols]


def scale_row(operand: TensorOperand, address: Address) -> list[int]:
    """Return the fields of ScaleTarget."""
    first, *second = operand.scaled_planes
    candidates, rounding = operand.candidates, operand.rounding if operand.advances else None
    return [
        *plane_fields(first, address),
        *(plane_fields(second[0], address) if second else [0] * 14),
        address(operand.tensor_amax),
        address(operand.amax),
        *delayed_fields(operand, address),
        0
        if candidates is None
        else _from_block_0(address(candidates.choices), candidates.first_block, 1),
        0 if rounding is None else address(rounding.counter),
    ]


def expand_row(operand: TensorOperand, address: Address) -> list[int]:
    """Return the fields of ScaleTarget, whose planes have compact scales where amaxes would be."""
    first, *second = (plane_fields(each, address) for each in operand.planes)
    return [*first, *(second[0] if second else [0] * 14), *[0] * 8]


def plane_fields(
    buffers: PlaneBuffers, address: Address, grid: BlockGrid | None = None
) -> list[int]:
    """Return the fields of ScalePlane, seen under ``grid`` where one is given."""
    layout, stored = buffers.plane.scales, buffers.scale_inv
    return [
        *grid_fields(layout.grid if grid is None else grid),
        layout.row_repeat,
        layout.col_repeat,
        int(layout.transposed),
        layout.rows,
        layout.cols,
        *layout.shape,
        0 if stored is None else padding_bits(layout, stored),
        address(buffers.block_amax if buffers.compact is None else buffers.compact),
        address(stored),
    ]


def transpose_row(numerics: Numerics, operand: TensorOperand, address: Address) -> list[int]:
    """Return the fields of TransposeTarget."""
    first, second = operand.planes
    for layout in (first.plane.scales, second.plane.scales):
        assert not layout.transposed
        assert layout.col_repeat == 1
    return [
        FORMATS[numerics.fmt],
        numerics.scale_dtype.itemsize,
        address(first.codes),
        address(second.codes),
        *plane_fields(first, address),
        *plane_fields(second, address),
    ]


def dequantize_row(operand: TensorOperand, grid: BlockGrid, address: Address) -> list[int]:
    """Return the fields of DequantizeTarget, seen under ``grid``."""
    first = operand.planes[0]
    tensors = first.codes, operand.amax, operand.values
    return [*plane_fields(first, address, grid), *map(address, tensors)]


def digest_rows(
    ranges: Sequence[DigestedBytes], sums: torch.Tensor, address: Address
) -> list[list[int]]:
    """Return the fields of DigestTarget for each range that has bytes."""
    base = address(sums)
    return [
        [address(each.values), each.first, each.values.nbytes, base + 8 * i]
        for i, each in enumerate(ranges)
        if each.values.nbytes
    ]


def copy_row(copy: CodeCopy, address: Address) -> list[int]:
    """Return the fields of CopyTarget."""
    return [address(copy.codes), copy.staged, len(copy.codes)]


def comparison_row(
    target: Comparison, flags: torch.Tensor, digest: torch.Tensor, address: Address
) -> list[int]:
    """Return the fields of Comparison."""
    held, values = target.held, target.values
    sizes = values.numel(), values.itemsize, target.first
    return [address(held), address(values), *sizes, address(flags), address(digest)]


def runs_row(
    target: Comparison,
    flags: torch.Tensor,
    sizes: torch.Tensor,
    data: torch.Tensor,
    address: Address,
) -> list[int]:
    """Return the fields of RunsTarget."""
    values = target.values
    shape = values.numel(), values.itemsize
    return [address(flags), address(values), *shape, address(sizes), address(data)]


def padding_bits(layout: ScaleLayout, plane: torch.Tensor) -> int:
    """Return the bit pattern of one padding entry of ``plane``: FP32, or a one-byte code."""
    return float_bits(layout.padding) if plane.dtype == torch.float32 else int(layout.padding)


def float_bits(value: float) -> int:
    """Return the bit pattern of ``value`` rounded to FP32, as int32."""
    sign, magnitude = (math.copysign(1, value) < 0) * -(2**31), abs(value)
    if magnitude < torch.finfo(torch.float32).tiny:
        # An integer multiple of the smallest subnormal, which this thread may flush to zero.
        return sign + round(magnitude * 2.0**149)
    number = torch.tensor(magnitude, dtype=torch.float32, device="cpu")
    return sign + int(number.view(torch.int32))
