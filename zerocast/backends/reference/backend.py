"""The operations, each a loop over weights; the arithmetic is in the modules beside this one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zerocast.backends.activations import cast_values, float64_result
from zerocast.backends.reference import four_over_six
from zerocast.backends.reference.elements import amax_of, indices, raise_amaxes, rounded, store
from zerocast.backends.reference.philox import element_words
from zerocast.backends.reference.planes import by_elements, read_plane, write_plane
from zerocast.backends.reference.rounding import encode_stochastic
from zerocast.backends.reference.scales import advance, decode_multipliers, scales
from zerocast.backends.subnormals import keeping_subnormals
from zerocast.formats import decode, encode, pack_nibbles, packed_columns, unpack_nibbles
from zerocast.ops import (
    ActivationTarget,
    Float8DelayedLaw,
    Launch,
    Law,
    Masters,
    NVFP4Law,
    PlaneBuffers,
    TensorOperand,
)


class ReferenceBackend:
    """Plain torch on any device; see :class:`zerocast.ops.Backend` for what the methods promise."""

    name = "reference"

    def partial_amax(self, operands: Sequence[TensorOperand], masters: Masters) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for shard in operands:
                if shard.extent:
                    raise_amaxes(shard, rounded(shard, masters))

        return launch

    def partial_select(
        self, law: NVFP4Law, operands: Sequence[TensorOperand], masters: Masters
    ) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for shard in operands:
                if shard.extent:
                    four_over_six.write_own_part(law, shard, masters)

        return launch

    def select(self, law: NVFP4Law, operands: Sequence[TensorOperand]) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for operand in operands:
                four_over_six.choose_in_cut_rows(law, operand)

        return launch

    def compute_scale(self, law: Law, operands: Sequence[TensorOperand]) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for t in operands:
                for each in t.scaled_planes:
                    assert each.scale_inv is not None
                    stored, _ = scales(law, t, each)
                    write_plane(stored, each.plane.scales, each.scale_inv)
                if t.amax is not None:
                    t.amax.copy_(amax_of(t).view(torch.float32))
                if t.advances and t.delayed is not None:
                    assert isinstance(law, Float8DelayedLaw)
                    advance(law, t.delayed, amax_of(t))
                if t.advances and t.rounding is not None:
                    t.rounding.counter[1] += 1

        return launch

    def partial_cast(self, law: Law, operands: Sequence[TensorOperand], masters: Masters) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for shard in operands:
                if shard.extent:
                    x = rounded(shard, masters)
                    if isinstance(law, Float8DelayedLaw):
                        raise_amaxes(shard, x)
                    _cast(law, shard, x)

        return launch

    def transpose(self, law: Law, operands: Sequence[TensorOperand]) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for t in operands:
                rowwise, columnwise = t.planes
                assert columnwise.codes is not None
                codes = _codes(law, rowwise)
                transposed = pack_nibbles(codes.t()) if law.fmt.bits == 4 else codes.t()
                columnwise.codes.view(transposed.shape).copy_(transposed)
                if columnwise.scale_inv is not None:
                    write_plane(_scales(rowwise).t(), columnwise.plane.scales, columnwise.scale_inv)

        return launch

    def dequantize(self, law: Law, operands: Sequence[TensorOperand]) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for t in operands:
                assert t.values is not None
                multipliers = decode_multipliers(law, _scales(t.planes[0]), t.amax)
                codes = _codes(law, t.planes[0])
                value = decode(codes, law.fmt) * by_elements(multipliers, t.grid)
                # An infinite scale times zero is a NaN whose sign the machine chooses: ours is
                # canonical.
                t.values.copy_(torch.where(value.isnan(), math.nan, value).view_as(t.values))

        return launch

    def activate(self, law: Law | None, target: ActivationTarget) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            # Rounded once more on the way, to FP32, where that is not the aim.
            values = float64_result(target).float().to(target.round_to).float()
            values = torch.where(values.isnan(), math.nan, values)
            if target.output is not None:
                target.output.copy_(values)
            cast_values(self, law, target, values)

        return launch


def _codes(law: Law, buffers: PlaneBuffers) -> torch.Tensor:
    """uint8 [rows, cols] of the plane's grid: a code an element."""
    grid = buffers.plane.grid
    assert buffers.codes is not None
    codes = buffers.codes.view(grid.rows, packed_columns(law.fmt, grid.cols))
    return unpack_nibbles(codes, grid.cols) if law.fmt.bits == 4 else codes


def _scales(buffers: PlaneBuffers) -> torch.Tensor:
    """[blocks_h, blocks_w]: the stored scale of every block."""
    assert buffers.scale_inv is not None
    return read_plane(buffers.scale_inv, buffers.plane.scales)


def _cast(law: Law, shard: TensorOperand, x: torch.Tensor) -> None:
    """Encode the shard's rounded elements ``x`` [n] into every plane of codes."""
    index = indices(shard)
    for each in shard.cast_planes:
        grid = each.plane.grid
        _, multipliers = scales(law, shard, each)
        multiplier = multipliers[grid.block_of(index)]
        y = x * multiplier
        if isinstance(law, NVFP4Law) and law.stochastic_rounding:
            assert shard.rounding is not None
            rounding = shard.rounding
            name_hash, step = rounding.counter.tolist()
            in_whole = index + rounding.origin + index // grid.cols * rounding.skip
            drawn = element_words(in_whole, law.seed, name_hash, step)
            encoded = encode_stochastic(y, law.fmt, drawn)
        else:
            encoded = encode(y, law.fmt)
        encoded = torch.where(multiplier.isnan(), law.fmt.nan_code, encoded).to(torch.uint8)
        assert each.codes is not None
        store(each.codes.view(-1), index - shard.codes_start, encoded, law.fmt.bits)
