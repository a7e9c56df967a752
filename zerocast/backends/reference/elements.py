"""One weight's elements: which a shard holds, what they are, and where their codes are stored."""

from __future__ import annotations

import torch

from zerocast.ops import INFINITY_BITS, NAN_BITS, CastShard, Masters


def indices(shard: CastShard) -> torch.Tensor:
    """[n] int64 flat indices, in the whole weight, of the shard's elements."""
    return torch.arange(
        shard.extent.start, shard.extent.end, dtype=torch.int64, device=shard.codes.device
    )


def rounded(shard: CastShard, masters: Masters) -> torch.Tensor:
    """[n] FP32: the shard's master elements, rounded to the weight's nominal dtype."""
    master = masters.tensors[shard.slot]
    assert master is not None
    assert master.numel() == shard.extent.size
    return master.detach().reshape(-1).float().to(shard.round_to).float()


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """[n] FP32 -> [n] int32 bit patterns of the magnitudes, every NaN canonical."""
    bits = x.abs().view(torch.int32)
    return torch.where(bits > INFINITY_BITS, NAN_BITS, bits).to(torch.int32)


def raise_amaxes(shard: CastShard, x: torch.Tensor) -> None:
    """Take the shard's rounded elements ``x`` [n] into the amaxes of its blocks and its tensor."""
    bits, index = magnitude_bits(x), indices(shard)
    planes = [(shard.grid, shard.block_amax)]
    if shard.columnwise is not None:
        planes.append((shard.columnwise.grid, shard.columnwise.block_amax))
    for grid, block_amax in planes:
        block_amax.scatter_reduce_(0, grid.block_of(index), bits, reduce="amax")
    shard.tensor_amax.copy_(torch.maximum(shard.tensor_amax, bits.max()))


def store(codes: torch.Tensor, place: torch.Tensor, values: torch.Tensor, bits: int) -> None:
    """Write ``values`` [n] to the elements ``place`` [n] of the flat buffer ``codes``: bytes, or
    single nibbles of shared bytes.
    """
    if bits == 8:
        codes[place] = values
        return
    for nibble, shift in ((0, 0), (1, 4)):
        mine = place % 2 == nibble
        other = codes[place[mine] // 2] & (0xF0 if nibble == 0 else 0x0F)
        codes[place[mine] // 2] = other | (values[mine] << shift)
