"""The native backend writes the reference's bytes under every numerics: second planes, delayed
scaling, 4-over-6 and stochastic rounding, over any shape, partition and kind of value.
"""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.operations import operand
from tests.support.partitions import draw_partition
from tests.support.same_bytes import assert_same_bytes
from tests.support.schemes import Scheme, run_scheme
from tests.support.values import KINDS, draw_values
from zerocast.backends import native_library
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.errors import BackendError
from zerocast.formats import E4M3, E5M2
from zerocast.layout import BlockGrid, Extent, ScaleLayout
from zerocast.numerics import (
    Float8DelayedNumerics,
    Float8Numerics,
    Masters,
    MXFP8Numerics,
    NVFP4Numerics,
    Rounding,
)

try:
    ISAS = native_library.instruction_sets(native_library.load())
except BackendError as error:
    pytest.skip(str(error), allow_module_level=True)

REFERENCE = ReferenceBackend()
NOMINALS = (torch.float32, torch.bfloat16, torch.float16)
MXFP8, CURRENT, DELAYED, NVFP4 = (
    MXFP8Numerics(),
    Float8Numerics(E4M3),
    Float8DelayedNumerics(E4M3),
    NVFP4Numerics(),
)


# --- the schemes, by name: from a shape to a weight ---


def mxfp8(rows: int, cols: int, numerics: MXFP8Numerics = MXFP8) -> Scheme:
    """Blocks of 1x32 and of 32x1."""
    rowwise = ScaleLayout(BlockGrid(rows, cols, 1, 32), row_multiple=128, col_multiple=4)
    columnwise = ScaleLayout(BlockGrid(rows, cols, 32, 1), row_multiple=4, col_multiple=128)
    return Scheme(numerics, rowwise, columnwise)


def mxfp8_square(rows: int, cols: int) -> Scheme:
    """Blocks of 32x32, whose codes serve both planes."""
    grid = BlockGrid(rows, cols, 32, 32)
    rowwise = ScaleLayout(grid, row_repeat=32, row_multiple=128, col_multiple=4)
    columnwise = ScaleLayout(grid, col_repeat=32, row_multiple=4, col_multiple=128)
    return Scheme(MXFP8Numerics(), rowwise, columnwise, one_copy=True)


def rowwise(rows: int, cols: int, numerics: Float8Numerics = CURRENT) -> Scheme:
    """One scale a row, and one a column."""
    return Scheme(numerics, ScaleLayout(BlockGrid(rows, cols, 1, cols)),
                  ScaleLayout(BlockGrid(rows, cols, rows, 1)))  # fmt: skip


def any_planes(rows: int, cols: int) -> Scheme:
    """Two planes that share no pass: blocks of 3x5 and of 4x7."""
    return Scheme(Float8Numerics(E4M3), ScaleLayout(BlockGrid(rows, cols, 3, 5)),
                  ScaleLayout(BlockGrid(rows, cols, 4, 7)))  # fmt: skip


def blockwise(rows: int, cols: int) -> Scheme:
    """128x128 under powers of two."""
    grid = BlockGrid(rows, cols, 128, 128)
    return Scheme(Float8Numerics(E4M3, power_2_scale=True),
                  ScaleLayout(grid, col_multiple=4, padding=1.0))  # fmt: skip


def blockwise_rows(rows: int, cols: int) -> Scheme:
    """1x128, the scales stored transposed; bounded from below."""
    grid = BlockGrid(rows, cols, 1, 128)
    numerics = Float8Numerics(E5M2, power_2_scale=True, amax_epsilon=1e-3)
    return Scheme(numerics, ScaleLayout(grid, transposed=True, col_multiple=4, padding=1.0))


def transposed_repeats(rows: int, cols: int) -> Scheme:
    """Repeats in both directions, stored transposed and padded."""
    layout = ScaleLayout(BlockGrid(rows, cols, 5, 9), row_repeat=5, col_repeat=9, transposed=True,
                         row_multiple=8, col_multiple=16, padding=3)  # fmt: skip
    return Scheme(MXFP8Numerics(E5M2), layout)


def delayed(rows: int, cols: int, numerics: Float8DelayedNumerics = DELAYED) -> Scheme:
    """One scale a tensor, from earlier casts."""
    return Scheme(numerics, ScaleLayout(BlockGrid(rows, cols, rows, cols)))


def nvfp4(rows: int, cols: int, numerics: NVFP4Numerics = NVFP4, height: int = 16) -> Scheme:
    """Blocks of 16x16, or of 1x16."""
    grid = BlockGrid(rows, cols, height, 16)
    return Scheme(numerics, ScaleLayout(grid, row_repeat=height, row_multiple=128, col_multiple=4))


FOUR_OVER_SIX = [
    NVFP4Numerics(scale_max=scale_max, four_over_six=error)
    for scale_max in (448, 256)
    for error in ("mae", "mse")
]
DRAWN = NVFP4Numerics(stochastic_rounding=True, seed=0x1234_5678_9ABC_DEF0)

SCHEMES = {
    "mxfp8": mxfp8,
    "mxfp8 e5m2": lambda m, k: mxfp8(m, k, MXFP8Numerics(E5M2)),
    "mxfp8 32x32": mxfp8_square,
    "rowwise": rowwise,
    "rowwise e5m2": lambda m, k: rowwise(m, k, Float8Numerics(E5M2, True)),
    "any planes": any_planes,
    "blockwise": blockwise,
    "blockwise 1x128": blockwise_rows,
    "transposed repeats": transposed_repeats,
    "delayed": delayed,
    "delayed, most recent": lambda m, k: delayed(
        m, k, Float8DelayedNumerics(E5M2, 3, "most_recent")
    ),
    "delayed, callable": lambda m, k: delayed(
        m, k, Float8DelayedNumerics(E4M3, -1, lambda history: history.mean())
    ),
    "nvfp4 256": lambda m, k: nvfp4(m, k, NVFP4Numerics(scale_max=256)),
    "nvfp4 1x16": lambda m, k: nvfp4(m, k, height=1),
    **{
        f"4-over-6 {numerics.scale_max} {numerics.four_over_six}": lambda m, k, numerics=numerics: (
            nvfp4(m, k, numerics)
        )
        for numerics in FOUR_OVER_SIX
    },
    "4-over-6 1x16": lambda m, k: nvfp4(m, k, FOUR_OVER_SIX[0], height=1),
    "stochastic": lambda m, k: nvfp4(m, k, DRAWN),
    "stochastic 4-over-6": lambda m, k: nvfp4(
        m, k, replace(FOUR_OVER_SIX[3], stochastic_rounding=True, seed=-1)
    ),
    "stochastic 1x16": lambda m, k: nvfp4(m, k, DRAWN, height=1),
}


def assert_as_reference(
    scheme: Scheme,
    masters: list[torch.Tensor],
    extents: list[Extent],
    threads: tuple[int, ...] = (1,),
    isas: list[str] = ISAS,
) -> None:
    """Everything that is stored, on every instruction set."""
    expected = run_scheme(REFERENCE, scheme, masters, extents)
    for isa in isas:
        for n in threads:
            actual = run_scheme(CpuBackend(isa, n), scheme, masters, extents)
            assert set(actual) == set(expected)
            for name, tensor in expected.items():
                assert_same_bytes(actual[name], tensor, f"{name} on {isa}, {n} threads")


# --- claims ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEMES)
def test_values_of_every_kind(name, kind):
    """Whole weights and cut ones, of normal, tiny, huge, tied, zero and non-finite values."""
    for seed, round_to in enumerate(NOMINALS):
        scheme = replace(SCHEMES[name](51, 160), round_to=round_to)
        masters = [draw_values(kind, 51 * 160, seed), draw_values("normal", 51 * 160, seed + 10)]
        extents = [Extent(0, 51 * 160)] if seed == 0 else draw_partition(8160, 4, random.Random(9))
        assert_as_reference(scheme, masters, extents)


@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=40)
@given(
    rows=st.integers(1, 70),
    blocks=st.integers(1, 12),
    ranks=st.integers(1, 9),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_partition(name, rows, blocks, ranks, kind, seed):
    """Ragged edges, shards of one element, cuts inside rows, blocks and bytes; masters of any
    dtype.
    """
    width = 32 if "mxfp8" in name else 16 if "nvfp4" in name or "4" in name else 11
    cols = width * blocks
    scheme = replace(SCHEMES[name](rows, cols), round_to=NOMINALS[seed % 3])
    extents = draw_partition(rows * cols, ranks, random.Random(seed))
    masters = [draw_values(kind, rows * cols, seed).to(NOMINALS[seed // 3 % 3])]
    assert_as_reference(scheme, masters, extents, isas=[ISAS[seed % len(ISAS)]])


@pytest.mark.parametrize(("threads", "rows", "cols"), [(2, 35, 4128), (4, 1000, 288)])
@pytest.mark.parametrize("name", SCHEMES)
def test_threads_share_a_weight(name, threads, rows, cols):
    """Cuts between threads, with rows and columns longer than a strip: no byte differs."""
    numel = rows * cols
    masters = [draw_values("wide", numel, 3)]
    extents = [Extent(0, 1001), Extent(1001, numel - 3), Extent(numel - 3, numel)]
    assert_as_reference(SCHEMES[name](rows, cols), masters, extents, (threads,), isas=ISAS[:1])


def test_a_second_plane_of_large_weights_agrees_on_every_instruction_set():
    """Rows of several strips of columns, whose last one is ragged."""
    for scheme in (mxfp8(70, 4128), rowwise(70, 4131)):
        numel = scheme.grid.numel
        extents = [Extent(0, numel // 3), Extent(numel // 3, numel)]
        assert_as_reference(scheme, [draw_values("wide", numel, 0)], extents)


def test_delayed_scaling_over_twelve_casts():
    """A history of five that fills, forgets, and sees zeros and what is not finite."""
    kinds = ["normal", "huge", "zeros", "nan", "subnormal", "infinity", "wide", "normal", "ties",
             "underflow", "bits", "normal"]  # fmt: skip
    masters = [draw_values(kind, 300, i).to(NOMINALS[i % 3]) for i, kind in enumerate(kinds)]
    masters[2] *= 0
    for numerics in (Float8DelayedNumerics(E4M3), Float8DelayedNumerics(E5M2, 200),
                Float8DelayedNumerics(E4M3, -100, "most_recent")):  # fmt: skip
        scheme = delayed(10, 30, numerics)
        assert_as_reference(scheme, masters, [Extent(0, 7), Extent(7, 300)])


def test_blocks_too_large_to_choose_for_are_refused():
    """Before any launch, and with the backend that takes them."""
    scheme = Scheme(FOUR_OVER_SIX[0], ScaleLayout(BlockGrid(40, 64, 32, 32)))
    with pytest.raises(BackendError, match=r"at most 16x16, got 32x32; .*use_backend"):
        run_scheme(CpuBackend(), scheme, [torch.zeros(2560)], [Extent(0, 2560)])


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_part_draws_by_its_place_in_the_whole(isa: str, data: st.DataObject) -> None:
    """Any shard of a part, wherever it lies in its whole weight: the reference's codes."""
    rows, cols = data.draw(st.integers(1, 40)), 16 * data.draw(st.integers(1, 20))
    grid = BlockGrid(rows, cols, data.draw(st.sampled_from((1, 16))), 16)
    place = data.draw(st.sampled_from(((48, 0), (48, 96), (2, 38), (2**34 - 640, 0), (0, 2**33))))
    start, end = sorted(data.draw(st.integers(0, grid.numel)) for _ in range(2))
    extent = Extent(start, end)
    masters = Masters(1)
    masters.bind([draw_values("normal", extent.size, rows)])
    amax = draw_values("normal", grid.num_blocks, cols).abs().view(torch.int32)
    results = []
    for backend in (REFERENCE, CpuBackend(isa, 1)):
        codes = torch.full((grid.numel // 2,), 0xA5, dtype=torch.uint8)
        rounding = Rounding(torch.tensor([7, 1]), *place)
        shard = operand(grid, amax, amax.max()[None], codes, extent=extent,
                        round_to=torch.bfloat16, rounding=rounding)  # fmt: skip
        backend.partial_cast(DRAWN, [shard], masters)()
        results.append(codes)
    assert_same_bytes(results[1], results[0], f"codes of {grid} {extent} at {place}")


def test_a_counter_that_carries_between_its_halves():
    """Elements on both sides of number 2^34, where the low half of index / 4 wraps."""
    # A weight of that size is never made: the shard has codes of its own.
    start, size, cols = 2**34 - 3 * 1024, 6 * 1024, 1024
    grid = BlockGrid(2**25, cols, 2**25, cols)
    master = draw_values("normal", size, 0)
    results = []
    for backend in (REFERENCE, *(CpuBackend(isa, 1) for isa in ISAS)):
        amax = torch.tensor([3.0]).view(torch.int32)
        codes = torch.zeros(size // 2, dtype=torch.uint8)
        counter = Rounding(torch.tensor([7, 1]))
        shard = operand(grid, amax, amax, codes, extent=Extent(start, start + size),
                        codes_start=start, rounding=counter)  # fmt: skip
        masters = Masters(1)
        masters.bind([master])
        backend.partial_cast(DRAWN, [shard], masters)()
        results.append(codes)
    for isa, codes in zip(ISAS, results[1:], strict=True):
        assert_same_bytes(codes, results[0], f"codes on {isa}")
