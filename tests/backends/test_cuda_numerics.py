"""The CUDA kernels of every numerics, run on the CPU by the emulation, against the reference
backend.
"""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import zerocast
from tests.backends.test_cuda_emulated import BACKENDS, DTYPES, GUARD, REFERENCE, extents
from tests.cuda_emulation.emulator import ORDERS, Emulator, needs_emulation
from tests.support.operations import operand, plane
from tests.support.same_bytes import assert_same_bytes
from tests.support.values import KINDS, draw_values
from zerocast.backends.cuda import CudaBackend, prepared
from zerocast.backends.cuda.device import WORDS
from zerocast.errors import BackendError
from zerocast.formats import E2M1, E4M3, E5M2, byte_span
from zerocast.layout import BlockGrid, Extent, ScaleLayout, SharedBlocks
from zerocast.numerics import (
    Backend,
    DelayedState,
    Float8DelayedNumerics,
    Float8Numerics,
    FourOverSixErrors,
    Masters,
    MXFP8Numerics,
    Numerics,
    NVFP4Numerics,
    Rounding,
)
from zerocast.recipes import Recipe

pytestmark = needs_emulation


def unfilled(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor of which every byte is wrong."""
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    return torch.full((nbytes,), GUARD, dtype=torch.uint8).view(dtype).view(shape)


def assert_equal(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str
) -> None:
    """Every tensor has the same bytes."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert_same_bytes(tensor, expected[name], f"{name} of {what}")


# --- blocks of one row, and a second plane beside them ---

EIGHT_BITS: tuple[Numerics, ...] = (
    Float8Numerics(E4M3),
    Float8Numerics(E5M2, power_2_scale=True, amax_epsilon=1e-3),
    MXFP8Numerics(E4M3),
    MXFP8Numerics(E5M2),
)
FOUR_BITS: tuple[Numerics, ...] = (
    NVFP4Numerics(),
    NVFP4Numerics(scale_max=256),
    NVFP4Numerics(stochastic_rounding=True, seed=2**63 + 99),
)


@st.composite
def planes(draw: st.DrawFn) -> tuple[Numerics, BlockGrid, BlockGrid | None]:
    """numerics, the blocks of its rowwise plane, and where it has one of the second."""
    rows = draw(st.integers(1, 75))
    if draw(st.booleans()) and draw(st.booleans()):
        numerics = draw(st.sampled_from(FOUR_BITS))
        return numerics, BlockGrid(rows, 2 * draw(st.integers(1, 200)), 1, 16), None
    numerics, cols = draw(st.sampled_from(EIGHT_BITS)), draw(st.integers(1, 600))
    width = draw(st.sampled_from((16, 32, 64, 128, 256, 512, cols, cols + 3)))
    height = draw(st.sampled_from((None, 1, 5, 32, 33, rows, 128)))
    second = None if height is None else BlockGrid(rows, cols, height, 1)
    return numerics, BlockGrid(rows, cols, 1, width), second


PLACES = ((0, 0), (2**34 - 64, 0), (48, 96), (16, 2**33), (2, 38))
"""Of a part of a weight in the whole, for random words: the origin, and what rows skip."""


def both_planes(
    backend: Backend, numerics: Numerics, grid: BlockGrid, second: BlockGrid | None, extent: Extent,
    master: torch.Tensor, round_to: torch.dtype, own_buffer: bool, place: tuple[int, int],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What an amax and a cast of one shard write, on top of bytes that must stay."""
    first, last = byte_span(numerics.fmt, extent.start, extent.end)
    size = last - first if own_buffer else -(-grid.numel * numerics.fmt.bits // 8)
    written = {
        "block_amax": torch.zeros(grid.num_blocks, dtype=torch.int32),
        "tensor_amax": torch.zeros(1, dtype=torch.int32),
        "codes": unfilled((size,)),
    }
    columnwise = None
    if second is not None:
        written["columnwise_amax"] = torch.zeros(second.num_blocks, dtype=torch.int32)
        written["columnwise_codes"] = unfilled((size,))
        columnwise = plane(second, written["columnwise_amax"], written["columnwise_codes"])
    shard = operand(
        grid, written["block_amax"], written["tensor_amax"], written["codes"], extent=extent,
        round_to=round_to, codes_start=first * 8 // numerics.fmt.bits if own_buffer else 0,
        second=columnwise,
        rounding=Rounding(torch.tensor([0xDEADBEEF, 2**32 + 7]), *place),
    )  # fmt: skip
    masters = Masters(1)
    masters.bind([master])
    backend.partial_amax([shard], masters)()
    backend.partial_cast(numerics, [shard], masters)()
    return written


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=120)
@given(data=st.data())
def test_planes_of_one_dimension_equal_the_reference(order: str, data: st.DataObject) -> None:
    """Any shard under blocks of one row, a second plane of blocks of one column beside them or not:
    the reference's amaxes and codes of both, and every other nibble as it was.
    """
    numerics, grid, second = data.draw(planes())
    extent = data.draw(extents(grid.numel))
    odd_words = data.draw(st.integers(0, 3))  # elements between an aligned address and the master
    kind, seed = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 99))
    stored = data.draw(st.sampled_from(DTYPES))
    master = draw_values(kind, extent.size + odd_words, seed).to(stored)[odd_words:]
    arguments = (
        numerics, grid, second, extent, master, data.draw(st.sampled_from(DTYPES)),
        data.draw(st.booleans()), data.draw(st.sampled_from(PLACES)),
    )  # fmt: skip
    expected = both_planes(REFERENCE, *arguments)
    actual = both_planes(BACKENDS[order], *arguments)
    assert_equal(actual, expected, f"{numerics} {grid} {second} {extent} {kind}")


@pytest.mark.parametrize(
    "numerics", [MXFP8Numerics(), NVFP4Numerics(stochastic_rounding=True, seed=3)], ids=str
)
@settings(max_examples=30)
@given(data=st.data())
def test_square_blocks_equal_the_reference(numerics: Numerics, data: st.DataObject) -> None:
    """Blocks of 32x32 under E8M0 scales, and drawn codes of 16x16 blocks: the reference's codes."""
    side = 32 if isinstance(numerics, MXFP8Numerics) else 16
    grid = BlockGrid(
        data.draw(st.integers(1, 70)), side * data.draw(st.integers(1, 40)), side, side
    )
    extent = data.draw(extents(grid.numel))
    master = draw_values(data.draw(st.sampled_from(KINDS)), extent.size, 4)
    master = master.to(data.draw(st.sampled_from(DTYPES)))
    arguments = (
        numerics, grid, None, extent, master, data.draw(st.sampled_from(DTYPES)), True,
        data.draw(st.sampled_from(PLACES)),
    )  # fmt: skip
    expected = both_planes(REFERENCE, *arguments)
    assert_equal(
        both_planes(BACKENDS["random"], *arguments), expected, f"{numerics} {grid} {extent}"
    )


# --- stored planes of any layout ---


@st.composite
def layouts(draw: st.DrawFn, grid: BlockGrid, padding: float) -> ScaleLayout:
    """A way to store the scales of ``grid``."""
    return ScaleLayout(
        grid,
        draw(st.sampled_from((1, grid.block_h))),
        draw(st.sampled_from((1, 4, 128))),
        draw(st.sampled_from((1, 4))),
        padding,
        draw(st.sampled_from((1, grid.block_w))),
        draw(st.booleans()),
    )


LAYOUT_NUMERICS = (*EIGHT_BITS, *FOUR_BITS, NVFP4Numerics(scale_max=256, four_over_six="mae"))


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=100)
@given(data=st.data())
def test_stored_scales_of_any_layout(order: str, data: st.DataObject) -> None:
    """Planes with repeats and padding in both dimensions, stored transposed or not, alone or beside
    a second plane, are the reference's, and so are the values that codes under them mean.
    """
    numerics = data.draw(st.sampled_from(LAYOUT_NUMERICS))
    padding = 1.0 if numerics.scale_dtype == torch.float32 else 0
    rows, cols = data.draw(st.integers(1, 50)), 2 * data.draw(st.integers(1, 150))
    blocks = ((1, 16), (16, 1), (16, 16), (1, 32), (32, 32), (1, 128), (rows, cols), (1, cols))
    grid = BlockGrid(rows, cols, *data.draw(st.sampled_from(blocks)))
    layout = data.draw(layouts(grid, padding))
    other = BlockGrid(rows, cols, 32, 1)
    second = data.draw(st.sampled_from((None, data.draw(layouts(other, padding)))))
    if numerics.fmt is E2M1:
        second = None
    kind, seed = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 99))

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        amax = draw_values(kind, grid.num_blocks, seed).abs().view(torch.int32)
        written = {"scale_inv": unfilled(layout.shape, numerics.scale_dtype)}
        stored = unfilled((1,), torch.float32) if numerics.fmt is E2M1 else None
        columnwise = candidates = None
        if second is not None:
            written["columnwise"] = unfilled(second.shape, numerics.scale_dtype)
            more = draw_values(kind, other.num_blocks, seed + 1).abs().view(torch.int32)
            columnwise = plane(second, more, None, written["columnwise"])
        if isinstance(numerics, NVFP4Numerics) and numerics.four_over_six is not None:
            buffer = torch.zeros(FourOverSixErrors.words(grid, SharedBlocks()), dtype=torch.int32)
            candidates = FourOverSixErrors.carve(buffer, grid, SharedBlocks())
            candidates.choices[::3] = 1
        counter = torch.tensor([5, 41])
        g = torch.Generator().manual_seed(seed)
        shape = (rows, cols * numerics.fmt.bits // 8)
        codes = torch.randint(256, shape, dtype=torch.uint8, generator=g)
        written["values"] = unfilled((rows, cols), torch.float32)
        whole = operand(
            layout, amax, amax.max().view(1).clone(), codes, written["scale_inv"], amax=stored,
            second=columnwise, candidates=candidates, rounding=Rounding(counter),
            values=written["values"],
        )  # fmt: skip
        backend.compute_scale(numerics, [whole])()
        backend.dequantize(numerics, [whole])()
        if stored is not None:
            written["amax"] = stored
        return written | {"counter": counter}

    assert_equal(run(BACKENDS[order]), run(REFERENCE), f"{numerics} {layout} {second} {kind}")


# --- what delayed scaling remembers ---

ALGORITHMS = ("max", "most_recent", lambda history: history.mean())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["max", "most_recent", "callable"])
def test_delayed_scaling_equals_the_reference(order: str, length: int, algorithm: object) -> None:
    """Casts in a row, zero and not finite amaxes among them: codes, amaxes, scales, histories and
    scale_inv are the reference's after each.
    """
    kinds = ("normal", "zeros", "wide", "nan", "huge", "subnormal", "infinity", "normal", "ties")
    numerics_types = [
        Float8DelayedNumerics(fmt, margin, algorithm) for fmt, margin in ((E4M3, 0), (E5M2, 3))
    ]
    sizes = (1, 5, 600, 9000)

    def run(backend: Backend) -> list[dict[str, torch.Tensor]]:
        steps = []
        for numerics in numerics_types:
            states = [
                DelayedState(torch.ones(1), torch.ones(1), torch.zeros(length)) for _ in sizes
            ]
            codes = [unfilled((size,)) for size in sizes]
            scale_inv = [torch.zeros(1) for _ in sizes]
            amax = torch.zeros(len(sizes), dtype=torch.int32)
            masters = Masters(len(sizes))
            shards = []
            for i, size in enumerate(sizes):
                grid = BlockGrid(1, size, 1, size)
                own = Extent(size // 3, size)
                shards.append(
                    operand(grid, amax[i : i + 1], amax[i : i + 1], codes[i], scale_inv[i],
                            slot=i, extent=own, round_to=torch.bfloat16, delayed=states[i])
                )  # fmt: skip
            cast = backend.partial_cast(numerics, shards, masters)
            close = backend.compute_scale(numerics, shards)
            for step, kind in enumerate(kinds):
                dtype = DTYPES[step % 3]
                values = [draw_values(kind, s.extent.size, step).to(dtype) for s in shards]
                masters.bind(values)
                amax.zero_()
                cast()
                close()
                held = {"amax": amax.clone()}
                for i, state in enumerate(states):
                    held |= {
                        f"codes {i}": codes[i].clone(), f"scale_inv {i}": scale_inv[i].clone(),
                        f"scale {i}": state.scale.clone(), f"cast {i}": state.cast_scale.clone(),
                        f"history {i}": state.amax_history.clone(),
                    }  # fmt: skip
                steps.append(held)
        return steps

    for step, (actual, expected) in enumerate(
        zip(run(BACKENDS[order]), run(REFERENCE), strict=True)
    ):
        assert_equal(actual, expected, f"step {step}")


# --- 4-over-6 where ranks share blocks ---


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=40)
@given(data=st.data())
def test_choices_equal_the_reference(order: str, data: st.DataObject) -> None:
    """Each rank's part of the choice, and what select makes of all parts, are the reference's; a
    NaN's sign apart.
    """
    numerics = NVFP4Numerics(
        scale_max=data.draw(st.sampled_from((448, 256))),
        four_over_six=data.draw(st.sampled_from(("mae", "mse"))),
    )
    grid = BlockGrid(data.draw(st.integers(1, 50)), 16 * data.draw(st.integers(1, 40)), 16, 16)
    kind = data.draw(st.sampled_from(KINDS))
    round_to = data.draw(st.sampled_from(DTYPES))
    cuts_at = data.draw(st.lists(st.integers(0, grid.numel), max_size=3))
    master = draw_values(kind, grid.numel, data.draw(st.integers(0, 99)))
    master = master.to(data.draw(st.sampled_from(DTYPES)))
    owned = [Extent(a, b) for a, b in pairwise([0, *sorted(cuts_at), grid.numel]) if b > a]
    cuts = SharedBlocks.of(grid, owned)
    amax = torch.zeros(grid.amax_slots, dtype=torch.int32)
    blocks, tensor = amax[: grid.num_blocks], amax[-1:]
    whole = Masters(1)
    whole.bind([master])
    REFERENCE.partial_amax(
        [operand(grid, blocks, tensor, extent=Extent(0, grid.numel), round_to=round_to)], whole
    )()

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        masters = Masters(len(owned))
        masters.bind([master[e.start : e.end] for e in owned])
        buffers = [
            torch.zeros(FourOverSixErrors.words(grid, cuts), dtype=torch.int32) for _ in owned
        ]
        parts = [FourOverSixErrors.carve(buffer, grid, cuts) for buffer in buffers]
        shards = [
            operand(grid, blocks, tensor, slot=i, extent=extent, round_to=round_to, candidates=part)
            for i, (extent, part) in enumerate(zip(owned, parts, strict=True))
        ]  # fmt: skip
        backend.partial_select(numerics, shards, masters)()
        total = FourOverSixErrors.carve(torch.stack(buffers).sum(0, dtype=torch.int32), grid, cuts)
        backend.select(numerics, [operand(grid, blocks, tensor, candidates=total)])()
        written = {f"part {i}": part.elements for i, part in enumerate(parts)}
        written |= {f"errors {i}": part.row_errors.nan_to_num(-1) for i, part in enumerate(parts)}
        return written | {"choices": total.choices, "errors": total.row_errors.nan_to_num(-1)}

    what = f"{numerics} {grid} {cuts} {kind}"
    assert_equal(run(BACKENDS[order]), run(REFERENCE), what)


# --- layers ---


@pytest.mark.parametrize(
    "recipe",
    [
        zerocast.NVFP4BlockScaling(),
        zerocast.NVFP4BlockScaling(nvfp4_4over6="weights"),
        zerocast.MXFP8BlockScaling(fp8_format="hybrid"),
        zerocast.Float8BlockScaling(),
        zerocast.Float8CurrentScaling(),
        zerocast.Float8RowwiseScaling(),
        zerocast.DelayedScaling(amax_history_len=4),
    ],
    ids=str,
)
def test_a_layer_equals_the_reference(recipe: Recipe) -> None:
    """A linear layer's outputs and gradients over two steps of autocast, activations and gradients
    quantized, are the reference's.
    """

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        made = {}
        with zerocast.use_backend(backend):
            layer = zerocast.nn.Linear(64, 96)
            for step in range(2):
                x = torch.randn(32, 64, requires_grad=True)
                with zerocast.autocast(enabled=True, recipe=recipe):
                    y = layer(x)
                y.square().sum().backward()
                made |= {f"output {step}": y.detach(), f"gradient {step}": x.grad}
            made["weight's gradient"] = layer.weight.grad
        return made

    assert_equal(run(BACKENDS["random"]), run(REFERENCE), str(recipe))


# --- launches ---

FP32_SCALES = zerocast.QParams(power_2_scale=False)
DRAWN = zerocast.QParams(fp4_2d_quantization=True, stochastic_rounding=True)


@pytest.mark.parametrize("weights", [1, 40])
@pytest.mark.parametrize(
    ("recipe", "cast", "post"),
    [
        (zerocast.Float8CurrentScaling(), 3, 1),
        (zerocast.DelayedScaling(amax_history_len=5), 2, 1),
        (zerocast.Float8BlockScaling(), 3, 1),
        (zerocast.Float8RowwiseScaling(), 3, 0),
        (zerocast.MXFP8BlockScaling(), 3, 0),
        (zerocast.MXFP8BlockScaling(enable_2d_quantization=True), 3, 0),
        (zerocast.NVFP4BlockScaling(), 3, 1),
        (zerocast.NVFP4BlockScaling(fp4_quant_fwd_weight=DRAWN), 3, 1),
        (zerocast.NVFP4BlockScaling(nvfp4_4over6="weights"), 4, 1),
    ],
    ids=str,
)
def test_launches_of_a_recipe(recipe: Recipe, cast: int, post: int, weights: int) -> None:
    """Beside the memset of the amaxes a cast is amax, scale and cast; delayed scaling casts and
    takes the amax in one; 4-over-6 chooses in between, and clears what it exchanges.
    """
    emulator = Emulator()
    shapes = [(1 + 7 * i % 33, 32 * (1 + i % 3)) for i in range(weights)]
    with zerocast.use_backend(CudaBackend(emulator)):
        models = [zerocast.empty(shape, recipe) for shape in shapes]
        masters = [draw_values("normal", r * c, i) for i, (r, c) in enumerate(shapes)]
        plan = zerocast.CastPlan(models, masters, [0] * weights)
        before = emulator.launches
        plan.cast()
        assert emulator.launches - before == cast
        before = emulator.launches
        plan.post_all_gather_processing()
        assert emulator.launches - before == post


def test_one_more_launch_where_ranks_share_blocks() -> None:
    """Under 4-over-6, shared blocks are chosen by one more launch, after the exchange."""
    recipe = zerocast.NVFP4BlockScaling(nvfp4_4over6="weights")
    names = {}

    def on_rank(comm: zerocast.comm.Communicator) -> None:
        emulator = Emulator()
        with zerocast.use_backend(CudaBackend(emulator)):
            weight = zerocast.empty((40, 64), recipe)
            start = 0 if comm.rank == 0 else 1001
            master = torch.ones(1001 if comm.rank == 0 else 40 * 64 - 1001)
            plan = zerocast.CastPlan([weight], [master], [start], comm)
            plan.cast()
        names[comm.rank] = emulator.names

    zerocast.comm.run_in_process(2, on_rank)
    expected = [
        "partial_amax<Tile>", "partial_select<false>", "select<false>",
        "compute_scale<FourOverSixNumerics>",
        "partial_cast<FourOverSixNumerics, NearestVec4<E2M1>, Tile>",
    ]  # fmt: skip
    assert names == {0: expected, 1: expected}


def test_an_activation_finds_its_tiles() -> None:
    """Quantizing and decoding a second tensor of the same shape sends rows only, few enough to go
    with a launch, so that a CUDA graph can hold it.
    """
    emulator = Emulator()
    sent: list[int] = []
    upload = emulator.upload
    emulator.upload = lambda table: (sent.append(table.numel()), upload(table))[1]
    recipe = zerocast.NVFP4BlockScaling().for_role("input")
    with zerocast.use_backend(CudaBackend(emulator)):
        for seed in range(2):
            sent.clear()
            tensor = draw_values("normal", 64 * 4096, seed).view(64, 4096)
            zerocast.quantize(tensor, recipe, dtype=torch.bfloat16).dequantize()
    assert max(sent) <= WORDS


def test_few_tables_of_tiles_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that were not used for long give way, and are cut anew when they come again."""
    monkeypatch.setattr(prepared, "KEPT_TILES", 2)
    emulator = Emulator()
    sent: list[int] = []
    upload = emulator.upload
    emulator.upload = lambda table: (sent.append(1), upload(table))[1]
    backend = CudaBackend(emulator)

    def uploads(rows: int) -> int:
        sent.clear()
        layout = ScaleLayout(BlockGrid(rows, 4, rows, 4))
        codes, values = torch.zeros(rows, 4, dtype=torch.uint8), torch.zeros(rows, 4)
        target = operand(layout, codes=codes, scale_inv=torch.ones(1, 1), values=values)
        backend.dequantize(Float8Numerics(E4M3), [target])()
        return len(sent)

    assert [uploads(rows) for rows in (1, 2, 1, 3, 1, 2)] == [2, 2, 1, 2, 1, 2]


# --- what is refused ---


def test_second_planes_of_other_blocks_are_refused() -> None:
    """A second plane whose blocks are not of one column says which are served."""
    grid = BlockGrid(8, 40, 1, 20)
    with pytest.raises(BackendError, match="blocks of one column beside blocks of one row, 16"):
        both_planes(
            BACKENDS["forward"], Float8Numerics(E4M3), grid, BlockGrid(8, 40, 8, 1), Extent(0, 320),
            torch.ones(320), torch.float32, False, PLACES[0],
        )  # fmt: skip


def test_choices_of_other_blocks_are_refused() -> None:
    """4-over-6 in blocks that are not 16x16 is refused when the operation is prepared."""
    grid = BlockGrid(8, 64, 1, 32)
    candidates = FourOverSixErrors.carve(
        torch.zeros(FourOverSixErrors.words(grid, SharedBlocks()), dtype=torch.int32),
        grid,
        SharedBlocks(),
    )
    shard = operand(
        grid, *2 * [torch.zeros(16, dtype=torch.int32)], torch.zeros(256, dtype=torch.uint8),
        extent=Extent(0, 512), candidates=candidates,
    )  # fmt: skip
    with pytest.raises(BackendError, match="16x16 blocks, got BlockGrid"):
        BACKENDS["forward"].partial_select(NVFP4Numerics(four_over_six="mae"), [shard], Masters(1))
