"""The CUDA kernels, run on the CPU by the emulation, against the reference backend."""

import random
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import zerocast
from tests.cast.test_bitwise_guarantee import Case, cast_and_gather, check
from tests.cast.test_tp_shards import cast_parts
from tests.cuda_emulation.emulator import ORDERS, Emulator, needs_emulation
from tests.support.operations import operand, plane
from tests.support.same_bytes import assert_same_bytes
from tests.support.values import KINDS, draw_values
from zerocast.backends.cuda import CudaBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.comm import SingleRank, run_in_process
from zerocast.errors import BackendError
from zerocast.formats import E2M1, E4M3, E5M2, byte_span
from zerocast.layout import BlockGrid, Extent, ScaleLayout, Source
from zerocast.numerics import Backend, Float8Numerics, Masters, Numerics, NVFP4Numerics

pytestmark = needs_emulation

REFERENCE = ReferenceBackend()
# One for each order of threads, kept so that each kernel is loaded once. Few blocks a launch, so
# that every one of them goes on to further tiles.
BACKENDS = {order: CudaBackend(Emulator(order, max_grid=5)) for order in ORDERS}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GUARD = 0xA5


# --- one operation at a time, on any grid ---


@st.composite
def grids(draw: st.DrawFn, nvfp4: bool) -> BlockGrid:
    """NVFP4's own, or an 8-bit scheme's: per tensor, row, column, 1x32, 128x128, and odd ones."""
    if nvfp4:
        return BlockGrid(draw(st.integers(1, 50)), 16 * draw(st.integers(1, 70)), 16, 16)
    rows, cols = draw(st.integers(1, 70)), draw(st.integers(1, 700))
    blocks = ((rows, cols), (1, cols), (rows, 1), (1, 32), (32, 1), (128, 128), (16, 16))
    odd = ((5, 7), (20, 3), (1, 1), (16, 100))
    return BlockGrid(rows, cols, *draw(st.sampled_from(blocks + odd)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Numerics, BlockGrid]:
    """numerics and a grid that it can serve."""
    nvfp4 = draw(st.booleans())
    eight_bits = Float8Numerics(
        draw(st.sampled_from((E4M3, E5M2))), draw(st.booleans()), draw(st.sampled_from((0.0, 1e-3)))
    )
    return NVFP4Numerics() if nvfp4 else eight_bits, draw(grids(nvfp4))


@st.composite
def extents(draw: st.DrawFn, numel: int) -> Extent:
    """Elements that one rank owns: all, one, or any."""
    if draw(st.booleans()) and draw(st.booleans()):
        return Extent(0, numel)
    start = draw(st.integers(0, numel - 1))
    size = draw(st.sampled_from((1, 2, numel // 7, numel - start)))
    return Extent(start, min(start + max(size, 1), numel))


def amax_and_codes(
    backend: Backend, numerics: Numerics, grid: BlockGrid, extent: Extent, master: torch.Tensor,
    round_to: torch.dtype, own_buffer: bool,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What an amax and a cast of one shard write, on top of bytes that must stay."""
    first, last = byte_span(numerics.fmt, extent.start, extent.end)
    size = last - first if own_buffer else -(-grid.numel * numerics.fmt.bits // 8)
    codes = torch.full((size,), GUARD, dtype=torch.uint8)
    amax = torch.zeros(grid.amax_slots, dtype=torch.int32)
    start = first * 8 // numerics.fmt.bits if own_buffer else 0
    shard = operand(grid, amax[: grid.num_blocks], amax[-1:], codes, extent=extent,
                    round_to=round_to, codes_start=start)  # fmt: skip
    masters = Masters(1)
    masters.bind([master])
    backend.partial_amax([shard], masters)()
    backend.partial_cast(numerics, [shard], masters)()
    return {"amax": amax, "codes": codes}


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=100)
@given(data=st.data())
def test_amax_and_cast_equal_the_reference(order: str, data: st.DataObject) -> None:
    """Any shard of any grid, its master of any dtype and alignment: the reference's amaxes and
    codes, and every other nibble as it was.
    """
    numerics, grid = data.draw(cases())
    extent = data.draw(extents(grid.numel))
    odd_words = data.draw(st.integers(0, 3))  # elements between an aligned address and the master
    kind, seed = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 99))
    stored = data.draw(st.sampled_from(DTYPES))
    master = draw_values(kind, extent.size + odd_words, seed).to(stored)[odd_words:]
    arguments = (
        numerics,
        grid,
        extent,
        master,
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.booleans()),
    )
    expected = amax_and_codes(REFERENCE, *arguments)
    for name, actual in amax_and_codes(BACKENDS[order], *arguments).items():
        assert_same_bytes(actual, expected[name], f"{name} of {numerics} {grid} {extent} {kind}")


def layouts(numerics: Numerics, grid: BlockGrid, padded: bool) -> ScaleLayout:
    """A plane as a GEMM wants it, with repeats and padding, or a bare one."""
    if isinstance(numerics, NVFP4Numerics):
        return ScaleLayout(grid, grid.block_h, 128, 4)
    multiples = (2, 4) if padded and grid.num_blocks > 1 else (1, 1)
    return ScaleLayout(grid, 1, *multiples, padding=1.0)


def scales_copies_and_values(
    backend: Backend, numerics: Numerics, grid: BlockGrid, padded: bool, kind: str, seed: int
) -> dict[str, torch.Tensor]:
    """What the operations on whole weights write, where every byte was another."""
    layout = layouts(numerics, grid, padded)
    columnwise = layouts(numerics, grid.transposed(), padded)
    bits = numerics.fmt.bits
    amax = draw_values(kind, grid.num_blocks, seed).abs().view(torch.int32)
    tensor_amax = amax.max().view(1).clone()
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (grid.rows, grid.cols * bits // 8), dtype=torch.uint8, generator=g)

    def unfilled(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        nbytes = torch.empty(shape, dtype=dtype).nbytes
        return torch.full((nbytes,), GUARD, dtype=torch.uint8).view(dtype).view(shape)

    scale_inv = unfilled(*layout.shape, dtype=numerics.scale_dtype)
    stored_amax = unfilled(1, dtype=torch.float32) if bits == 4 else None
    copied = unfilled(grid.cols, -(-grid.rows * bits // 8))
    copied_scales = unfilled(*columnwise.shape, dtype=numerics.scale_dtype)
    if grid.num_blocks == 1 and bits == 8:
        copied_scales = None
    out = unfilled(grid.rows, grid.cols, dtype=torch.float32)
    whole = operand(
        layout, amax, tensor_amax, codes, scale_inv, amax=stored_amax, values=out,
        second=plane(columnwise, None, copied, copied_scales, Source.ROWWISE),
    )  # fmt: skip
    backend.compute_scale(numerics, [whole])()
    backend.transpose(numerics, [whole])()
    backend.dequantize(numerics, [whole])()
    made = {
        "scale_inv": scale_inv, "amax": stored_amax, "columnwise codes": copied,
        "columnwise scales": copied_scales, "values": out,
    }  # fmt: skip
    return {name: tensor for name, tensor in made.items() if tensor is not None}


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=100)
@given(case=cases(), padded=st.booleans(), kind=st.sampled_from(KINDS), seed=st.integers(0, 99))
def test_scales_copies_and_values_equal_the_reference(
    order: str, case: tuple[Numerics, BlockGrid], padded: bool, kind: str, seed: int
) -> None:
    """Scales, padding, columnwise copies and decoded values of any grid are the reference's, from
    any codes.
    """
    numerics, grid = case
    expected = scales_copies_and_values(REFERENCE, numerics, grid, padded, kind, seed)
    actual = scales_copies_and_values(BACKENDS[order], numerics, grid, padded, kind, seed)
    for name in expected:
        assert_same_bytes(actual[name], expected[name], f"{name} of {numerics} {grid} {kind}")


@pytest.mark.parametrize("rows", [127, 128, 129, 255, 256, 257, 300])
@pytest.mark.parametrize("cols", [256, 272, 512])
@pytest.mark.parametrize("numerics", [NVFP4Numerics(), Float8Numerics(E4M3)], ids=["nvfp4", "fp8"])
def test_copies_of_several_squares(numerics: Numerics, rows: int, cols: int) -> None:
    """Matrices around the edges of the 128-byte squares are transposed as the reference does, also
    where a row is moved 16 bytes at a time.
    """
    block = 16 if numerics.fmt is E2M1 else 128
    grid = BlockGrid(rows, cols, block, block)
    expected = scales_copies_and_values(REFERENCE, numerics, grid, True, "normal", rows)
    actual = scales_copies_and_values(BACKENDS["random"], numerics, grid, True, "normal", rows)
    for name in expected:
        assert_same_bytes(actual[name], expected[name], f"{name} of {grid}")


# --- plans: the tables, tiles, grids and arguments of a step ---


def all_ranks(case: Case, world_size: int) -> dict[int, list[torch.Tensor]]:
    """The weights that every rank holds after a plan's cast and all-gather."""
    weights = run_in_process(world_size, lambda comm: cast_and_gather(comm, case))
    return dict(enumerate(weights))


@pytest.mark.parametrize("block", range(4))
def test_random_partitions(block: int) -> None:
    """40 drawn cases of up to 3 weights on 1 to 9 ranks give the unsharded bytes."""
    for seed in range(1000 * block, 1000 * block + 10):
        world_size = 1 + seed % 9
        case = Case(seed, world_size)
        with zerocast.use_backend(BACKENDS[ORDERS[seed % 3]]):
            check(case, all_ranks(case, world_size))


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_parts_of_weights(dim: int) -> None:
    """Every recipe, cut over three ranks in drawn places: the slices of the unsharded bytes."""

    def on_rank(comm: Any) -> None:
        cast_parts(comm, SingleRank(), dim)

    with zerocast.use_backend(BACKENDS["random"]):
        run_in_process(3, on_rank)


def many_weights(seed: int, world_size: int, count: int = 160) -> Case:
    """Weights of three recipes, cut so that most ranks own nothing of most of them."""
    case = Case(seed, world_size)
    rng = random.Random(seed)
    recipes = (
        zerocast.NVFP4BlockScaling(),
        zerocast.Float8CurrentScaling(),
        zerocast.Float8CurrentScaling(fp8_format="e5m2"),
    )
    case.recipes = [recipes[i % 3] for i in range(count)]
    case.shapes = [
        torch.Size((rng.choice((1, 5, 17, 33)), 16 * rng.randint(1, 4))) for _ in range(count)
    ]
    case.dtypes = [rng.choice(DTYPES) for _ in range(count)]
    case.columnwise = [True] * count
    case.masters = [
        draw_values(rng.choice(KINDS[:6]), shape.numel(), seed + i)
        for i, shape in enumerate(case.shapes)
    ]
    # As a ZeRO optimizer cuts: all weights end to end, one range a rank.
    total = sum(m.numel() for m in case.masters)
    cuts = [total * rank // world_size for rank in range(world_size + 1)]
    offset, case.partitions = 0, []
    for master in case.masters:
        weight = Extent(offset, offset + master.numel())
        owned = [weight.intersect(Extent(a, b)) for a, b in pairwise(cuts)]
        case.partitions.append([e.shifted(-offset) if e else Extent(0, 0) for e in owned])
        offset += master.numel()
    case.own_buffers = False
    return case


@pytest.mark.parametrize(("world_size", "order"), [(1, "reverse"), (5, "random")])
def test_a_plan_of_many_weights(world_size: int, order: str) -> None:
    """160 weights of three recipes, empty shards among them: the unsharded bytes on every rank."""
    case = many_weights(7, world_size)
    assert world_size == 1 or any(not e for partition in case.partitions for e in partition)
    with zerocast.use_backend(BACKENDS[order]):
        check(case, all_ranks(case, world_size))


@pytest.mark.parametrize("weights", [1, 3, 160])
def test_launches_do_not_follow_the_weights(weights: int) -> None:
    """A cast is one memset and three launches a recipe kind, post-processing one, for 1 weight and
    for 160.
    """
    case = many_weights(3, 1)
    emulator = Emulator()
    with zerocast.use_backend(CudaBackend(emulator)):
        models = [
            zerocast.empty(shape, recipe, dtype=dtype)
            for shape, recipe, dtype in zip(case.shapes, case.recipes, case.dtypes, strict=True)
        ][:weights]
        kinds = len(set(case.recipes[:weights]))
        plan = zerocast.CastPlan(models, case.masters[:weights], [0] * weights)
        before = emulator.launches
        plan.cast()
        assert emulator.launches - before == 3 * kinds
        before = emulator.launches
        plan.post_all_gather_processing()
        assert emulator.launches - before == kinds


def test_masters_bound_anew_are_read() -> None:
    """A plan reads the masters that cast() was given last, of another dtype, and sends their
    addresses once.
    """
    recipe = zerocast.NVFP4BlockScaling()
    emulator = Emulator()
    sent = []
    refresh = emulator.refresh
    emulator.refresh = lambda *tables: (sent.append(1), refresh(*tables))
    first, second = (draw_values("normal", 48 * 32, seed) for seed in (1, 2))
    second = second.half()
    with zerocast.use_backend(CudaBackend(emulator)):
        weight = zerocast.empty((48, 32), recipe)
        plan = zerocast.CastPlan([weight], [first], [0])
        plan.cast()
        assert not sent
        plan.cast([second])
        plan.cast()
        assert len(sent) == 1
    with zerocast.use_backend("reference"):
        expected = zerocast.quantize(second.view(48, 32), recipe, dtype=torch.bfloat16)
    assert_same_bytes(weight.rowwise_data, expected.rowwise_data, "codes of the second masters")


def test_a_step_keeps_its_tables() -> None:
    """Casting again uploads nothing: tables are made with the plan."""
    emulator = Emulator()
    uploads = []
    upload = emulator.upload
    emulator.upload = lambda table: (uploads.append(1), upload(table))[1]
    with zerocast.use_backend(CudaBackend(emulator)):
        weight = zerocast.empty((48, 32), zerocast.NVFP4BlockScaling())
        plan = zerocast.CastPlan([weight], [torch.ones(48 * 32)], [0])
        made = len(uploads)
        plan.cast()
        plan.all_gather()
        plan.cast()
    assert len(uploads) == made


# --- what it refuses ---


def test_nibbles_in_half_bytes_are_refused() -> None:
    """Rows of an odd number of 4-bit codes are refused when the operation is prepared."""
    grid = BlockGrid(4, 5, 16, 16)
    with pytest.raises(BackendError, match="whole bytes, got 5 columns"):
        amax_and_codes(
            BACKENDS["forward"],
            NVFP4Numerics(),
            grid,
            Extent(0, 20),
            torch.ones(20),
            torch.float32,
            False,
        )


def test_a_tensor_elsewhere_is_refused() -> None:
    """A tensor that the launcher's device cannot read is refused by what it is."""
    layout = ScaleLayout(BlockGrid(4, 4, 4, 4))
    amax = torch.zeros(1, dtype=torch.int32, device="meta")
    target = operand(layout, amax, amax, scale_inv=torch.zeros(1, 1))
    with pytest.raises(BackendError, match="contiguous tensors on cpu, got \\(1,\\) on meta"):
        BACKENDS["forward"].compute_scale(Float8Numerics(E4M3), [target])
