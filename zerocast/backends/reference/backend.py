"""The operations, each a loop over weights; the arithmetic is in the modules beside this one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zerocast.backends.activations import cast_values, float64_result
from zerocast.backends.reference import four_over_six
from zerocast.backends.reference.elements import indices, raise_amaxes, rounded, store
from zerocast.backends.reference.philox import element_words
from zerocast.backends.reference.planes import by_elements, read_plane, write_plane
from zerocast.backends.reference.rounding import encode_stochastic
from zerocast.backends.reference.scales import advance, decode_multipliers, scales
from zerocast.backends.subnormals import keeping_subnormals
from zerocast.formats import decode, encode, pack_nibbles, packed_columns, unpack_nibbles
from zerocast.ops import (
    ActivationTarget,
    CastShard,
    DequantizeTarget,
    Float8DelayedLaw,
    Launch,
    Law,
    Masters,
    NVFP4Law,
    ScaleTarget,
    SelectTarget,
    TransposeTarget,
)


class ReferenceBackend:
    """Plain torch on any device; see :class:`zerocast.ops.Backend` for what the methods promise."""

    name = "reference"

    def partial_amax(self, shards: Sequence[CastShard], masters: Masters) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for shard in shards:
                if shard.extent:
                    raise_amaxes(shard, rounded(shard, masters))

        return launch

    def partial_select(
        self, law: NVFP4Law, shards: Sequence[CastShard], masters: Masters
    ) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for shard in shards:
                if shard.extent:
                    four_over_six.write_own_part(law, shard, masters)

        return launch

    def select(self, law: NVFP4Law, targets: Sequence[SelectTarget]) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for target in targets:
                four_over_six.choose_in_cut_rows(law, target)

        return launch

    def compute_scale(self, law: Law, targets: Sequence[ScaleTarget]) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for t in targets:
                choices = None if t.candidates is None else t.candidates.choices
                stored, _ = scales(law, t.block_amax, t.tensor_amax, choices, t.delayed)
                write_plane(stored, t.layout, t.scale_inv)
                if t.columnwise is not None:
                    second = t.columnwise
                    stored, _ = scales(law, second.block_amax, t.tensor_amax)
                    write_plane(stored, second.layout, second.scale_inv)
                if t.amax is not None:
                    t.amax.copy_(t.tensor_amax.view(torch.float32))
                if t.delayed is not None:
                    assert isinstance(law, Float8DelayedLaw)
                    advance(law, t.delayed, t.tensor_amax)
                if t.rounding is not None:
                    t.rounding.counter[1] += 1

        return launch

    def partial_cast(self, law: Law, shards: Sequence[CastShard], masters: Masters) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for shard in shards:
                if shard.extent:
                    x = rounded(shard, masters)
                    if isinstance(law, Float8DelayedLaw):
                        raise_amaxes(shard, x)
                    _cast(law, shard, x)

        return launch

    def transpose(self, targets: Sequence[TransposeTarget]) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for t in targets:
                rows, cols = t.layout.grid.rows, t.layout.grid.cols
                codes = t.codes.view(rows, packed_columns(t.fmt, cols))
                if t.fmt.bits == 4:
                    transposed = pack_nibbles(unpack_nibbles(codes, cols).t())
                else:
                    transposed = codes.t()
                t.columnwise_codes.view(transposed.shape).copy_(transposed)
                if t.columnwise_scale_inv is not None:
                    by_block = read_plane(t.scale_inv, t.layout)
                    write_plane(by_block.t(), t.columnwise_layout, t.columnwise_scale_inv)

        return launch

    def dequantize(self, law: Law, targets: Sequence[DequantizeTarget]) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for t in targets:
                grid = t.layout.grid
                codes = t.codes.view(grid.rows, packed_columns(law.fmt, grid.cols))
                if law.fmt.bits == 4:
                    codes = unpack_nibbles(codes, grid.cols)
                multipliers = decode_multipliers(law, read_plane(t.scale_inv, t.layout), t.amax)
                value = decode(codes, law.fmt) * by_elements(multipliers, grid)
                # An infinite scale times zero is a NaN whose sign the machine chooses: ours is
                # canonical.
                t.out.copy_(torch.where(value.isnan(), math.nan, value).view_as(t.out))

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


def _cast(law: Law, shard: CastShard, x: torch.Tensor) -> None:
    """Encode the shard's rounded elements ``x`` [n] into every plane of codes."""
    index = indices(shard)
    choices = None if shard.candidates is None else shard.candidates.choices
    planes = [(shard.grid, shard.block_amax, shard.codes)]
    if shard.columnwise is not None:
        second = shard.columnwise
        planes.append((second.grid, second.block_amax, second.codes))
    for grid, block_amax, codes in planes:
        _, multipliers = scales(law, block_amax, shard.tensor_amax, choices, shard.delayed)
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
        store(codes, index - shard.codes_start, encoded, law.fmt.bits)
