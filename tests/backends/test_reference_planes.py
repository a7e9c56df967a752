"""The reference backend's second planes, stored planes, and what remembering numerics leave
behind.
"""

import pytest
import torch

from tests.support.operations import masters_of, operand
from tests.support.same_bytes import assert_same_bytes
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.backends.reference.philox import element_draws
from zerocast.backends.reference.planes import read_plane, write_plane
from zerocast.backends.reference.rounding import encode_stochastic
from zerocast.layout import BlockGrid, Extent, ScaleLayout
from zerocast.numerics import (
    E2M1,
    E4M3,
    DelayedState,
    Float8DelayedNumerics,
    NVFP4Numerics,
    Rounding,
)

REFERENCE = ReferenceBackend()


# --- stored planes ---

LAYOUTS = [
    ScaleLayout(BlockGrid(5, 7, 2, 3)),
    ScaleLayout(BlockGrid(5, 7, 2, 3), row_repeat=2, row_multiple=8, col_multiple=4, padding=9),
    ScaleLayout(BlockGrid(5, 7, 2, 3), col_repeat=3, row_multiple=4, col_multiple=16, padding=9),
    ScaleLayout(BlockGrid(5, 7, 2, 3), row_repeat=2, col_repeat=3),
    ScaleLayout(BlockGrid(5, 7, 1, 3), transposed=True, col_multiple=4, padding=1),
    ScaleLayout(BlockGrid(5, 7, 2, 3), row_repeat=2, transposed=True, row_multiple=4, padding=9),
    ScaleLayout(BlockGrid(5, 7, 5, 1)),
    ScaleLayout(BlockGrid(1, 1, 1, 1), transposed=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_plane_holds_what_its_layout_says(layout):
    """Entry by entry: (r, c) is the scale of block (r // row_repeat, c // col_repeat), the rest is
    padding, all of it the other way round where the plane is transposed; and it reads back.
    """
    grid = layout.grid
    by_block = torch.arange(grid.num_blocks).add(20).byte()
    plane = torch.full(layout.shape, 0xA5, dtype=torch.uint8)
    write_plane(by_block, layout, plane)
    expected = torch.full(layout.shape, int(layout.padding), dtype=torch.uint8)
    rows = grid.rows if layout.row_repeat > 1 else grid.blocks_h
    cols = grid.cols if layout.col_repeat > 1 else grid.blocks_w
    for r in range(rows):
        for c in range(cols):
            block = r // layout.row_repeat * grid.blocks_w + c // layout.col_repeat
            expected[(c, r) if layout.transposed else (r, c)] = by_block[block]
    assert_same_bytes(plane, expected, "plane")
    again = read_plane(plane, layout)
    assert_same_bytes(again.contiguous(), by_block.view(grid.blocks_h, grid.blocks_w), "blocks")


def test_a_vector_is_a_plane_of_one_row_or_column():
    """Row-wise FP8 stores [M] and [K]."""
    for grid in (BlockGrid(3, 4, 1, 4), BlockGrid(4, 3, 4, 1)):
        plane = torch.zeros(3)
        write_plane(torch.tensor([1.0, 2.0, 3.0]), ScaleLayout(grid), plane)
        assert plane.tolist() == [1, 2, 3]


# --- the second plane ---


# --- numerics that remember ---


def test_a_delayed_cast_takes_the_amax_in_the_same_pass():
    """It raises, as partial_amax does, and multiplies by the state's scale whatever the amax is."""
    grid, numerics = BlockGrid(1, 4, 1, 4), Float8DelayedNumerics(E4M3)
    state = DelayedState(torch.tensor([2.0]), torch.zeros(1), torch.zeros(3))
    amax = torch.tensor([3.0]).view(torch.int32)
    codes = torch.zeros(4, dtype=torch.uint8)
    shard = operand(grid, amax, amax, codes, extent=Extent(1, 3), delayed=state)
    REFERENCE.partial_cast(numerics, [shard], masters_of(torch.tensor([-0.5, 1.0])))()
    assert codes.tolist() == [0, 0xB8, 0x40, 0]
    assert amax.view(torch.float32).tolist() == [3.0]
    REFERENCE.partial_cast(numerics, [shard], masters_of(torch.tensor([-7.0, torch.nan])))()
    assert amax.tolist() == [0x7FC00000]
    assert codes.tolist() == [0, 0xD6, 0x7F, 0]
    assert (state.scale.item(), state.cast_scale.item()) == (2.0, 0.0)


def test_closing_a_cast_whose_state_waits():
    """scale_inv of what was cast; nothing is remembered, and no function of the caller's called."""
    numerics = Float8DelayedNumerics(E4M3, amax_compute_algo=lambda _: pytest.fail("called"))
    state = DelayedState(torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([8.0, 1.0]))
    for backend in (REFERENCE, CpuBackend()):
        amax, scale_inv = torch.tensor([4.0]).view(torch.int32), torch.zeros(1)
        grid = BlockGrid(2, 2, 2, 2)
        whole = operand(grid, amax, amax, scale_inv=scale_inv, delayed=state, advances=False)
        backend.compute_scale(numerics, [whole])()
        assert scale_inv.item() == 0.5
        assert (state.scale.item(), state.cast_scale.item()) == (2.0, 3.0)
        assert state.amax_history.tolist() == [8.0, 1.0]


def test_draws_follow_the_index_in_the_whole_weight():
    """A shard at 2^34 + 5 draws what its elements draw anywhere; scales advance the step by one."""
    start, numerics = 2**34 + 5, NVFP4Numerics(stochastic_rounding=True, seed=2**63 + 9)
    grid = BlockGrid(2**15, 2**20, 2**15, 2**20)
    x = torch.rand(40, generator=torch.Generator().manual_seed(2)) * 6
    amax = torch.tensor([6.0]).view(torch.int32)
    codes, counter = torch.zeros(21, dtype=torch.uint8), torch.tensor([77, 11])
    scale_inv = torch.zeros(1, 1, dtype=torch.uint8)
    shard = operand(grid, amax, amax, codes, scale_inv, extent=Extent(start, start + 40),
                    codes_start=start - 1, rounding=Rounding(counter))  # fmt: skip
    REFERENCE.compute_scale(numerics, [shard])()
    assert counter.tolist() == [77, 12]
    REFERENCE.partial_cast(numerics, [shard], masters_of(x))()
    # g = 6: S_enc = 448, S_dec = 448 and the multiplier 1.
    assert scale_inv.item() == 0x7E
    draws = element_draws(torch.arange(start, start + 40), numerics.seed, 77, 12)
    drawn = encode_stochastic(x, E2M1, draws)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=1).flatten()
    assert_same_bytes(nibbles[1:41], drawn, "codes")
    assert nibbles[[0, 41]].tolist() == [0, 0]
