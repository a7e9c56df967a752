"""Every backend keeps the contract of the operations where an index goes wrong.

That the reference's bytes are right is the claim of tests/oracles.
"""

import random
from dataclasses import replace

import pytest
import torch

from tests.cuda_emulation.emulator import needs_emulation
from tests.support.compiled import EMULATED, ON_CPU
from tests.support.operations import (
    Scheme,
    Weight,
    Written,
    masters_of,
    nvfp4,
    operand,
    plane,
    run_together,
)
from tests.support.partitions import draw_partition
from tests.support.same_bytes import assert_same_bytes
from tests.support.values import draw_values
from zerocast.backends.reference import ReferenceBackend
from zerocast.layout import BlockGrid, Extent, ScaleLayout, SharedBlocks, Source
from zerocast.numerics import (
    E4M3,
    E5M2,
    Backend,
    Float8Numerics,
    FourOverSixErrors,
    Masters,
    MXNumerics,
    Numerics,
    NVFP4Numerics,
    TensorOperand,
)

EVERY = {"reference": ReferenceBackend(), **ON_CPU}
EMULATION = pytest.param(EMULATED["random"], marks=needs_emulation, id="cuda")


@pytest.fixture(params=[*(pytest.param(b, id=name) for name, b in EVERY.items()), EMULATION])
def backend(request: pytest.FixtureRequest) -> Backend:
    """The reference, the CPU library on each instruction set, and CUDA's kernels by the
    emulation.
    """
    return request.param


def run_cast(
    backend: Backend,
    shard: TensorOperand,
    master: torch.Tensor,
    numerics: Numerics,
) -> None:
    """Amax, then codes, of one shard."""
    masters = masters_of(master)
    backend.partial_amax([shard], masters)()
    backend.partial_cast(numerics, [shard], masters)()


@pytest.mark.parametrize(
    "numerics", [NVFP4Numerics(), Float8Numerics(E4M3), Float8Numerics(E5M2)], ids=str
)
@pytest.mark.parametrize("size", [0, 1, 2, 1000])
def test_a_shard_at_two_to_the_32_plus_5(backend, numerics, size):
    """Its codes are those of the same elements at offset 5, in a buffer of the shard's own.

    The matrix has 2^16 columns and blocks of [2^16, 16]: the elements start at column 5 of row
    2^16, the second row of blocks, and nothing of the weight's size is ever allocated.
    """
    start, cols = 2**32 + 5, 2**16
    large, small = BlockGrid(2**17, cols, 2**16, 16), BlockGrid(1, cols, 1, 16)
    bits = numerics.fmt.bits
    master = torch.randn(size, generator=torch.Generator().manual_seed(0))
    results = []
    for grid, first in ((large, start), (small, 5)):
        amax = torch.zeros(grid.amax_slots, dtype=torch.int32)
        aligned = first - first % (8 // bits)
        codes = torch.full((2 + size,), 0xA5, dtype=torch.uint8)
        shard = operand(grid, amax[:-1], amax[-1:], codes, extent=Extent(first, first + size),
                        codes_start=aligned)  # fmt: skip
        run_cast(backend, shard, master, numerics)
        touched = amax[:-1].nonzero().flatten()
        results.append((codes, touched - (grid is large) * 2**12, amax[:-1][touched], amax[-1:]))
    for what, got, expected in zip(("codes", "blocks", "amaxes", "amax"), *results, strict=True):
        assert_same_bytes(got, expected, what)
    blocks = {(5 + i) // 16 for i in range(size)}
    assert results[0][1].tolist() == sorted(blocks)


def test_a_shard_writes_its_nibbles_and_no_other(backend):
    """Every range within 6 elements, in a weight filled with code 5; ours are -0, code 8."""
    grid = BlockGrid(1, 6, 1, 6)
    for start in range(7):
        for end in range(start, 7):
            codes = torch.full((3,), 0x55, dtype=torch.uint8)
            amax = torch.zeros(1, dtype=torch.int32)
            shard = operand(grid, amax, amax, codes, extent=Extent(start, end))
            run_cast(backend, shard, torch.full((end - start,), -0.0), NVFP4Numerics())
            written = [b >> s & 15 for b in codes.tolist() for s in (0, 4)]
            assert written == [8 if start <= i < end else 5 for i in range(6)], (start, end)


def test_the_amax_takes_maxima_and_keeps_what_earlier_shards_left(backend):
    """A launch raises: an amax of 3 stays under 2, gives way to 4, and infinity to NaN."""
    grid = BlockGrid(1, 4, 1, 2)
    amax = torch.tensor([3.0, 0.0, 3.0]).view(torch.int32)
    masters = Masters(1)
    seen = []
    for pair in ([2.0, -1.0], [-4.0, 0.0], [1.0, -torch.inf], [-torch.nan, 1.0], [5.0, 5.0]):
        shard = operand(grid, amax[:2], amax[2:], extent=Extent(1, 3))
        masters.bind([torch.tensor(pair)])
        backend.partial_amax([shard], masters)()
        seen.append(amax.tolist())
    two, three, four, five, one = (
        torch.tensor(v).view(torch.int32).item() for v in (2.0, 3.0, 4.0, 5.0, 1.0)
    )
    infinity, nan = 0x7F800000, 0x7FC00000
    assert one < two
    assert seen == [
        [three, one, three],
        [four, one, four],
        [four, infinity, infinity],
        [nan, infinity, nan],
        [nan, infinity, nan],
    ]
    assert five < infinity


def test_nothing_to_do_is_a_launch_that_does_nothing(backend):
    """No weights, and shards without elements whose slots are bound to None."""
    grid = BlockGrid(2, 16, 16, 16)
    amax, codes = torch.zeros(1, dtype=torch.int32), torch.full((16,), 7, dtype=torch.uint8)
    masters = masters_of(None)
    for shards in ([], [operand(grid, amax, amax, codes, extent=Extent(9, 9))]):
        backend.partial_amax(shards, masters)()
        backend.partial_cast(NVFP4Numerics(), shards, masters)()
    for prepare in (backend.transpose, backend.compute_scale, backend.dequantize):
        prepare(NVFP4Numerics(), [])()
    assert amax.tolist() == [0]
    assert codes.tolist() == [7] * 16


# --- what ranks exchange under 4-over-6 ---


def exchanged(backend: Backend, error: str, shape: tuple[int, int], x: torch.Tensor,
              extents: list[Extent]) -> Written:  # fmt: skip
    """What each rank writes, and what all choose; no two ranks fill one entry."""
    weight = Weight(nvfp4(*shape, NVFP4Numerics(scale_max=256, four_over_six=error)), extents)
    run_together(backend, [weight], [[x]])
    assert weight.most_writers <= 1, "two ranks filled one entry"
    return weight.errors


def values(numel: int, seed: int) -> torch.Tensor:
    """[numel] FP32, signs of zero among them."""
    x = draw_values("normal", numel, seed)
    x[::37] = -0.0
    return x


@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("shape", [(1, 16), (16, 48), (17, 80), (33, 32), (50, 96)])
def test_any_partition_makes_the_same_choices(backend, error, shape):
    """Of 12 random ones over 1 to 7 ranks, and of one in which every rank has one element; both
    choices occur.
    """
    numel, rng, chosen = shape[0] * shape[1], random.Random(shape[0]), set()
    partitions = [draw_partition(numel, rng.randint(1, 7), rng) for _ in range(12)]
    if numel == 16:
        partitions.append([Extent(i, i + 1) for i in range(16)])
    for seed, extents in enumerate(partitions):
        x = values(numel, seed)
        whole, cut = (
            exchanged(backend, error, shape, x, given)["choices in all"]
            for given in ([Extent(0, numel)], extents)
        )
        chosen |= set(whole.tolist())
        assert_same_bytes(cut, whole, f"choices under {extents}")
    assert chosen == {0, 1} or shape in ((1, 16), (16, 48), (17, 80), (33, 32))


def test_what_a_rank_writes_of_a_cut_row_of_blocks(backend):
    """[2, 32] cut after element 20: rank 0 has the segment at 0 whole and 4 elements of that at 16.

    It writes the row errors of the first, its elements of the second, and no choice.
    """
    x = values(64, 3)
    errors = exchanged(backend, "mae", (2, 32), x, [Extent(0, 20), Extent(20, 64)])
    first, second = (errors[f"row errors of rank {rank}"].nonzero()[:, 1:3] for rank in (0, 1))
    assert first.unique(dim=0).tolist() == [[0, 0]]
    assert second.unique(dim=0).tolist() == [[1, 0], [1, 1]]
    expected = torch.zeros(2, 1, 16)
    expected[0, 0, :4], expected[1, 0, 4:] = x[16:20].bfloat16(), x[20:32].bfloat16()
    for rank in (0, 1):
        assert errors[f"choices of rank {rank}"].tolist() == [0] * 4
        assert_same_bytes(errors[f"elements of rank {rank}"], expected[rank], f"rank {rank}")


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_tensor_that_is_not_finite_chooses_map6(backend, bad):
    """Its scales are NaN whatever is chosen; the choice is the same for every partition."""
    x = values(544, 5)
    x[100] = bad
    for extents in ([Extent(0, 544)], [Extent(0, 99), Extent(99, 101), Extent(101, 544)]):
        errors = exchanged(backend, "mae", (17, 32), x, extents)
        assert errors["choices in all"].tolist() == [0] * 4


# --- a rank that keeps the amaxes around its shard alone ---


def mxfp8(rows: int, cols: int) -> Scheme:
    """Blocks of one row, and of one column."""
    both = BlockGrid(rows, cols, 1, 32), BlockGrid(rows, cols, 32, 1)
    return Scheme(MXNumerics(E4M3), *map(ScaleLayout, both))


def candidates_of(scheme: Scheme, extent: Extent, blocks: range | None) -> FourOverSixErrors | None:
    """What the rank with ``extent`` chooses by; of these blocks alone."""
    if not isinstance(scheme.numerics, NVFP4Numerics) or scheme.numerics.four_over_six is None:
        return None
    others = Extent(0, extent.start), Extent(extent.end, scheme.grid.numel)
    grid, cuts = scheme.grid, SharedBlocks.of(scheme.grid, [extent, *others])
    buffer = torch.zeros(FourOverSixErrors.words(grid, cuts), dtype=torch.int32)
    whole = FourOverSixErrors.carve(buffer, grid, cuts)
    return whole if blocks is None else whole.of_blocks(grid, blocks)


KEPT = [
    (nvfp4(70, 80, NVFP4Numerics()), Extent(17 * 80 + 5, 33 * 80 + 1)),
    (nvfp4(70, 80, NVFP4Numerics(four_over_six="mae")), Extent(17 * 80 + 5, 33 * 80 + 1)),
    (mxfp8(70, 96), Extent(40 * 96 + 3, 40 * 96 + 7)),
    (mxfp8(70, 96), Extent(31 * 96, 64 * 96)),
]


@pytest.mark.parametrize(("scheme", "extent"), KEPT)
def test_kept_amaxes_are_enough(backend, scheme, extent):
    """A shard measures and casts in the middle of a weight with no memory but for the blocks around
    it, and gives what it gives with memory for all; what lies before and behind stays as it is.
    """
    x = values(extent.size, 1)
    masters, results = masters_of(x), []
    for keeps in (False, True):
        buffers, planes = [], []
        grids = [scheme.grid]
        if scheme.second is not None and scheme.source is Source.MASTER:
            grids.append(scheme.second.grid)
        codes = [scheme.codes() for _ in grids]
        for grid, of_plane in zip(grids, codes, strict=True):
            blocks = grid.touched(extent) if keeps else range(grid.num_blocks)
            guarded = torch.full((len(blocks) + 512,), -1, dtype=torch.int32)
            amaxes = guarded[256:-256].zero_()
            buffers.append((guarded, amaxes, blocks, grid.touched(extent)))
            planes.append(replace(plane(grid, amaxes, of_plane), first_block=blocks.start))
        tensor_amax = torch.zeros(1, dtype=torch.int32)
        shard = TensorOperand(
            tuple(planes), extent=extent, round_to=torch.bfloat16, tensor_amax=tensor_amax,
            candidates=candidates_of(scheme, extent, buffers[0][2] if keeps else None),
        )  # fmt: skip
        backend.partial_amax([shard], masters)()
        if shard.candidates is not None:
            backend.partial_select(scheme.numerics, [shard], masters)()
            backend.select(scheme.numerics, [shard])()
        backend.partial_cast(scheme.numerics, [shard], masters)()
        kept = []
        for guarded, amaxes, blocks, touched in buffers:
            assert guarded[:256].eq(-1).all()
            assert guarded[-256:].eq(-1).all()
            kept.append(amaxes[touched.start - blocks.start :][: len(touched)])
        results.append([tensor_amax, *kept, *codes])
    for i, (got, expected) in enumerate(zip(*results, strict=True)):
        assert_same_bytes(got, expected, f"result {i}")


@pytest.mark.parametrize(
    ("numerics", "layout"),
    [
        (MXNumerics(E4M3), ScaleLayout(BlockGrid(70, 160, 32, 32), 32, 128, 4)),
        (MXNumerics(E4M3), ScaleLayout(BlockGrid(70, 160, 32, 32), 1, 4, 128, col_repeat=32)),
        (Float8Numerics(E4M3), ScaleLayout(BlockGrid(300, 300, 128, 128), 1, 1, 4, 1.0)),
        (Float8Numerics(E4M3), ScaleLayout(BlockGrid(5, 700, 1, 128), 1, 1, 4, transposed=True)),
        (NVFP4Numerics(), ScaleLayout(BlockGrid(33, 80, 16, 16), 16, 128, 4)),
    ],
    ids=str,
)
def test_scales_that_travelled_expand_to_those_that_are_made_in_place(backend, numerics, layout):
    """One a block from a plane of one row, then stored, with repeats and padding, as the plane and
    as that of the transposed matrix.
    """
    grid = layout.grid
    amax = values(grid.num_blocks, 0).abs().view(torch.int32)
    tensor_amax, made = amax.max()[None].clone(), []
    compact = torch.zeros(grid.num_blocks, dtype=numerics.scale_dtype)
    for scales in (layout, ScaleLayout(BlockGrid(1, grid.num_blocks, 1, 1))):
        stored = torch.full(scales.shape, 7, dtype=numerics.scale_dtype)
        made.append(compact if scales is not layout else stored)
        backend.compute_scale(numerics, [operand(scales, amax, tensor_amax, None, made[-1])])()
    by_columns = compact.view(grid.blocks_h, grid.blocks_w).t().contiguous().view(-1)
    expanded = torch.full(layout.shape, 9, dtype=numerics.scale_dtype)
    mirrored = torch.full(layout.shape, 9, dtype=numerics.scale_dtype)
    first = replace(plane(layout, scale_inv=expanded), compact=compact)
    second = replace(plane(layout.of_transposed(), scale_inv=mirrored), compact=by_columns)
    backend.expand_scales(numerics, [TensorOperand((first, second))])()
    assert_same_bytes(expanded, made[0], "the plane")
    assert_same_bytes(mirrored, made[0], "the plane by the blocks of the transposed matrix")
