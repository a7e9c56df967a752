"""ReferenceBackend: the operations as loops over weights; their arithmetic is in the modules beside
this one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from zerocast.arguments import present
from zerocast.backends.fused_op_rows import write_result
from zerocast.backends.reference import adamw_formulas, changes, four_over_six
from zerocast.backends.reference.digest_formula import digest
from zerocast.backends.reference.elements import amax_of, indices, raise_amaxes, rounded, store
from zerocast.backends.reference.philox import element_draws
from zerocast.backends.reference.planes import by_elements, read_plane, write_plane
from zerocast.backends.reference.rounding import encode_stochastic
from zerocast.backends.reference.scales import (
    advance,
    decode_multipliers,
    effective_amax,
    scales,
)
from zerocast.backends.subnormals import keeping_subnormals
from zerocast.layout import BlockGrid
from zerocast.numerics import (
    AdamWUpdate,
    ChangedRuns,
    CodeCopy,
    Comparison,
    DigestedBytes,
    Float8DelayedNumerics,
    FusedOperand,
    Launch,
    LaunchOn,
    LaunchUpdates,
    Masters,
    Numerics,
    NVFP4Numerics,
    Operands,
    PlaneBuffers,
    SharedByte,
    TensorOperand,
    decode,
    encode,
    pack_nibbles,
    packed_columns,
    unpack_nibbles,
)

T = TypeVar("T")


class ReferenceBackend:
    """Plain torch on any device; see :class:`zerocast.numerics.Backend` for what the methods
    promise. A compiled backend inherits this one and replaces operations by compiled ones.
    """

    name = "reference"

    def partial_amax(
        self, operands: Operands, masters: Masters, numerics: Numerics | None = None
    ) -> Launch:
        def run(shard: TensorOperand) -> None:
            x = rounded(shard, masters)
            raise_amaxes(shard, x)
            if numerics is not None and shard.whole:
                whole = _in_whole(shard)
                _cast(numerics, shard, x[whole], indices(shard)[whole])

        return _for_shards(operands, run)

    @staticmethod
    def reads_once(numerics: Numerics, grids: Sequence[BlockGrid]) -> bool:
        # Random bits are those of the step that compute_scale begins.
        return not (isinstance(numerics, NVFP4Numerics) and numerics.stochastic_rounding)

    def adamw(self, updates: Sequence[AdamWUpdate]) -> Launch:
        return _for_each(updates, adamw_formulas.update)

    def adamw_cast(self, numerics: Numerics, operands: Operands, masters: Masters) -> LaunchUpdates:
        if isinstance(numerics, Float8DelayedNumerics):
            cast = self.partial_cast(numerics, operands, masters)
        else:
            cast = self.partial_amax(operands, masters, numerics)
        slots = [operand.slot for operand in operands]

        def launch(updates: Sequence[AdamWUpdate | None]) -> None:
            self.adamw([each for slot in slots if (each := updates[slot]) is not None])()
            cast()

        return launch

    def partial_select(
        self, numerics: NVFP4Numerics, operands: Operands, masters: Masters
    ) -> Launch:
        def run(shard: TensorOperand) -> None:
            four_over_six.write_own_part(numerics, shard, masters)
            if shard.whole:
                whole = _in_whole(shard)
                _cast(numerics, shard, rounded(shard, masters)[whole], indices(shard)[whole])

        return _for_shards(operands, run)

    def select(self, numerics: NVFP4Numerics, operands: Operands) -> Launch:
        return _for_each(operands, partial(four_over_six.choose_in_cut_rows, numerics))

    def compute_scale(self, numerics: Numerics, operands: Operands) -> Launch:
        return _for_each(operands, partial(_compute_scale, numerics))

    def expand_scales(self, numerics: Numerics, operands: Operands) -> Launch:
        return _for_each(operands, _expand_scales)

    def partial_cast(self, numerics: Numerics, operands: Operands, masters: Masters) -> Launch:
        def run(shard: TensorOperand) -> None:
            x, index = rounded(shard, masters), indices(shard)
            if isinstance(numerics, Float8DelayedNumerics):
                raise_amaxes(shard, x)
            if shard.whole:
                rest = ~_in_whole(shard)
                x, index = x[rest], index[rest]
            _cast(numerics, shard, x, index)

        return _for_shards(operands, run)

    def transpose(self, numerics: Numerics, operands: Operands) -> Launch:
        return _for_each(operands, partial(_transpose, numerics))

    def dequantize(self, numerics: Numerics, operands: Operands) -> Launch:
        return _for_each(operands, partial(_dequantize, numerics))

    def stage_codes(self, copies: Sequence[CodeCopy]) -> LaunchOn:
        codes, sizes = [copy.codes for copy in copies], _sizes(copies)

        def launch(buffer: torch.Tensor) -> None:
            if codes:
                torch._foreach_copy_(_pieces(buffer, sizes), codes)

        return launch

    def store_codes(self, copies: Sequence[CodeCopy], shared: Sequence[SharedByte]) -> LaunchOn:
        codes, sizes = [copy.codes for copy in copies], _sizes(copies)

        def launch(buffer: torch.Tensor) -> None:
            if codes:
                torch._foreach_copy_(codes, _pieces(buffer, sizes))
            for byte in shared:
                low = byte.codes if byte.low is None else buffer[byte.low]
                high = byte.codes if byte.high is None else buffer[byte.high]
                byte.codes.copy_((low & 0x0F) | (high & 0xF0))

        return launch

    def digest(self, ranges: Sequence[DigestedBytes], sums: torch.Tensor) -> Launch:
        def launch() -> None:
            for i, each in enumerate(ranges):
                sums[i] += digest(each.values, each.first)

        return launch

    def changed_runs(self, comparisons: Sequence[Comparison]) -> list[ChangedRuns]:
        found: list[ChangedRuns] = []
        _for_each(comparisons, lambda each: found.append(changes.changed_runs(each)))()
        return found

    def fused_op(self, target: FusedOperand) -> Launch:
        return _for_each([target], write_result)


def _for_each(operands: Sequence[T], run: Callable[[T], None]) -> Launch:
    """Return the launch that runs an operation on one tensor after the other."""

    @keeping_subnormals
    def launch() -> None:
        for operand in operands:
            run(operand)

    return launch


def _for_shards(operands: Operands, run: Callable[[TensorOperand], None]) -> Launch:
    """Return the same on the tensors of which this rank owns elements."""
    return _for_each([operand for operand in operands if operand.extent], run)


def _sizes(copies: Sequence[CodeCopy]) -> list[int]:
    """Return, for each copy, the bytes of the buffer between it and the one before, and its own."""
    ends = [0, *(copy.staged + len(copy.codes) for copy in copies)]
    gaps = [copy.staged - end for copy, end in zip(copies, ends, strict=False)]
    lengths = [len(copy.codes) for copy in copies]
    return list(itertools.chain.from_iterable(zip(gaps, lengths, strict=True)))


def _pieces(buffer: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(buffer[: sum(sizes)].split_with_sizes(sizes)[1::2])


def _compute_scale(numerics: Numerics, t: TensorOperand) -> None:
    for each in t.scaled_planes:
        if each.scale_inv is not None:
            stored, _ = scales(numerics, t, each)
            write_plane(stored, each.plane.scales, each.scale_inv)
    if t.amax is not None:
        t.amax.copy_(effective_amax(numerics, t))
    if t.advances and t.delayed is not None:
        assert isinstance(numerics, Float8DelayedNumerics)
        advance(numerics, t.delayed, amax_of(t))
    if t.advances and t.rounding is not None:
        t.rounding.counter[1] += 1


def _expand_scales(t: TensorOperand) -> None:
    for each in t.planes:
        write_plane(present(each.compact), each.plane.scales, present(each.scale_inv))


def _transpose(numerics: Numerics, t: TensorOperand) -> None:
    rowwise, columnwise = t.planes
    codes = _codes(numerics, rowwise)
    transposed = pack_nibbles(codes.t()) if numerics.fmt.bits == 4 else codes.t()
    present(columnwise.codes).view(transposed.shape).copy_(transposed)
    if columnwise.scale_inv is not None:
        write_plane(_scales(rowwise).t(), columnwise.plane.scales, columnwise.scale_inv)


def _dequantize(numerics: Numerics, t: TensorOperand) -> None:
    assert t.values is not None
    multipliers = decode_multipliers(numerics, _scales(t.planes[0]), t.amax)
    value = decode(_codes(numerics, t.planes[0]), numerics.fmt) * by_elements(multipliers, t.grid)
    # An infinite scale times zero is a NaN whose sign the machine chooses: ours is canonical.
    t.values.copy_(torch.where(value.isnan(), math.nan, value).view_as(t.values))


def _codes(numerics: Numerics, buffers: PlaneBuffers) -> torch.Tensor:
    """uint8 [rows, cols] of the plane's grid: a code an element."""
    grid = buffers.plane.grid
    codes = present(buffers.codes).view(grid.rows, packed_columns(numerics.fmt, grid.cols))
    return unpack_nibbles(codes, grid.cols) if numerics.fmt.bits == 4 else codes


def _scales(buffers: PlaneBuffers) -> torch.Tensor:
    """[blocks_h, blocks_w]: the stored scale of every block."""
    return read_plane(present(buffers.scale_inv), buffers.plane.scales)


def _in_whole(shard: TensorOperand) -> torch.Tensor:
    """[n] bool: which of the shard's elements are in ``whole``."""
    index = indices(shard)
    return (index >= shard.whole.start) & (index < shard.whole.end)


def _cast(numerics: Numerics, shard: TensorOperand, x: torch.Tensor, index: torch.Tensor) -> None:
    """Encode rounded elements, ``x`` [n] at ``index`` [n], into every plane of codes."""
    for each in shard.cast_planes:
        grid = each.plane.grid
        _, multipliers = scales(numerics, shard, each)
        multiplier = multipliers[grid.block_of(index) - each.first_block]
        y = x * multiplier
        if isinstance(numerics, NVFP4Numerics) and numerics.stochastic_rounding:
            rounding = present(shard.rounding)
            name_hash, step = rounding.counter.tolist()
            in_whole = index + rounding.origin + index // grid.cols * rounding.skip
            drawn = element_draws(in_whole, numerics.seed, name_hash, step)
            encoded = encode_stochastic(y, numerics.fmt, drawn)
        else:
            encoded = encode(y, numerics.fmt)
        encoded = torch.where(multiplier.isnan(), numerics.fmt.nan_code, encoded).to(torch.uint8)
        codes = present(each.codes).view(-1)
        store(codes, index - shard.codes_start, encoded, numerics.fmt.bits)
