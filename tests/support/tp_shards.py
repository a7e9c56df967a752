"""What a part of a weight has to hold: the slice of the whole weight's cast, stored as the part's
own layout has it.
"""

import torch

import zerocast
from zerocast import QuantizedTensor, TensorParallelShard
from zerocast.backends.reference.planes import read_plane, write_plane
from zerocast.layout import ScaleLayout, Source
from zerocast.numerics import pack_nibbles, unpack_nibbles
from zerocast.recipes import Recipe


def has_columnwise(recipe: Recipe) -> bool:
    """A columnwise copy that is cast from the transposed tensor cannot be sharded."""
    return recipe.columnwise_source is not Source.TRANSPOSED_MASTER


def unit(recipe: Recipe) -> int:
    """Rows, or columns, that no cut may divide."""
    if isinstance(recipe, zerocast.NVFP4BlockScaling):
        return 16
    if recipe.block[1] == 32:
        return 32
    return 128 if isinstance(recipe, zerocast.Float8BlockScaling) else 1


def shape_of(recipe: Recipe) -> torch.Size:
    """A small shape of several blocks; the last rows, and where the recipe lets them the last
    columns, are no whole block.
    """
    return torch.Size({16: (77, 112), 32: (133, 160), 128: (300, 270), 1: (13, 11)}[unit(recipe)])


def tp_shard_of(whole: QuantizedTensor, tp_shard: TensorParallelShard) -> dict[str, torch.Tensor]:
    """The buffers of ``tp_shard``, cut out of those of ``whole``."""
    storage, recipe = whole.quantized_storage, whole.recipe
    if stack := recipe.stack_of(whole.shape):
        if tp_shard.has_whole_matrices(recipe):
            begin, end = tp_shard.start // tp_shard.step, tp_shard.size // tp_shard.step
            return {n: each.narrow(0, begin, end) for n, each in storage.buffers.items()}
        own = tp_shard.of_matrix(recipe)
        parts = [tp_shard_of(QuantizedTensor(matrix), own) for matrix in storage.matrices]
        return {n: torch.stack([p[n] for p in parts]).unflatten(0, stack) for n in parts[0]}
    expected = dict(storage.buffers)  # what is the same for all parts
    planes = zip(recipe.planes(whole.shape), recipe.planes(tp_shard.shape), strict=True)
    for plane, own in planes:
        dim = plane.grid_dim(tp_shard.dim)
        if plane.codes_name in expected:
            cut = _codes(expected[plane.codes_name], tp_shard, dim, recipe.numerics.fmt.bits)
            if not plane.is_transposed:
                cut = cut.reshape(*tp_shard.shape[:-1], cut.shape[-1])
            expected[plane.codes_name] = cut
        if plane.scales_name in expected:
            by_block = read_plane(expected[plane.scales_name], plane.scales)
            scales = torch.empty(own.scales.shape, dtype=by_block.dtype)
            write_plane(_blocks(by_block, plane.scales, tp_shard, dim), own.scales, scales)
            expected[plane.scales_name] = scales.view(own.scale_shape)
    return expected


def _codes(codes: torch.Tensor, tp_shard: TensorParallelShard, dim: int, bits: int) -> torch.Tensor:
    """Rows or columns of a plane of codes, [rows, columns * bits / 8]."""
    plane = codes.reshape(-1, codes.shape[-1])
    if dim == 0:
        return plane[tp_shard.start : tp_shard.start + tp_shard.size]
    if bits == 8:
        return plane[:, tp_shard.start : tp_shard.start + tp_shard.size]
    nibbles = unpack_nibbles(plane, 2 * plane.shape[1])
    return pack_nibbles(nibbles[:, tp_shard.start : tp_shard.start + tp_shard.size])


def _blocks(
    by_block: torch.Tensor, layout: ScaleLayout, tp_shard: TensorParallelShard, dim: int
) -> torch.Tensor:
    """Of the scales of all blocks those of the part's."""
    grid = layout.grid
    block, lines = (grid.block_w, grid.cols) if dim else (grid.block_h, grid.rows)
    if block >= lines:
        return by_block  # one scale for all parts
    first = tp_shard.start // block
    last = -(-(tp_shard.start + tp_shard.size) // block) if tp_shard.size else first
    return by_block[:, first:last] if dim else by_block[first:last]
