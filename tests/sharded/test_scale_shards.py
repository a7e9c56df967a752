"""Which rank makes and sends which scales of a weight that FSDP2 shards, without ranks."""

import pytest
import torch

from tests.support.recipes import RECIPES, each
from zerocast.layout import CutBlocks, Extent, Owners
from zerocast.sharded.row_shards import RowShards
from zerocast.sharded.scale_shards import ScaleShards

GARBAGE = 0xA5


def scale_shards(recipe, shape, world_size) -> ScaleShards:
    """Those of a weight with both planes."""
    rows = RowShards(torch.Size(shape), world_size, recipe.numerics.fmt)
    return ScaleShards(rows, recipe, columnwise=True, tp_shard=None)


def chunks(shape, world_size) -> list[Extent]:
    """What torch.chunk gives each rank, in elements."""
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [(int(c.min()), int(c.max()) + 1) for c in numbers.chunk(world_size)]
    return [Extent(*part) for part in parts] + [Extent(0, 0)] * (world_size - len(parts))


@each("rowwise", "block", "mxfp8", "mxfp8-2d", "mxfp4", "nvfp4")
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
def test_what_ranks_send_makes_up_all_scales(recipe, world_size):
    """Each writes a number into the scale of each block that is its own, and all blocks come out in
    order: for even, uneven, empty and cut rows, and for stacks.
    """
    for shape in [(1, 32), (2, 32), (3, 32), (5, 96), (130, 48), (256, 32), (37, 33),
                  (640, 16), (5, 48, 32), (7, 3, 16, 48)]:  # fmt: skip
        if shape[-1] % 32 and (recipe.scheme.startswith("mx") or recipe.scheme == "nvfp4"):
            continue
        own, parts = scale_shards(recipe, shape, world_size), chunks(shape, world_size)
        sent = [torch.full((own.sent_bytes,), GARBAGE, dtype=torch.uint8) for _ in parts]
        for rank, extent in enumerate(parts):
            made = own.allocate_made(torch.device("cpu"))
            for i, of_matrix in enumerate(own.own(sent[rank], made, rank)):
                for name, scales in of_matrix.items():
                    grid = own.planes[name].grid
                    start = i * grid.numel
                    held = extent.intersect(Extent(start, start + grid.numel)).shifted(-start)
                    mine = grid.owned(held) if held.size > 0 else range(0)
                    if name not in own.by_owner:
                        mine = range(grid.num_blocks)
                    assert list(scales.blocks) == list(mine), (shape, rank, name)
                    scales.entries.copy_(numbers(i, mine))
        whole = own.whole(torch.cat(sent), made)
        assert own.planes.keys() == {p.name for p in recipe.planes(shape) if p.is_cast}
        for i in range(own.matrices):
            for name, plane in own.planes.items():
                expected = numbers(i, range(plane.grid.num_blocks)).to(whole[i][name].dtype)
                assert torch.equal(whole[i][name], expected), (shape, name)
                assert whole[i][name].is_contiguous(), (shape, name)  # as backends read it


def numbers(matrix: int, blocks: range) -> torch.Tensor:
    """One for each block, that a byte holds."""
    return (torch.arange(blocks.start, blocks.stop) + 7 * matrix) % 251


@each("rowwise", "block", "mxfp8", "nvfp4")
def test_amaxes_that_are_reduced_are_those_of_cut_blocks(recipe):
    """Of planes whose scales are sent, and all of the others; and the others have blocks that are
    higher than a rank's rows.
    """
    for rows, world_size in [(640, 3), (640, 5), (130, 4), (96, 7), (256, 2)]:
        own = scale_shards(recipe, (rows, 64), world_size)
        extents = [[[e.start, e.end]] for e in chunks((rows, 64), world_size)]
        owners, expected = Owners.of_extents(torch.tensor(extents)), 0
        for name, plane in own.planes.items():
            count = plane.grid.num_blocks
            if name in own.by_owner:
                count = CutBlocks([(0, plane.grid)], owners).count
            else:
                assert plane.grid.block_h > -(-rows // world_size)
            expected += count
        assert own.reduced_amaxes == expected, (rows, world_size)


def test_one_scale_a_tensor_is_made_by_every_rank():
    """FP8 under one scale keeps it, and sends none."""
    own = scale_shards(RECIPES["current"], (64, 64), 4)
    assert (own.sent_bytes, own.planes, own.own(torch.empty(0), {}, 1)) == (0, {}, [])
