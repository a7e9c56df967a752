"""Plans of CUDA's kernels: the tables, tiles, grids, arguments and launches of a step."""

import itertools
import random
from itertools import pairwise
from typing import Any

import pytest
import torch

import zerocast
from tests.cast.test_bitwise_guarantee import DTYPES, Case, check_in_process
from tests.cast.test_tp_shards import cast_parts
from tests.cuda_emulation.emulator import Emulator, needs_emulation
from tests.support.claims import assert_same_tensors
from tests.support.nightly import nightly
from tests.support.operations import operand
from tests.support.recipes import RECIPES, SHARDABLE, VARIANTS
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.values import KINDS, draw_values
from zerocast.backends.cuda import CudaBackend, prepared
from zerocast.backends.cuda.device import WORDS
from zerocast.backends.reference import ReferenceBackend
from zerocast.comm import Communicator, SingleRank, run_in_process
from zerocast.errors import BackendError
from zerocast.layout import BlockGrid, Extent, ScaleLayout
from zerocast.numerics import E4M3, Backend, Float8Numerics
from zerocast.recipes import Recipe

THREE_RECIPES = [
    zerocast.NVFP4BlockScaling(),
    zerocast.Float8CurrentScaling(),
    zerocast.Float8CurrentScaling(fp8_format="e5m2"),
]


def check(cuda: CudaBackend, case: Case, world_size: int) -> None:
    """Every rank, a thread, holds the unsharded bytes."""
    with zerocast.use_backend(cuda):
        check_in_process(case, world_size, cuda.launcher.device)


# --- bytes ---


@pytest.mark.parametrize("block", [*range(2), *map(nightly, range(2, 4))])
def test_random_partitions(cuda: CudaBackend, block: int) -> None:
    """60 drawn cases of up to 3 weights on 1 to 9 ranks give the unsharded bytes; half of them
    nightly.
    """
    for seed in range(1000 * block, 1000 * block + 15):
        check(cuda, Case(seed, 1 + seed % 9), 1 + seed % 9)


def many_weights(seed: int, world_size: int, count: int = 160) -> Case:
    """Weights of three recipes, cut so that most ranks own nothing of most of them."""
    case = Case(seed, world_size)
    rng = random.Random(seed)
    case.recipes = [THREE_RECIPES[i % 3] for i in range(count)]
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


def test_amaxes_of_blocks_kept_anywhere(cuda: CudaBackend) -> None:
    """A rank keeps the amaxes of some blocks, and kernels are told where block 0 would be: in one
    of these cuts that is where the tensor's amax lies.
    """
    for block, others in itertools.product(range(1, 8), range(2)):
        case = Case(block, 2)
        count = 1 + others
        case.recipes, case.shapes = [RECIPES["nvfp4"]] * count, [torch.Size((128, 16))] * count
        case.dtypes, case.columnwise = [torch.bfloat16] * count, [True] * count
        case.masters = [torch.arange(2048.0)] * count
        case.partitions = [[Extent(0, 256 * block), Extent(256 * block, 2048)]] * count
        case.exchange, case.own_buffers = "boundary", False
        check(cuda, case, 2)


@needs_emulation
@pytest.mark.parametrize("given", ["reference", "cpu", "cuda"])
@pytest.mark.parametrize("name", ["mxfp8", "block", "nvfp4"])
def test_no_tensor_amax_under_scales_of_blocks(name: str, given: str) -> None:
    """It is taken for a scale of the tensor, or where amaxes are judged: in tiles and in one pass,
    of blocks that a shard holds whole and that it cuts. The bytes are the same.
    """
    master = draw_values("normal", 96 * 256, 1)
    expected = zerocast.quantize(master.view(96, 256), RECIPES[name], dtype=torch.bfloat16)

    def on_rank(comm: Communicator) -> None:
        own = (slice(0, 9000), slice(9000, None))[comm.rank]
        with zerocast.use_backend(CudaBackend(Emulator()) if given == "cuda" else given):
            for judged in (False, True):
                weight = zerocast.empty((96, 256), RECIPES[name])
                plan = zerocast.CastPlan(
                    [weight], [master[own]], [own.start], comm, check_finite=judged
                )
                plan.cast()
                (amax,) = plan._cast.exchange.buffers.tensor_amaxes
                assert (int(amax) > 0) == (judged or name == "nvfp4")
                plan.all_gather()
                assert_same_storage(weight, expected, f"{name} by {given}")

    run_in_process(2, on_rank)


@pytest.mark.parametrize("world_size", [1, 5])
def test_a_plan_of_many_weights(cuda: CudaBackend, world_size: int) -> None:
    """160 weights of three recipes, empty shards among them: the unsharded bytes on every rank."""
    case = many_weights(7, world_size)
    assert world_size == 1 or any(not e for partition in case.partitions for e in partition)
    check(cuda, case, world_size)


def test_sanitized(cuda: CudaBackend) -> None:
    """A small mixed plan on 3 ranks, and one weight of each recipe: what scripts/gpu_check.sh runs
    under compute-sanitizer.
    """
    check(cuda, many_weights(5, 3, count=12), 3)
    case = Case(6, 2)
    case.recipes = [VARIANTS[name] for name in SHARDABLE]
    count = len(case.recipes)
    case.shapes, case.dtypes = [torch.Size((40, 96))] * count, [torch.bfloat16] * count
    case.columnwise, case.own_buffers = [True] * count, False
    case.masters = [draw_values("normal", 40 * 96, seed) for seed in range(count)]
    case.partitions = [[Extent(0, 1801), Extent(1801, 40 * 96)]] * count
    check(cuda, case, 2)


@needs_emulation
def test_thread_blocks_that_fetch_their_next_tile() -> None:
    """Where ranks own parts of tiles, too, the bytes are the unsharded ones."""
    case = Case(7, 3)
    case.recipes = [VARIANTS[name] for name in ("nvfp4", "nvfp4-4over6", "current")]
    case.shapes, case.dtypes = [torch.Size((70, 608))] * 3, DTYPES[:3]
    case.columnwise, case.own_buffers = [True] * 3, False
    case.masters = [draw_values("normal", 70 * 608, seed) for seed in range(3)]
    case.partitions = [[Extent(0, 9001), Extent(9001, 9002), Extent(9002, 70 * 608)]] * 3
    check(CudaBackend(Emulator("random", max_grid=2), on_trial=True), case, 3)


@pytest.mark.parametrize(
    "name", ["nvfp4", "mxfp8", "block", "current", "rowwise", "delayed", "nvfp4-4over6"]
)
def test_sanitized_alone(cuda: CudaBackend, name: str) -> None:
    """One weight of a recipe on one rank: what a tool has to do that is too slow for more."""
    case = Case(6, 1)
    case.recipes, case.shapes, case.dtypes = [VARIANTS[name]], [torch.Size((40, 96))], DTYPES[:1]
    case.columnwise, case.own_buffers = [True], False
    case.masters = [draw_values("normal", 40 * 96, 1)]
    case.partitions = [[Extent(0, 40 * 96)]]
    check(cuda, case, 1)


@needs_emulation
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_parts_of_weights(dim: int) -> None:
    """Every recipe, cut over three ranks in drawn places: the slices of the unsharded bytes."""
    with zerocast.use_backend(CudaBackend(Emulator("random", max_grid=5))):
        run_in_process(3, lambda comm: cast_parts(comm, SingleRank(), dim))


@needs_emulation
@pytest.mark.parametrize(
    "recipe", [*RECIPES.values(), zerocast.MXFP8BlockScaling(fp8_format="hybrid")], ids=str
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

    emulated = CudaBackend(Emulator("random", max_grid=5))
    assert_same_tensors(run(emulated), run(ReferenceBackend()), str(recipe))


# --- launches ---


@pytest.mark.parametrize("weights", [1, 40])
@pytest.mark.parametrize(
    ("recipes", "cast", "post"),
    [
        *(([RECIPES[name]], 3, 1) for name in ("current", "nvfp4", "nvfp4-drawn")),
        ([RECIPES["rowwise"]], 3, 0),
        *(([RECIPES[name]], 2, 0) for name in ("mxfp8", "mxfp8-2d")),
        *(([RECIPES[name]], 2, 1) for name in ("delayed", "block")),
        ([RECIPES["nvfp4-4over6"]], 3, 1),
        (THREE_RECIPES, 3, 1),
    ],
    ids=str,
)
def test_launches_of_a_recipe(
    cuda: CudaBackend, recipes: list[Recipe], cast: int, post: int, weights: int
) -> None:
    """For one weight as for many of a recipe: beside the memset of the amaxes a cast is amax, scale
    and cast; delayed scaling casts and takes the amax in one, and so does what scales blocks alone,
    of whole ones; 4-over-6 chooses scales of whole ones and casts in one, and clears what it
    exchanges.
    """
    launcher, device = cuda.launcher, cuda.launcher.device
    shapes = [(1 + 7 * i % 33, 32 * (1 + i % 3)) for i in range(weights)]
    masters = [draw_values("normal", r * c, i).to(device) for i, (r, c) in enumerate(shapes)]
    with zerocast.use_backend(cuda):
        models = [
            zerocast.empty(shape, recipes[i % len(recipes)], device=device)
            for i, shape in enumerate(shapes)
        ]
        plan = zerocast.CastPlan(models, masters, [0] * weights)
        kinds = min(weights, len(recipes))
        before = launcher.launches
        plan.cast()
        assert launcher.launches - before == cast * kinds
        plan.post_all_gather_processing()
        assert launcher.launches - before == (cast + post) * kinds


@needs_emulation
def test_one_more_launch_where_ranks_share_blocks() -> None:
    """Under 4-over-6, shared blocks are chosen by one more launch, after the exchange."""
    names = {}

    def on_rank(comm: Communicator) -> None:
        emulator = Emulator()
        with zerocast.use_backend(CudaBackend(emulator)):
            weight = zerocast.empty((40, 64), RECIPES["nvfp4-4over6"])
            start = 0 if comm.rank == 0 else 1001
            master = torch.ones(1001 if comm.rank == 0 else 40 * 64 - 1001)
            zerocast.CastPlan([weight], [master], [start], comm).cast()
        names[comm.rank] = emulator.names

    run_in_process(2, on_rank)
    expected = [
        "partial_amax<Tile>", "partial_select<false>", "select<false>",
        "compute_scale<FourOverSixNumerics>",
        "partial_cast<FourOverSixNumerics, NearestVec4<E2M1>, Tile>",
    ]  # fmt: skip
    assert names == {0: expected, 1: expected}


# --- what is sent to the device ---


@needs_emulation
def test_a_step_sends_nothing_and_masters_bound_anew_are_read() -> None:
    """Tables are made with the plan. It reads the masters that cast() was given last, of another
    dtype, and sends their addresses once.
    """
    emulator = Emulator()
    first, second = (draw_values("normal", 48 * 32, seed) for seed in (1, 2))
    second = second.half()
    with zerocast.use_backend(CudaBackend(emulator)):
        weight = zerocast.empty((48, 32), "nvfp4")
        plan = zerocast.CastPlan([weight], [first], [0])
        made = len(emulator.sent)
        for _ in range(2):
            plan.cast()
            plan.all_gather()
        assert emulator.refreshed == 0
        plan.cast([second])
        plan.cast()
        assert emulator.refreshed == 1
        assert len(emulator.sent) == made
    with zerocast.use_backend("reference"):
        expected = zerocast.quantize(second.view(48, 32), "nvfp4", dtype=torch.bfloat16)
    assert_same_bytes(weight.rowwise_data, expected.rowwise_data, "codes of the second masters")


@needs_emulation
def test_an_activation_finds_its_tiles() -> None:
    """Quantizing and decoding a second tensor of the same shape sends rows only, few enough to go
    with a launch, so that a CUDA graph can hold it.
    """
    emulator = Emulator()
    recipe = zerocast.NVFP4BlockScaling().for_role("input")
    with zerocast.use_backend(CudaBackend(emulator)):
        for seed in range(2):
            emulator.sent.clear()
            tensor = draw_values("normal", 64 * 4096, seed).view(64, 4096)
            zerocast.quantize(tensor, recipe, dtype=torch.bfloat16).dequantize()
    assert max(emulator.sent) <= WORDS


def decode(backend: CudaBackend, rows: int) -> Any:
    """The launch that decodes a tensor [rows, 4]."""
    layout = ScaleLayout(BlockGrid(rows, 4, rows, 4))
    codes, values = torch.zeros(rows, 4, dtype=torch.uint8), torch.zeros(rows, 4)
    target = operand(layout, codes=codes, scale_inv=torch.ones(1, 1), values=values)
    return backend.dequantize(Float8Numerics(E4M3), [target])


@needs_emulation
def test_few_tables_of_tiles_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that were not used for long give way, and are cut anew when they come again."""
    monkeypatch.setattr(prepared, "KEPT_TILES", 2)
    emulator = Emulator()
    backend = CudaBackend(emulator)

    def uploads(rows: int) -> int:
        emulator.sent.clear()
        decode(backend, rows)()
        return len(emulator.sent)

    assert [uploads(rows) for rows in (1, 2, 1, 3, 1, 2)] == [2, 2, 1, 2, 1, 2]


@needs_emulation
def test_what_is_prepared_in_a_capture_stays_there() -> None:
    """Its tables are written when the graph runs, so outside of it the launch is refused."""
    emulator = Emulator()
    emulator.capturing = True
    backend = CudaBackend(emulator)
    launch = decode(backend, 4)
    launch()
    emulator.capturing = False
    with pytest.raises(
        BackendError, match="in that capture, got dequantize<Float8Numerics<E4M3>, Tile> outside"
    ):
        launch()
    emulator.sent.clear()
    decode(backend, 4)()
    assert len(emulator.sent) == 2, "the tiles of the capture were taken for tiles that are there"


def test_a_tensor_elsewhere_is_refused() -> None:
    """A tensor that the launcher's device cannot read is refused by what it is."""
    amax = torch.zeros(1, dtype=torch.int32, device="meta")
    target = operand(BlockGrid(4, 4, 4, 4), amax, amax, scale_inv=torch.zeros(1, 1))
    with pytest.raises(BackendError, match="contiguous tensors on cpu, got \\(1,\\) on meta"):
        CudaBackend(Emulator()).compute_scale(Float8Numerics(E4M3), [target])
