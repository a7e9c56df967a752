"""The reference backend: the law of every operation in plain torch, as slow and as obvious as it
needs to be.

It runs on any device that torch runs on. Each element's block, byte and nibble are computed from
its flat index in the whole weight, one formula each, and nothing is optimised: other backends are
judged by the bytes that this one makes.
"""

import math
from collections.abc import Sequence

import torch

from zerocast.backends.subnormals import keeping_subnormals
from zerocast.formats import FLT_MAX, decode, encode, pack_nibbles, packed_columns, unpack_nibbles
from zerocast.layout import BlockGrid, ScaleLayout
from zerocast.ops import (
    INFINITY_BITS,
    NAN_BITS,
    CastShard,
    DequantizeTarget,
    Float8Law,
    Launch,
    Law,
    Masters,
    NVFP4Law,
    ScaleTarget,
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
                    bits = _magnitude_bits(_rounded(shard, masters))
                    block = shard.grid.block_of(_indices(shard))
                    shard.block_amax.scatter_reduce_(0, block, bits, reduce="amax")
                    shard.tensor_amax.copy_(torch.maximum(shard.tensor_amax, bits.max()))

        return launch

    def compute_scale(self, law: Law, targets: Sequence[ScaleTarget]) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for target in targets:
                stored, _ = _scales(law, target.block_amax, target.tensor_amax)
                plane = torch.full(
                    target.layout.shape,
                    target.layout.padding,
                    dtype=stored.dtype,
                    device=stored.device,
                )
                plane[: target.layout.rows, : target.layout.cols] = _by_rows(stored, target.layout)
                target.scale_inv.copy_(plane.view_as(target.scale_inv))
                if target.amax is not None:
                    target.amax.copy_(target.tensor_amax.view(torch.float32))

        return launch

    def partial_cast(self, law: Law, shards: Sequence[CastShard], masters: Masters) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for shard in shards:
                if shard.extent:
                    index = _indices(shard)
                    _, multipliers = _scales(law, shard.block_amax, shard.tensor_amax)
                    multiplier = multipliers[shard.grid.block_of(index)]
                    codes = encode(_rounded(shard, masters) * multiplier, law.fmt)
                    codes = torch.where(multiplier.isnan(), law.fmt.nan_code, codes).to(torch.uint8)
                    _store(shard, index, codes, law.fmt.bits)

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
                    by_block = t.scale_inv[: t.layout.rows : t.layout.row_repeat, : t.layout.cols]
                    layout = t.columnwise_layout
                    plane = torch.full_like(t.columnwise_scale_inv, layout.padding)
                    plane[: layout.rows, : layout.cols] = _by_rows(by_block.t(), layout)
                    t.columnwise_scale_inv.copy_(plane)

        return launch

    def dequantize(self, law: Law, targets: Sequence[DequantizeTarget]) -> Launch:
        @keeping_subnormals
        def launch() -> None:
            for target in targets:
                grid = target.layout.grid
                codes = target.codes.view(grid.rows, packed_columns(law.fmt, grid.cols))
                if law.fmt.bits == 4:
                    codes = unpack_nibbles(codes, grid.cols)
                scale = target.scale_inv.view(target.layout.shape)
                if isinstance(law, NVFP4Law):
                    assert target.amax is not None
                    scale = (
                        decode(scale, law.scale_fmt)
                        * target.amax
                        * _fl(1 / (law.fmt.max * law.scale_fmt.max))
                    )
                scale = scale[: target.layout.rows : target.layout.row_repeat, : target.layout.cols]
                value = decode(codes, law.fmt) * _by_elements(scale, grid)
                # An infinite scale times zero is a NaN whose sign the machine chooses: ours is
                # canonical.
                target.out.copy_(torch.where(value.isnan(), math.nan, value))

        return launch


# --- one weight's elements ---


def _indices(shard: CastShard) -> torch.Tensor:
    """[n] int64 flat indices, in the whole weight, of the shard's elements."""
    return torch.arange(
        shard.extent.start, shard.extent.end, dtype=torch.int64, device=shard.codes.device
    )


def _rounded(shard: CastShard, masters: Masters) -> torch.Tensor:
    """[n] FP32: the shard's master elements, rounded to the weight's nominal dtype."""
    master = masters.tensors[shard.slot]
    assert master is not None
    assert master.numel() == shard.extent.size
    return master.detach().reshape(-1).to(shard.round_to).float()


def _magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """[n] FP32 -> [n] int32 bit patterns of the magnitudes, every NaN canonical."""
    bits = x.abs().view(torch.int32)
    return torch.where(bits > INFINITY_BITS, NAN_BITS, bits).to(torch.int32)


def _store(shard: CastShard, index: torch.Tensor, codes: torch.Tensor, bits: int) -> None:
    """Write ``codes`` [n] to where the elements ``index`` [n] live: bytes, or single nibbles of
    shared bytes.
    """
    place = index - shard.codes_start
    if bits == 8:
        shard.codes[place] = codes
        return
    for nibble, shift in ((0, 0), (1, 4)):
        mine = place % 2 == nibble
        other = shard.codes[place[mine] // 2] & (0xF0 if nibble == 0 else 0x0F)
        shard.codes[place[mine] // 2] = other | (codes[mine] << shift)


# --- amax to scale ---


def _fl(value: float) -> float:
    """``value`` rounded to FP32."""
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def _divide(a: float, b: torch.Tensor) -> torch.Tensor:
    """``a / b`` rounded once. (torch turns ``float / tensor`` into ``reciprocal(tensor) * float``,
    rounded twice.)
    """
    return torch.full_like(b, a) / b


def _scales(
    law: Law, block_amax: torch.Tensor, tensor_amax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [blocks], int32 [1] -> stored scales [blocks] and FP32 encode multipliers [blocks], NaN
    where not finite.
    """
    if isinstance(law, NVFP4Law):
        return _nvfp4_scales(law, block_amax.view(torch.float32), tensor_amax.view(torch.float32))
    return _float8_scales(law, block_amax.view(torch.float32))


def _float8_scales(law: Float8Law, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    clamped = torch.where(amax < _fl(law.amax_epsilon), _fl(law.amax_epsilon), amax)
    scale = _divide(law.fmt.max, clamped).clamp(max=FLT_MAX)
    if law.power_2_scale:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    scale = torch.where(clamped == 0, 1.0, scale)
    finite = amax.isfinite()
    return torch.where(finite, _divide(1.0, scale), math.nan), torch.where(finite, scale, math.nan)


def _nvfp4_scales(
    law: NVFP4Law, block: torch.Tensor, tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    encode_scale = _divide(law.fmt.max * law.scale_fmt.max, tensor).clamp(max=FLT_MAX)
    encode_scale = torch.where(tensor == 0, 1.0, encode_scale)
    block_scale = (block * (encode_scale * _fl(1 / law.fmt.max))).clamp(max=FLT_MAX)
    stored = encode(block_scale, law.scale_fmt)
    decode_scale = decode(stored, law.scale_fmt) * _divide(1.0, encode_scale)
    multiplier = _divide(1.0, decode_scale).clamp(max=FLT_MAX)
    finite = tensor.isfinite()
    stored = torch.where(finite, stored, law.scale_fmt.nan_code).to(torch.uint8)
    return stored, torch.where(finite, multiplier, math.nan)


# --- scales to where they are stored and read ---


def _by_rows(by_block: torch.Tensor, layout: ScaleLayout) -> torch.Tensor:
    """Scales by block, in any shape -> [layout.rows, layout.cols], repeated as the layout stores
    them.
    """
    by_block = by_block.reshape(layout.grid.blocks_h, layout.grid.blocks_w)
    return by_block.repeat_interleave(layout.row_repeat, dim=0)[: layout.rows]


def _by_elements(by_block: torch.Tensor, grid: BlockGrid) -> torch.Tensor:
    """[blocks_h, blocks_w] -> [rows, cols]: for each element the scale of its block."""
    by_row = by_block.repeat_interleave(grid.block_h, dim=0)[: grid.rows]
    return by_row.repeat_interleave(grid.block_w, dim=1)[:, : grid.cols]
