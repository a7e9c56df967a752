"""The reference backend's exchange for 4-over-6: what each rank writes, and that it fits together.

An entry that two ranks filled would be their sum; so each is filled by one, or by none.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.operations import masters_of, operand
from tests.support.partitions import draw_partition
from tests.support.same_bytes import assert_same_bytes
from zerocast.backends.reference import ReferenceBackend
from zerocast.layout import BlockGrid, Extent, SharedBlocks
from zerocast.numerics import FourOverSixErrors, NVFP4Numerics

REFERENCE = ReferenceBackend()


def values(grid: BlockGrid, seed: int) -> torch.Tensor:
    """[numel] FP32, rounded to BF16 by the cast; signs of zero among them."""
    x = torch.randn(grid.numel, generator=torch.Generator().manual_seed(seed))
    x[::37] = -0.0
    return x


def amaxes(grid: BlockGrid, x: torch.Tensor) -> torch.Tensor:
    """int32 [amax_slots], of the rounded values."""
    amax = torch.zeros(grid.amax_slots, dtype=torch.int32)
    masters = masters_of(x)
    shard = operand(grid, amax[: grid.num_blocks], amax[-1:], extent=Extent(0, grid.numel),
                    round_to=torch.bfloat16)  # fmt: skip
    REFERENCE.partial_amax([shard], masters)()
    return amax


def part(
    numerics: NVFP4Numerics, grid: BlockGrid, x: torch.Tensor, extent: Extent, cuts: SharedBlocks
) -> torch.Tensor:
    """int32 [words]: what the owner of ``extent`` writes."""
    buffer = torch.zeros(FourOverSixErrors.words(grid, cuts), dtype=torch.int32)
    amax = amaxes(grid, x)
    masters = masters_of(x[extent.start : extent.end])
    shard = operand(grid, amax[: grid.num_blocks], amax[-1:], extent=extent,
                    round_to=torch.bfloat16,
                    candidates=FourOverSixErrors.carve(buffer, grid, cuts))  # fmt: skip
    REFERENCE.partial_select(numerics, [shard], masters)()
    return buffer


def exchanged(
    numerics: NVFP4Numerics, grid: BlockGrid, x: torch.Tensor, extents: list[Extent]
) -> torch.Tensor:
    """uint8 [num_blocks]: the choices after all ranks' parts are added."""
    cuts = SharedBlocks.of(grid, extents)
    parts = torch.stack([part(numerics, grid, x, extent, cuts) for extent in extents])
    assert (parts != 0).sum(dim=0).max() <= 1, "two ranks filled one entry"
    total = parts.sum(dim=0, dtype=torch.int32)
    amax = amaxes(grid, x)
    candidates = FourOverSixErrors.carve(total, grid, cuts)
    whole = operand(grid, amax[: grid.num_blocks], amax[-1:], candidates=candidates)
    REFERENCE.select(numerics, [whole])()
    return candidates.choices[: grid.num_blocks]


@pytest.mark.parametrize("mode", ["mae", "mse"])
@pytest.mark.parametrize("shape", [(1, 16), (16, 48), (17, 80), (33, 32), (50, 96)])
def test_any_partition_makes_the_same_choices(mode, shape):
    """Of 12 random ones over 1 to 7 ranks; both choices occur."""
    grid, numerics = BlockGrid(*shape, 16, 16), NVFP4Numerics(scale_max=256, four_over_six=mode)
    rng = random.Random(shape[0])
    chosen = set()
    for seed in range(12):
        x = values(grid, seed)
        whole = exchanged(numerics, grid, x, [Extent(0, grid.numel)])
        chosen |= set(whole.tolist())
        extents = draw_partition(grid.numel, rng.randint(1, 7), rng)
        assert_same_bytes(exchanged(numerics, grid, x, extents), whole, f"choices under {extents}")
    assert chosen == {0, 1} or grid.num_blocks < 20


def test_every_rank_has_one_element():
    """[2, 16] over 32 ranks: both rows are segments, and all elements travel."""
    grid, numerics = BlockGrid(2, 16, 16, 16), NVFP4Numerics(four_over_six="mse")
    for seed in range(8):
        x = values(grid, seed)
        extents = [Extent(i, i + 1) for i in range(32)]
        assert SharedBlocks.of(grid, extents).segments == (0, 16)
        whole = exchanged(numerics, grid, x, [Extent(0, 32)])
        assert_same_bytes(exchanged(numerics, grid, x, extents), whole, "choices")


def test_what_a_rank_writes_of_a_cut_row_of_blocks():
    """[2, 32] cut after element 20: rank 0 has the segment at 0 whole and 4 elements of that at 16.

    It writes the row errors of the first, its elements of the second, and no choice.
    """
    grid, numerics = BlockGrid(2, 32, 16, 16), NVFP4Numerics(four_over_six="mae")
    x = values(grid, 3)
    cuts = SharedBlocks.of(grid, [Extent(0, 20), Extent(20, 64)])
    assert cuts == SharedBlocks(rows=(0,), segments=(16,))
    first, second = (
        FourOverSixErrors.carve(part(numerics, grid, x, extent, cuts), grid, cuts)
        for extent in (Extent(0, 20), Extent(20, 64))
    )
    for mine in (first, second):
        assert mine.choices.tolist() == [0] * 4
    assert first.row_errors.nonzero()[:, 1:3].unique(dim=0).tolist() == [[0, 0]]
    assert second.row_errors.nonzero()[:, 1:3].unique(dim=0).tolist() == [[1, 0], [1, 1]]
    rounded = x.bfloat16().float()
    assert_same_bytes(first.elements[0, :4].contiguous(), rounded[16:20], "elements of rank 0")
    assert_same_bytes(second.elements[0, 4:].contiguous(), rounded[20:32], "elements of rank 1")
    assert first.elements[0, 4:].view(torch.int32).eq(0).all()
    assert second.elements[0, :4].view(torch.int32).eq(0).all()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_tensor_that_is_not_finite_chooses_map6(bad):
    """Its scales are NaN whatever is chosen; the choice is the same for every partition."""
    grid, numerics = BlockGrid(17, 32, 16, 16), NVFP4Numerics(four_over_six="mae")
    x = values(grid, 5)
    x[100] = bad
    for extents in ([Extent(0, 544)], [Extent(0, 99), Extent(99, 101), Extent(101, 544)]):
        assert exchanged(numerics, grid, x, extents).tolist() == [0] * 4
