"""The native backend writes the reference's bytes, on every instruction set and thread count."""

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.operations import Case, nvfp4, operand, per_tensor, plane, run_operations
from tests.support.same_bytes import assert_same_bytes
from tests.support.values import KINDS, draw_values
from zerocast.backends import native_library
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.errors import BackendError
from zerocast.formats import E4M3, E5M2, decode, packed_columns
from zerocast.layout import BlockGrid, Extent, Source
from zerocast.numerics import Float8Numerics, Masters, Numerics, NVFP4Numerics

try:
    ISAS = native_library.instruction_sets(native_library.load())
except BackendError as error:
    pytest.skip(str(error), allow_module_level=True)

REFERENCE = ReferenceBackend()
NOMINALS = (torch.float32, torch.bfloat16, torch.float16)
LAWS = (
    NVFP4Numerics(),
    Float8Numerics(E4M3),
    Float8Numerics(E5M2),
    Float8Numerics(E4M3, True, 1e-3),
)
THREADS = (1, 2, 3)


def assert_as_reference(case: Case, master: torch.Tensor, threads: tuple[int, ...] = (1,)) -> None:
    """Every operation, on every instruction set."""
    expected = run_operations(REFERENCE, case, master)
    for isa in ISAS:
        for n in threads:
            actual = run_operations(CpuBackend(isa, n), case, master)
            for name, tensor in expected.items():
                assert_same_bytes(actual[name], tensor, f"{name} on {isa}, {n} threads, {case}")


def as_matrix(numerics: Numerics, master: torch.Tensor, round_to: torch.dtype) -> Case:
    """All of ``master``, a multiple of 256 elements, as rows of 256."""
    rows = master.numel() // 256
    whole = (
        nvfp4(rows, 256) if isinstance(numerics, NVFP4Numerics) else per_tensor(numerics, rows, 256)
    )
    return Case(numerics, whole.grid, whole.extent, round_to)


@pytest.fixture(params=[False, True], ids=["subnormals kept", "subnormals flushed"])
def flushing(request: pytest.FixtureRequest) -> Iterator[None]:
    """With and without what torch.set_flush_denormal(True) does to the calling thread."""
    torch.set_flush_denormal(request.param)
    yield
    torch.set_flush_denormal(False)


def cast_under_ones(numerics: Numerics, x: torch.Tensor, round_to: torch.dtype) -> None:
    """Encode ``x`` unscaled, or under NVFP4's largest block: whatever the amaxes would have been.

    The codes then depend on the element alone, a NaN and an infinity included, as under a scale
    that comes from earlier data.
    """
    amax = torch.tensor([numerics.fmt.max * (448 if isinstance(numerics, NVFP4Numerics) else 1)])
    grid, extent = BlockGrid(1, x.numel(), 1, x.numel()), Extent(0, x.numel())
    masters, codes = Masters(1), []
    masters.bind([x])
    for backend in (REFERENCE, *(CpuBackend(isa, 1) for isa in ISAS)):
        codes.append(torch.zeros(x.numel() * numerics.fmt.bits // 8, dtype=torch.uint8))
        block = amax / 448 if isinstance(numerics, NVFP4Numerics) else amax
        shard = operand(grid, (block * 1.0).view(torch.int32), amax.view(torch.int32), codes[-1],
                        extent=extent, round_to=round_to)  # fmt: skip
        backend.partial_cast(numerics, [shard], masters)()
    for isa, got in zip(ISAS, codes[1:], strict=True):
        assert_same_bytes(got, codes[0], f"codes of {numerics} rounded to {round_to} on {isa}")


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
@pytest.mark.parametrize("numerics", LAWS[:3], ids=str)
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
        grid, amaxes = BlockGrid(1, x.numel(), 1, 1), []
        for backend in (REFERENCE, *(CpuBackend(isa, 1) for isa in ISAS)):
            case = Case(Float8Numerics(E4M3), grid, Extent(0, x.numel()), round_to)
            shard, masters = case.operand(case.codes()), Masters(1)
            masters.bind([x])
            backend.partial_amax([shard], masters)()
            amaxes.append(shard.planes[0].block_amax)
        for isa, got in zip(ISAS, amaxes[1:], strict=True):
            assert_same_bytes(got, amaxes[0], f"amaxes rounded to {round_to} on {isa}")


@pytest.mark.parametrize("numerics", LAWS[:3], ids=str)
def test_every_tie_between_codes_and_its_neighbours(numerics):
    """Half-way between two codes, and one FP32 step to either side, of both signs."""
    codes = torch.arange(numerics.fmt.max_code + 1, dtype=torch.uint8)
    values = decode(codes, numerics.fmt).double()
    ties = ((values[1:] + values[:-1]) / 2).float()
    near = torch.cat([(ties.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)])
    x = torch.cat([near, -near, torch.zeros(-2 * len(near) % 64)])
    cast_under_ones(numerics, x, torch.float32)


@pytest.mark.usefixtures("flushing")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numerics", LAWS, ids=str)
def test_values_of_every_kind(numerics, kind):
    """Whole weights of normal, tiny, huge, tied, zero, subnormal and non-finite values."""
    for seed, round_to in enumerate(NOMINALS):
        master = draw_values(kind, 256 * 33, seed)
        assert_as_reference(as_matrix(numerics, master, round_to), master)


@pytest.mark.parametrize("numerics", LAWS, ids=str)
def test_random_bit_patterns(numerics):
    """FP32 of all classes side by side: amaxes are not finite, and what is made of them agrees."""
    bits = torch.randint(-(2**31), 2**31, (256 * 64,), generator=torch.Generator().manual_seed(1))
    master = bits.to(torch.int32).view(torch.float32)
    for round_to in NOMINALS:
        assert_as_reference(as_matrix(numerics, master, round_to), master)
        cast_under_ones(numerics, master, round_to)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """numerics over a grid, and any part of it, in the whole weight's codes or in its own."""
    numerics = draw(st.sampled_from(LAWS))
    rows = draw(st.integers(1, 70))
    if isinstance(numerics, NVFP4Numerics):
        cols = 16 * draw(st.integers(1, 20))
        grid = BlockGrid(rows, cols, 16, 16)
    else:
        cols = draw(st.integers(1, 300))
        block_h, block_w = draw(st.sampled_from([(rows, cols), (1, 32), (1, cols), (7, 16), (3, 5),
                                                 (128, 128)]))  # fmt: skip
        grid = BlockGrid(rows, cols, block_h, block_w)
    numel = grid.numel
    start, end = sorted((draw(st.integers(0, numel)), draw(st.integers(0, numel))))
    round_to, own = draw(st.sampled_from(NOMINALS)), draw(st.booleans())
    return Case(numerics, grid, Extent(start, end), round_to, own)


@given(case=cases(), kind=st.sampled_from(KINDS), seed=st.integers(0, 1000))
def test_any_extent(case, kind, seed):
    """Any start and end, odd ones too, of a master of any dtype whose address is odd in its
    elements; what lies outside keeps its value to the nibble.
    """
    master = draw_values(kind, case.extent.size + 1, seed).to(NOMINALS[seed % 3])
    assert_as_reference(case, master[1:])


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("numerics", LAWS[:2], ids=str)
@pytest.mark.parametrize("shape", [(3, 80_016), (1100, 176), (260, 1040)], ids=str)
def test_threads_share_a_weight(numerics, shape, threads):
    """Cuts between threads fall inside one row of blocks, or between many: no byte differs."""
    rows, cols = shape
    whole = (
        nvfp4(rows, cols)
        if isinstance(numerics, NVFP4Numerics)
        else per_tensor(numerics, rows, cols)
    )
    extent = Extent(1, whole.grid.numel - 2)
    master = draw_values("wide", extent.size, 3)
    assert_as_reference(Case(numerics, whole.grid, extent, torch.bfloat16), master, (threads,))


@pytest.mark.parametrize("threads", THREADS)
def test_one_table_of_many_weights(threads):
    """Work is split over all weights together: large, tiny and empty ones, masters in any slot."""
    rng = random.Random(5)
    grids = [BlockGrid(rng.randint(1, 90), 16 * rng.randint(1, 90), 16, 16) for _ in range(40)]
    ends = [rng.randrange(0, grid.numel + 1) for grid in grids]
    values = [draw_values("normal", end, seed) for seed, end in enumerate(ends)]
    slots = rng.sample(range(40), 40)
    results = []
    for backend in (REFERENCE, *(CpuBackend(isa, threads) for isa in ISAS)):
        shards, bound = [], [None] * 40
        for slot, grid, end, x in zip(slots, grids, ends, values, strict=True):
            case = Case(NVFP4Numerics(), grid, Extent(0, end), torch.bfloat16)
            shards.append(case.operand(case.codes(), slot=slot))
            bound[slot] = x if end else None
        masters = Masters(40)
        masters.bind(bound)
        backend.partial_amax(shards, masters)()
        backend.partial_cast(NVFP4Numerics(), shards, masters)()
        results.append(shards)
    for isa, shards in zip(ISAS, results[1:], strict=True):
        for i, pair in enumerate(zip(shards, results[0], strict=True)):
            shard, expected = (each.planes[0] for each in pair)
            assert_same_bytes(shard.block_amax, expected.block_amax, f"amaxes of weight {i}, {isa}")
            assert_same_bytes(shard.codes, expected.codes, f"codes of weight {i} on {isa}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("numerics", LAWS[:3], ids=str)
def test_a_shard_at_two_to_the_32_plus_5(numerics, isa):
    """1,000 elements there have the codes and amaxes of the same elements at offset 5.

    Rows have 2^16 elements, so the shard starts at column 5 of row 2^16. Neither the codes nor the
    masters of the weight are ever allocated; the block amaxes are zero pages but for one.
    """
    start, cols, size = 2**32 + 5, 2**16, 1000
    master = draw_values("normal", size, 0)
    results = []
    for grid, first in ((BlockGrid(2**17, cols, 16, 16), start), (BlockGrid(16, cols, 16, 16), 5)):
        case = Case(numerics, grid, Extent(first, first + size), torch.bfloat16, own_codes=True)
        shard, masters = case.operand(case.codes()), Masters(1)
        masters.bind([master])
        backend = CpuBackend(isa, 1)
        backend.partial_amax([shard], masters)()
        backend.partial_cast(numerics, [shard], masters)()
        block = grid.block_of(first)
        made = shard.planes[0]
        results.append((made.codes, made.block_amax[block : block + 64], shard.tensor_amax))
    for what, got, expected in zip(("codes", "block amaxes", "amax"), *results, strict=True):
        assert_same_bytes(got, expected, what)
    assert int(results[0][2]) > 0


@pytest.mark.parametrize("rows", [4224, 4233], ids=["whole lines", "ragged lines"])
@pytest.mark.parametrize("numerics", LAWS[:2], ids=str)
def test_a_large_transpose_goes_past_the_caches_to_the_same_place(numerics, rows):
    """More than 2^23 elements are written by other instructions, where rows are whole lines."""
    cols = 2064
    whole = (
        nvfp4(rows, cols)
        if isinstance(numerics, NVFP4Numerics)
        else per_tensor(numerics, rows, cols)
    )
    columns, columnwise = packed_columns(numerics.fmt, cols), whole.columnwise_scale_layout
    codes = torch.randint(256, (rows, columns), dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(0))  # fmt: skip
    scale_inv = torch.ones(whole.scale_layout.shape).to(numerics.scale_dtype)
    written = []
    for backend in (REFERENCE, *(CpuBackend(isa, 2) for isa in ISAS)):
        shape = cols, packed_columns(numerics.fmt, rows)
        written.append(torch.empty(shape, dtype=torch.uint8))
        scales = torch.empty(columnwise.shape, dtype=numerics.scale_dtype)
        second = plane(columnwise, None, written[-1], scales, Source.ROWWISE)
        both = operand(whole.scale_layout, codes=codes, scale_inv=scale_inv, second=second)
        backend.transpose(numerics, [both])()
    for isa, got in zip(ISAS, written[1:], strict=True):
        assert_same_bytes(got, written[0], f"columnwise codes on {isa}")
