"""The compiled backends write the reference's bytes, under every numerics, over any shape,
partition and kind of value: the CPU library on every instruction set and thread count, and CUDA's
kernels, by the emulation, in every order of threads.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.cuda_emulation.emulator import needs_emulation
from tests.support.claims import assert_same_tensors
from tests.support.compiled import (
    COMPILED,
    EMULATED,
    ON_CPU,
    assert_as_reference,
    on_cpu,
)
from tests.support.operations import (
    Scheme,
    Weight,
    Written,
    masters_of,
    nvfp4,
    operand,
    per_tensor,
    run_operations,
    run_together,
    scheme_of,
)
from tests.support.partitions import draw_partition
from tests.support.recipes import RECIPES, VARIANTS
from tests.support.values import KINDS, draw_values
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.errors import BackendError
from zerocast.layout import BlockGrid, Extent, ScaleLayout, Source
from zerocast.numerics import (
    E2M1,
    E4M3,
    E5M2,
    Backend,
    Float8DelayedNumerics,
    Float8Numerics,
    MXNumerics,
    Numerics,
    NVFP4Numerics,
    Rounding,
    decode,
)

NOMINALS = (torch.float32, torch.bfloat16, torch.float16)
MXFP8 = MXNumerics()
NUMERICS = (NVFP4Numerics(), Float8Numerics(E4M3), Float8Numerics(E5M2))
every_numerics = pytest.mark.parametrize("numerics", NUMERICS, ids=str)
POWERS_OF_TWO = Float8Numerics(E4M3, power_2_scale=True, amax_epsilon=1e-3)
DRAWN = NVFP4Numerics(stochastic_rounding=True, seed=0x1234_5678_9ABC_DEF0)
FOUR_OVER_SIX = [
    NVFP4Numerics(scale_max=scale_max, four_over_six=error)
    for scale_max in (448, 256)
    for error in ("mae", "mse")
]


# --- the schemes, by name: from a shape to a weight ---


def any_planes(rows: int, cols: int) -> Scheme:
    """Two planes that share no pass: blocks of 3x5 and of 4x7."""
    return Scheme(Float8Numerics(E4M3), ScaleLayout(BlockGrid(rows, cols, 3, 5)),
                  ScaleLayout(BlockGrid(rows, cols, 4, 7)))  # fmt: skip


def transposed_repeats(rows: int, cols: int) -> Scheme:
    """Repeats in both directions, stored transposed and padded."""
    layout = ScaleLayout(BlockGrid(rows, cols, 5, 9), row_repeat=5, col_repeat=9, transposed=True,
                         row_multiple=8, col_multiple=16, padding=3)  # fmt: skip
    return Scheme(MXNumerics(E5M2), layout)


SCHEMES = {
    **{
        name: partial(scheme_of, recipe)
        for name, recipe in VARIANTS.items()
        # Others differ in what masters are rounded to, which each test chooses.
        if name not in ("delayed-unrounded", "nvfp4-unrounded")
    },
    "e5m2": partial(per_tensor, numerics=Float8Numerics(E5M2)),
    "powers of two": partial(per_tensor, numerics=POWERS_OF_TWO),
    "any planes": any_planes,
    "transposed repeats": transposed_repeats,
    "nvfp4-256": partial(nvfp4, numerics=NVFP4Numerics(scale_max=256)),
    "nvfp4-1x16-drawn": partial(nvfp4, numerics=DRAWN, height=1),
}
FLUSHED = ("nvfp4", "current", "e5m2", "powers of two")


def columns(name: str, blocks: int) -> int:
    """As many as the scheme of this name takes."""
    return blocks * (32 if "mxfp" in name else 16 if "nvfp4" in name else 11)


def assert_casts_as_reference(scheme, masters, extents, backends=ON_CPU, **options) -> None:
    """Everything that is stored."""
    assert_as_reference(
        lambda backend: run_operations(backend, scheme, masters, extents, **options),
        f"{scheme}, {extents}, {options}", backends,
    )  # fmt: skip


def assert_copies_as_reference(scheme, backends) -> None:
    """What is made of codes that are there, under scales of any amaxes."""
    master, nothing = torch.zeros(scheme.grid.numel), [Extent(0, 0)]
    assert_casts_as_reference(scheme, [master], nothing, backends, amax_kind="normal")


# --- every element and every amax by itself ---


def cast_under_ones(numerics: Numerics, x: torch.Tensor, round_to: torch.dtype) -> None:
    """Encode ``x`` unscaled, or under NVFP4's largest block: whatever the amaxes would have been.

    The codes then depend on the element alone, a NaN and an infinity included, as under a scale
    that comes from earlier data.
    """
    amax = torch.tensor([numerics.fmt.max * (448 if isinstance(numerics, NVFP4Numerics) else 1)])
    block = amax / 448 if isinstance(numerics, NVFP4Numerics) else amax
    grid, extent = BlockGrid(1, x.numel(), 1, x.numel()), Extent(0, x.numel())

    def run(backend: Backend) -> Written:
        codes = torch.zeros(x.numel() * numerics.fmt.bits // 8, dtype=torch.uint8)
        shard = operand(grid, (block * 1.0).view(torch.int32), amax.view(torch.int32), codes,
                        extent=extent, round_to=round_to)  # fmt: skip
        backend.partial_cast(numerics, [shard], masters_of(x))()
        return {"codes": codes}

    assert_as_reference(run, f"{numerics} rounded to {round_to}")


def patterns_and_neighbourhoods() -> Iterator[torch.Tensor]:
    """Each BF16 and each FP16 pattern; and FP32 values at a distance from each BF16 pattern: 0, the
    ties of rounding to BF16 and of rounding to FP16, and one float to either side of these.
    """
    halves = torch.arange(2**16, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16):
        yield halves.to(torch.int16).view(dtype)
    patterns = halves << 16
    for tie in (0, 0x8000, 0x1000, 0xF000):
        for step in (-1, 0, 1):
            bits = (patterns + tie + step) % 2**32
            yield torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("round_to", NOMINALS, ids=str)
@every_numerics
def test_all_patterns_and_their_float_neighbours(numerics, round_to):
    """65,536 patterns of BF16 and of FP16 masters, and in FP32 the floats around BF16's and around
    the ties between them, one by one.
    """
    for x in patterns_and_neighbourhoods():
        cast_under_ones(numerics, x, round_to)


@pytest.mark.parametrize("round_to", NOMINALS, ids=str)
def test_the_amax_of_each_pattern_and_its_float_neighbours(round_to):
    """Every element is a block of its own, so each amax is one rounded magnitude."""
    for x in patterns_and_neighbourhoods():
        layout = ScaleLayout(BlockGrid(1, x.numel(), 1, 1))
        scheme = Scheme(Float8Numerics(E4M3), layout, round_to=round_to)

        def run(backend, scheme=scheme, x=x):
            shard = scheme.operand(scheme.codes(), scheme.whole)
            backend.partial_amax([shard], masters_of(x))()
            return {"amaxes": shard.planes[0].block_amax}

        assert_as_reference(run, f"rounded to {round_to}")


@every_numerics
def test_every_tie_between_codes_and_its_neighbours(numerics):
    """Half-way between two codes, and one FP32 step to either side, of both signs."""
    codes = torch.arange(numerics.fmt.max_code + 1, dtype=torch.uint8)
    values = decode(codes, numerics.fmt).double()
    ties = ((values[1:] + values[:-1]) / 2).float()
    near = torch.cat([(ties.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)])
    x = torch.cat([near, -near, torch.zeros(-2 * len(near) % 64)])
    cast_under_ones(numerics, x, torch.float32)


# --- whole casts ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "flushes"),
    [
        *((name, False) for name in SCHEMES),
        *((name, True) for name in FLUSHED),
    ],
)
def test_values_of_every_kind(name, kind, flushes):
    """Whole weights and cut ones, of normal, tiny, huge, tied, zero, subnormal and non-finite
    values, rounded to each dtype in turn; with and without what torch.set_flush_denormal(True) does
    to the calling thread.
    """
    torch.set_flush_denormal(flushes)
    try:
        for seed in (KINDS.index(kind), KINDS.index(kind) + 1):
            scheme = replace(SCHEMES[name](35, 96), round_to=NOMINALS[seed % 3])
            remembers = isinstance(scheme.numerics, Float8DelayedNumerics)
            kinds = (kind, "normal") if remembers else (kind,)
            masters = [draw_values(each, 35 * 96, seed) for each in kinds]
            extents = [scheme.whole] if seed % 2 else draw_partition(3360, 4, random.Random(9))
            assert_casts_as_reference(scheme, masters, extents)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", FLUSHED)
def test_random_bit_patterns(name):
    """FP32 of all classes side by side: amaxes are not finite, and what is made of them agrees."""
    bits = torch.randint(-(2**31), 2**31, (256 * 64,), generator=torch.Generator().manual_seed(1))
    master = bits.to(torch.int32).view(torch.float32)
    for round_to in NOMINALS:
        scheme = replace(SCHEMES[name](64, 256), round_to=round_to)
        assert_casts_as_reference(scheme, [master], [scheme.whole])
        cast_under_ones(scheme.numerics, master, round_to)


MXFP4 = MXNumerics(E2M1, "even")
EIGHT_BITS = (Float8Numerics(E4M3), Float8Numerics(E5M2, True, 1e-3), MXFP8, MXNumerics(E5M2))


@st.composite
def layouts(draw: st.DrawFn, grid: BlockGrid, numerics: Numerics) -> ScaleLayout:
    """A way to store the scales of ``grid``."""
    return ScaleLayout(
        grid,
        row_repeat=draw(st.sampled_from((1, grid.block_h))),
        col_repeat=draw(st.sampled_from((1, grid.block_w))),
        row_multiple=draw(st.sampled_from((1, 4, 128))),
        col_multiple=draw(st.sampled_from((1, 4))),
        padding=1.0 if numerics.scale_dtype == torch.float32 else 0,
        transposed=draw(st.booleans()),
    )


def repeats_oddly(layout: ScaleLayout | None) -> bool:
    """Whether a stored row repeats scales by a number that no recipe has and CUDA does not take."""
    if layout is None:
        return False
    repeat = layout.row_repeat if layout.transposed else layout.col_repeat
    return repeat != 1 and repeat % 4 != 0


@st.composite
def eight_bits_in_blocks(draw: st.DrawFn) -> Scheme:
    """In blocks of any size, with a transposed copy or without."""
    rows, cols = draw(st.integers(1, 70)), draw(st.integers(1, 700))
    blocks = ((rows, cols), (1, cols), (rows, 1), (1, 32), (32, 1), (32, 32), (128, 128), (16, 16))
    odd = ((5, 7), (20, 3), (1, 1), (16, 100))
    grid = BlockGrid(rows, cols, *draw(st.sampled_from(blocks + odd)))
    numerics = draw(st.sampled_from(EIGHT_BITS))
    if isinstance(numerics, MXNumerics) or draw(st.booleans()):
        return Scheme(numerics, draw(layouts(grid, numerics)))
    multiples = (2, 4) if draw(st.booleans()) and grid.num_blocks > 1 else (1, 1)
    both = [ScaleLayout(g, 1, *multiples, padding=1.0) for g in (grid, grid.transposed())]
    return Scheme(numerics, *both, source=Source.ROWWISE)


@st.composite
def rows_and_columns(draw: st.DrawFn) -> Scheme:
    """In blocks of one row, beside a second plane of blocks of one column or alone."""
    rows, cols = draw(st.integers(1, 75)), draw(st.integers(1, 600))
    numerics = draw(st.sampled_from((*EIGHT_BITS, MXFP4)))
    cols += cols % 2 if numerics is MXFP4 else 0  # whole bytes
    width = draw(st.sampled_from((16, 32, 64, 128, 256, 512, cols, cols + 3)))
    height = draw(st.sampled_from((None, 1, 5, 32, 33, rows, 128)))
    second = height and draw(layouts(BlockGrid(rows, cols, height, 1), numerics))
    return Scheme(numerics, draw(layouts(BlockGrid(rows, cols, 1, width), numerics)), second)


@st.composite
def four_bits(draw: st.DrawFn) -> Scheme:
    """In blocks of 16x16 or of 1x16, of which the last may be narrower, under stored scales of any
    layout.
    """
    height = draw(st.sampled_from((1, 16)))
    cols = 2 * draw(st.integers(1, 200)) if height == 1 else 16 * draw(st.integers(1, 70))
    plain = NVFP4Numerics(), NVFP4Numerics(scale_max=256)
    numerics = draw(st.sampled_from(plain if height == 1 else (*plain, *FOUR_OVER_SIX)))
    if draw(st.booleans()):
        numerics = replace(numerics, stochastic_rounding=True, seed=draw(st.integers(0, 2**64 - 1)))
    grid = BlockGrid(draw(st.integers(1, 75)), cols, height, 16)
    return Scheme(numerics, draw(layouts(grid, numerics)))


@st.composite
def named(draw: st.DrawFn, names: Sequence[str]) -> Scheme:
    """One of these of :data:`SCHEMES`, of any shape."""
    name = draw(st.sampled_from(names))
    return SCHEMES[name](draw(st.integers(1, 70)), columns(name, draw(st.integers(1, 20))))


PLACES = ((0, 0), (2**34 - 64, 0), (2**34 - 640, 0), (48, 0), (48, 96), (16, 2**33), (2, 38))
CPU_ONLY = ("any planes",)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numerics", FOUR_OVER_SIX, ids=str)
@pytest.mark.parametrize("height", [16, 1])
def test_many_whole_blocks_that_choose_between_two_scales(height, numerics, kind):
    """Beside blocks of magnitudes that a scale so small that it is subnormal leaves far above 6,
    ragged blocks, and blocks that ranks share; cast while they choose, or afterwards.
    """
    rows, cols = 72, 600
    scheme = Scheme(numerics, ScaleLayout(BlockGrid(rows, cols, height, 16)))
    cut = 33 * cols + 7
    master = draw_values(kind, rows * cols, 3).reshape(rows, cols)
    fading = master.clone()
    fading[:, ::48] *= 1e-5
    fading[16:32] *= torch.exp2(-torch.arange(cols) // 16)
    for values, extents in (
        (master, [scheme.whole]),
        (fading, [scheme.whole]),
        (fading, [Extent(0, cut), Extent(cut, rows * cols)]),
    ):
        for reads_once in (True, False):
            assert_casts_as_reference(scheme, [values.reshape(-1)], extents, reads_once=reads_once)


@pytest.mark.parametrize("name", [*ON_CPU, pytest.param("cuda", marks=needs_emulation)])
@settings(max_examples=100)
@given(data=st.data(), kind=st.sampled_from(KINDS), seed=st.integers(0, 1000))
def test_any_scheme_shape_and_partition(name, data, kind, seed):
    """Ragged edges; cuts inside rows, blocks and bytes, or any one extent, in the whole weight's
    codes or in its own; masters of any dtype at an odd address; the masters' amaxes or any others;
    scales stored in any layout; a part that draws by its place in the whole. What lies outside of
    the extents keeps its value to the nibble. CUDA's threads run in a drawn order.
    """
    backends = EMULATED if name == "cuda" else {name: ON_CPU[name]}
    name = data.draw(st.sampled_from([*backends]))
    names = [each for each in SCHEMES if name in ON_CPU or each not in CPU_ONLY]
    kinds = named(names), eight_bits_in_blocks(), rows_and_columns(), four_bits()
    scheme = data.draw(st.one_of(*kinds))
    assume(name in ON_CPU or not any(map(repeats_oddly, (scheme.layout, scheme.second))))
    scheme = replace(scheme, round_to=NOMINALS[seed % 3], place=data.draw(st.sampled_from(PLACES)))
    numel, options = scheme.grid.numel, {}
    # Where blocks are chosen, ranks own all of them, and what is chosen is of the amaxes.
    chooses = getattr(scheme.numerics, "four_over_six", None)
    if chooses:
        options["reads_once"] = data.draw(st.booleans())
    if chooses or data.draw(st.booleans()):
        extents = draw_partition(numel, data.draw(st.integers(1, 9)), random.Random(seed))
    else:
        start = data.draw(st.integers(0, numel))
        size = data.draw(st.one_of(st.sampled_from((1, 2)), st.integers(0, numel)))
        extents = [Extent(start, min(start + size, numel))]
        options["own_codes"] = data.draw(st.booleans())
        options["amax_kind"] = data.draw(st.sampled_from((None, *KINDS)))
    odd = data.draw(st.integers(0, 3))
    master = draw_values(kind, numel + odd, seed).to(NOMINALS[seed // 3 % 3])[odd:]
    assert_casts_as_reference(scheme, [master], extents, {name: backends[name]}, **options)


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=25)
@given(data=st.data(), kind=st.sampled_from(KINDS), seed=st.integers(0, 1000))
def test_one_pass_over_whole_blocks_writes_what_two_passes_do(threads, data, kind, seed):
    """On every instruction set and the reference: any blocks that scales belong to alone, cut
    anywhere; of shapes with one part, several, and parts that are divided by columns.
    """
    scheme = data.draw(st.one_of(eight_bits_in_blocks(), rows_and_columns()))
    if data.draw(st.booleans()):  # larger than a part
        blocks = data.draw(st.sampled_from(((32, 32), (1, 32), (128, 128), (16, 64))))
        shape = data.draw(st.integers(120, 160)), 32 * data.draw(st.integers(16, 90))
        grid = BlockGrid(*shape, *blocks)
        second = BlockGrid(grid.rows, grid.cols, 32, 1) if grid.block_h == 1 else None
        layouts = [ScaleLayout(each) if each else None for each in (grid, second)]
        scheme = Scheme(scheme.numerics, *layouts)
    assume(not isinstance(scheme.numerics, Float8DelayedNumerics))
    scheme = replace(scheme, round_to=NOMINALS[seed % 3])
    numel, rng = scheme.grid.numel, random.Random(seed)
    extents = draw_partition(numel, data.draw(st.integers(1, 4)), rng)
    if threads > 1 and scheme.numerics.fmt.bits == 4:
        # Ranks that share a byte write it in memory of their own, not in one launch's threads.
        extents = [Extent(each.start // 2 * 2, each.end // 2 * 2) for each in extents]
    if data.draw(st.booleans()):
        extents = [Extent(0, numel)]
    odd = data.draw(st.integers(0, 3))
    master = draw_values(kind, numel + odd, seed).to(NOMINALS[seed // 3 % 3])[odd:]
    run = partial(run_together, steps=[[master]])
    expected = run(ReferenceBackend(), [Weight(scheme, extents)])
    for name, backend in {"reference": ReferenceBackend(), **on_cpu(threads)}.items():
        written = run(backend, [Weight(scheme, extents)], reads_once=True)
        assert_same_tensors(written, expected, f"on {name}, {scheme}, {extents}")


@st.composite
def in_patches(draw: st.DrawFn) -> Scheme:
    """In the blocks that CUDA's kernel measures and casts in one pass."""
    numerics = draw(st.sampled_from((MXFP8, MXFP4, Float8Numerics(E4M3))))
    side = 32 if isinstance(numerics, MXNumerics) else 128
    height = draw(st.sampled_from((1, side)))
    cols = 2 * draw(st.integers(1, 330)) if draw(st.booleans()) else 4 * draw(st.integers(1, 170))
    cols -= 0 if numerics is MXFP4 else draw(st.integers(0, 1))
    shape = draw(st.one_of(st.integers(1, 70), st.integers(100, 300))), cols
    second = BlockGrid(*shape, 32, 1) if (height, side) == (1, 32) and draw(st.booleans()) else None
    layouts = [grid and ScaleLayout(grid) for grid in (BlockGrid(*shape, height, side), second)]
    return Scheme(numerics, *layouts, round_to=draw(st.sampled_from(NOMINALS)))


@needs_emulation
@settings(max_examples=60)
@given(
    name=st.sampled_from([*EMULATED]),
    scheme=in_patches(),
    ranks=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
def test_one_pass_of_cuda_writes_what_two_passes_do(name, scheme, ranks, kind, seed):
    """The same of CUDA's kernel: shards cut anywhere, masters of any dtype at any address, columns
    that are no multiple of a vector, patches and tiles cut off at both edges.
    """
    numel = scheme.grid.numel
    extents = draw_partition(numel, ranks, random.Random(seed))
    odd = seed % 4
    master = draw_values(kind, numel + odd, seed).to(NOMINALS[seed // 4 % 3])[odd:]
    run = partial(run_together, steps=[[master]])
    expected = run(ReferenceBackend(), [Weight(scheme, extents)])
    written = run(COMPILED[name], [Weight(scheme, extents)], reads_once=True)
    assert_same_tensors(written, expected, f"{scheme}, {extents}")


THREADS = [(2, 35, 4128), (4, 1000, 288), (3, 3, 80_032), (1, 1100, 160)]
# One of every kind of cast in every way, the others in one of them in turn.
SHARED = [
    (name, *threads)
    for i, name in enumerate(SCHEMES)
    for j, threads in enumerate(THREADS)
    if name in RECIPES or i % 4 == j
]


@pytest.mark.parametrize(("name", "threads", "rows", "cols"), SHARED)
def test_threads_share_a_weight(name, threads, rows, cols):
    """Cuts between threads fall inside one row of blocks, or between many, of rows and columns
    longer than a strip: no byte differs.
    """
    numel = rows * cols
    masters = [draw_values("wide", numel, 3)]
    extents = [Extent(0, 1001), Extent(1001, numel - 3), Extent(numel - 3, numel)]
    every = name in ("nvfp4", "current")
    backends = on_cpu(threads) if every else {"the first": CpuBackend(threads=threads)}
    assert_casts_as_reference(SCHEMES[name](rows, cols), masters, extents, backends)


def test_a_second_plane_of_large_weights_agrees_on_every_instruction_set():
    """Rows of several strips of columns, whose last one is ragged."""
    for scheme in (SCHEMES["mxfp8"](70, 4128), SCHEMES["rowwise"](70, 4131)):
        numel = scheme.grid.numel
        extents = [Extent(0, numel // 3), Extent(numel // 3, numel)]
        assert_casts_as_reference(scheme, [draw_values("wide", numel, 0)], extents)


REMEMBERED = {
    "max": Float8DelayedNumerics(E4M3),
    "a margin": Float8DelayedNumerics(E5M2, 200),
    "most recent": Float8DelayedNumerics(E4M3, -100, "most_recent"),
    "callable": Float8DelayedNumerics(E5M2, 3, lambda history: history.mean()),
}


@needs_emulation
@pytest.mark.parametrize(
    ("rule", "length"),
    [*product(["max"], [1, 2, 127, 128, 129, 300]), *product([*REMEMBERED][1:], [2, 129])],
)
def test_delayed_scaling_over_twelve_casts(rule, length):
    """Of four weights together: histories that fill, forget, and see zeros and what is not
    finite, on every backend.
    """
    kinds = ["normal", "huge", "zeros", "nan", "subnormal", "infinity", "wide", "normal", "ties",
             "underflow", "bits", "normal"]  # fmt: skip
    sizes = (1, 5, 600, 9000)
    steps = [
        [draw_values(kind, size, i).to(NOMINALS[i % 3]) for size in sizes]
        for i, kind in enumerate(kinds)
    ]
    steps[2] = [torch.zeros_like(master) for master in steps[2]]

    def run(backend):
        scheme = partial(per_tensor, numerics=REMEMBERED[rule])
        schemes = [replace(scheme(1, n), history=(0.0,) * length) for n in sizes]
        cuts = [[Extent(0, n // 3), Extent(n // 3, n)] for n in sizes]
        return run_together(backend, list(map(Weight, schemes, cuts)), steps)

    assert_as_reference(run, backends=COMPILED)


@needs_emulation
@pytest.mark.parametrize("rows", [127, 128, 129, 255, 256, 257, 300])
@pytest.mark.parametrize("cols", [256, 272, 512])
@pytest.mark.parametrize("make", [nvfp4, SCHEMES["block"]], ids=["nvfp4", "block"])
def test_copies_of_several_squares(make, rows, cols):
    """CUDA's kernel transposes matrices around the edges of its 128-byte squares, also where it
    moves a row 16 bytes at a time.
    """
    assert_copies_as_reference(make(rows, cols), {"cuda": EMULATED["random"]})


@pytest.mark.parametrize(
    ("backend", "scheme", "message"),
    [
        ("baseline", Scheme(FOUR_OVER_SIX[0], ScaleLayout(BlockGrid(40, 64, 32, 32))),
         r"at most 16x16, got 32x32; .*use_backend"),
        ("forward", Scheme(FOUR_OVER_SIX[0], ScaleLayout(BlockGrid(8, 64, 1, 32))),
         "blocks of 16x16 and 1x16, got BlockGrid"),
        ("forward", Scheme(NVFP4Numerics(), ScaleLayout(BlockGrid(4, 5, 16, 16))),
         "4-bit codes, got 5 columns"),
        ("forward", Scheme(Float8Numerics(E4M3), ScaleLayout(BlockGrid(8, 40, 1, 20)),
                           ScaleLayout(BlockGrid(8, 40, 8, 1))),
         "blocks of one column, the other of one"),
    ],
)  # fmt: skip
@needs_emulation
def test_blocks_that_are_not_served_are_refused(backend, scheme, message):
    """When the operation is prepared, and with the backend that takes them."""
    master = torch.zeros(scheme.grid.numel)
    with pytest.raises(BackendError, match=message):
        run_operations(COMPILED[backend], scheme, [master], [scheme.whole])


# --- operands by themselves ---


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_one_table_of_many_weights(threads):
    """Work is split over all weights together: large, tiny and empty ones."""
    rng = random.Random(5)
    schemes = [nvfp4(rng.randint(1, 90), 16 * rng.randint(1, 90)) for _ in range(40)]
    owned = [[Extent(0, rng.randrange(0, scheme.grid.numel + 1))] for scheme in schemes]
    owned[7] = [Extent(0, 0)]
    masters = [draw_values("normal", s.grid.numel, seed) for seed, s in enumerate(schemes)]
    assert_as_reference(
        lambda backend: run_together(backend, list(map(Weight, schemes, owned)), [masters]),
        backends=on_cpu(threads),
    )


@pytest.mark.parametrize("rows", [4224, 4233], ids=["whole lines", "ragged lines"])
@pytest.mark.parametrize("make", [nvfp4, SCHEMES["current"]], ids=["nvfp4", "fp8"])
def test_a_large_transpose_goes_past_the_caches_to_the_same_place(make, rows):
    """More than 2^23 elements are written by other instructions, where rows are whole lines."""
    assert_copies_as_reference(make(rows, 2064), on_cpu(2))


# --- stochastic rounding ---


def test_a_counter_that_carries_between_its_halves():
    """Elements on both sides of number 2^35, where the low half of index / 8 wraps."""
    # A weight of that size is never made: the shard has codes of its own.
    start, size, cols = 2**35 - 3 * 1024, 6 * 1024, 1024
    grid, amax = BlockGrid(2**26, cols, 2**26, cols), torch.tensor([3.0]).view(torch.int32)
    masters = masters_of(draw_values("normal", size, 0))

    def run(backend):
        codes, counter = torch.zeros(size // 2, dtype=torch.uint8), Rounding(torch.tensor([7, 1]))
        shard = operand(grid, amax, amax, codes, extent=Extent(start, start + size),
                        codes_start=start, rounding=counter)  # fmt: skip
        backend.partial_cast(DRAWN, [shard], masters)()
        return {"codes": codes}

    assert_as_reference(run)
