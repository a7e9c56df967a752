"""Reads the elements of one weight that a shard holds, and stores their codes."""

from __future__ import annotations

import torch

from zerocast.arguments import present
from zerocast.numerics import INFINITY_BITS, NAN_BITS, Masters, TensorOperand


def indices(shard: TensorOperand) -> torch.Tensor:
    """Return the flat indices, int64 [n], of the shard's elements in the whole weight."""
    start, end = shard.extent.start, shard.extent.end
    device = present(shard.planes[0].block_amax).device
    return torch.arange(start, end, dtype=torch.int64, device=device)


def amax_of(operand: TensorOperand) -> torch.Tensor:
    """Return the tensor amax, int32 [1], of an operand that has amaxes."""
    return present(operand.tensor_amax)


def rounded(shard: TensorOperand, masters: Masters) -> torch.Tensor:
    """Return the shard's master elements, FP32 [n], rounded to the weight's nominal dtype."""
    master = present(masters.tensors[shard.slot])
    assert master.numel() == shard.extent.size
    return master.detach().reshape(-1).float().to(shard.round_to).float()


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """[n] FP32 -> [n] int32 bit patterns of the magnitudes, every NaN canonical."""
    bits = x.abs().view(torch.int32)
    return torch.where(bits > INFINITY_BITS, NAN_BITS, bits).to(torch.int32)


def raise_amaxes(shard: TensorOperand, x: torch.Tensor) -> None:
    """Take the shard's rounded elements ``x`` [n] into the amaxes of its blocks and its tensor."""
    bits, index = magnitude_bits(x), indices(shard)
    for each in shard.cast_planes:
        blocks = each.plane.grid.block_of(index) - each.first_block
        present(each.block_amax).scatter_reduce_(0, blocks, bits, reduce="amax")
    if shard.tensor_amax is not None:
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
