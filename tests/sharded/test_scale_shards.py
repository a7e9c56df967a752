"""Which rank makes and sends which scales of a weight that FSDP2 shards, without ranks."""

import pytest
import torch

from tests.support.recipes import RECIPES, each
from zerocast.layout import CutBlocks, Extent, Owners, Plane
from zerocast.sharded.all_gather_input import AllGatherInput
from zerocast.sharded.state import fresh_state

CPU = torch.device("cpu")
GARBAGE = 0xA5


def shards(recipe, shape, world_size, rank=0) -> AllGatherInput:
    """Those of a weight with both planes, or that can have them."""
    return AllGatherInput(
        torch.Size(shape), torch.float32, recipe, fresh_state(recipe), world_size, rank, CPU,
        columnwise=True, tp_shard=None,
    )  # fmt: skip


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
        parts = chunks(shape, world_size)
        ranks = [shards(recipe, shape, world_size, rank) for rank in range(world_size)]
        for extent, own in zip(parts, ranks, strict=True):
            if own.storage.by_owner:
                own.flat[-1].fill_(GARBAGE)
            for i, matrix in enumerate(own.storage.matrices):
                for name, scales in matrix.own_scales.items():
                    grid = planes(matrix)[name].grid
                    start = i * grid.numel
                    held = extent.intersect(Extent(start, start + grid.numel)).shifted(-start)
                    mine = grid.owned(held) if held.size > 0 else range(0)
                    if name not in own.storage.by_owner:
                        mine = range(grid.num_blocks)
                    assert list(scales.blocks) == list(mine), (shape, name)
                    scales.entries.copy_(numbers(i, mine))
        sent = zip(*(each.flat for each in ranks), strict=True)
        whole = own.whole_scales(list(map(torch.cat, sent)))
        for i, matrix in enumerate(own.storage.matrices):
            assert matrix.own_scales.keys() == planes(matrix).keys()
            for name, plane in planes(matrix).items():
                expected = numbers(i, range(plane.grid.num_blocks)).to(whole[i][name].dtype)
                assert torch.equal(whole[i][name], expected), (shape, name)
                assert whole[i][name].is_contiguous(), (shape, name)  # as backends read it


def planes(storage) -> dict[str, Plane]:
    """Those that are cast, by name."""
    return {plane.name: plane for plane in storage.cast_planes}


def numbers(matrix: int, blocks: range) -> torch.Tensor:
    """One for each block, that a byte holds."""
    return (torch.arange(blocks.start, blocks.stop) + 7 * matrix) % 251


@each("rowwise", "block", "mxfp8", "nvfp4")
def test_amaxes_that_are_reduced_are_those_of_cut_blocks(recipe):
    """Of planes whose scales are sent, and all of the others; and the others have blocks that are
    higher than a rank's rows.
    """
    for rows, world_size in [(640, 3), (640, 5), (130, 4), (96, 7), (256, 2)]:
        own = shards(recipe, (rows, 64), world_size)
        extents = [[[e.start, e.end]] for e in chunks((rows, 64), world_size)]
        owners, expected = Owners.of_extents(torch.tensor(extents)), 0
        for name, plane in planes(own.storage).items():
            count = plane.grid.num_blocks
            if name in own.storage.by_owner:
                count = CutBlocks([(0, plane.grid)], owners).count
            else:
                assert plane.grid.block_h > -(-rows // world_size)
            expected += count
        assert own.reduced_amaxes == expected, (rows, world_size)


def test_one_scale_a_tensor_is_made_by_every_rank():
    """FP8 under one scale keeps it, and sends none."""
    own = shards(RECIPES["current"], (64, 64), 4, rank=1)
    assert (own.storage.own_scales, len(own.flat)) == ({}, len(own.sent))
