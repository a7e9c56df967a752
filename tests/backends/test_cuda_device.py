"""The CUDA backend on a GPU: the reference's bytes, torch's streams, graphs, memory, MPI ranks."""

import os
import subprocess
import sys

import pytest
import torch

import zerocast
from tests.backends.test_cuda_emulated import many_weights
from tests.cast.test_bitwise_guarantee import Case
from tests.support.recipes import SHARDABLE, VARIANTS
from tests.support.same_bytes import assert_same_bytes
from tests.support.values import KINDS, draw_values
from zerocast.backends import backend_for
from zerocast.backends.cuda import CudaBackend
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import BackendError
from zerocast.layout import Extent, Source
from zerocast.numerics import Float8Numerics, Masters, NVFP4Numerics
from zerocast.recipes import Recipe, Role
from zerocast.tensors import QuantizedStorage
from zerocast.tensors.operands import tensor_operand

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

RECIPES: list[Recipe] = [
    zerocast.NVFP4BlockScaling(),
    zerocast.Float8CurrentScaling(),
    zerocast.Float8CurrentScaling(fp8_format="e5m2", use_power_2_scales=True),
]
ROLES: tuple[Role, ...] = ("weight", "input", "grad_output")
SHAPES = [(1, 16), (3, 80), (17, 96), (33, 112), (128, 128), (257, 1040), (300, 4096), (1000, 528)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> CudaBackend:
    """The backend of the current device; its being there is the first claim."""
    backend = backend_for(torch.device("cuda"))
    assert isinstance(backend, CudaBackend), "the reference stepped in for the kernels"
    return backend


def on_host(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The bytes of a weight."""
    return {name: buffer.cpu() for name, buffer in weight.quantized_storage.buffers.items()}


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """A weight on the GPU holds the bytes of one on the CPU."""
    for name, buffer in on_host(expected).items():
        assert_same_bytes(on_host(actual)[name], buffer, f"{what}.{name}")


def reference(master: torch.Tensor, recipe: Recipe, dtype: torch.dtype) -> torch.Tensor:
    """The unsharded cast by the reference, on the CPU."""
    with zerocast.use_backend("reference"):
        return zerocast.quantize(master.cpu(), recipe, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_quantize_equals_the_reference(recipe: Recipe, kind: str) -> None:
    """Codes, scales, amax, copies and decoded values of awkward shapes are the reference's."""
    for seed, shape in enumerate(SHAPES):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            master = draw_values(kind, shape[0] * shape[1], seed).view(shape)
            actual = zerocast.quantize(master.cuda(), recipe, dtype=dtype)
            expected = reference(master, recipe, dtype)
            what = f"{recipe} {shape} {dtype} {kind}"
            assert_same(actual, expected, what)
            with zerocast.use_backend("reference"):
                values = expected.dequantize(torch.float32)
            assert_same_bytes(actual.dequantize(torch.float32).cpu(), values, f"{what} decoded")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("recipe", VARIANTS.values(), ids=VARIANTS)
def test_every_recipe_and_role_equals_the_reference(recipe: Recipe, role: Role) -> None:
    """What a recipe makes of weights, activations and gradients: both copies, scales, padding, what
    it remembers, and decoded values, of every kind of values.
    """
    recipe = recipe.for_role(role)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for i, kind in enumerate(KINDS):
        for rows, cols in ((1, 32), (33, 544), (130, 288)):
            master = draw_values(kind, rows * cols, i).view(rows, cols)
            actual = zerocast.quantize(master.cuda(), recipe, dtype=dtypes[i % 3])
            expected = reference(master, recipe, dtypes[i % 3])
            what = f"{recipe} {(rows, cols)} {kind}"
            assert_same(actual, expected, what)
            values = actual.dequantize(torch.float32).cpu()
            with zerocast.use_backend("reference"):
                assert_same_bytes(values, expected.dequantize(torch.float32), f"{what} decoded")


@pytest.mark.parametrize("recipe", VARIANTS.values(), ids=VARIANTS)
def test_masters_at_any_address(recipe: Recipe) -> None:
    """A master that does not lie at a multiple of 16 bytes gives the same bytes."""
    if recipe.columnwise_source is Source.TRANSPOSED_MASTER:
        pytest.skip("whole tensors only")
    master = draw_values("normal", 70 * 544, 3)
    for words in range(4):
        moved = torch.empty(master.numel() + words, device="cuda")[words:].copy_(master)
        weight = zerocast.empty((70, 544), recipe, device="cuda", name="weight")
        zerocast.quantize_master_weights([weight], [moved], [0])
        zerocast.post_all_gather_processing([weight])
        with zerocast.use_backend("reference"):
            expected = zerocast.empty((70, 544), recipe, name="weight")
            zerocast.quantize_master_weights([expected], [master], [0])
            zerocast.post_all_gather_processing([expected])
        assert_same(weight, expected, f"{recipe} {words} words off")


@pytest.mark.parametrize(
    "numerics", [NVFP4Numerics(), Float8Numerics(RECIPES[1].numerics.fmt)], ids=["nvfp4", "fp8"]
)
def test_every_bf16_value(numerics: NVFP4Numerics | Float8Numerics) -> None:
    """All 65,536 BF16 values, and both their neighbours in FP32, get the reference's codes."""
    values = (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)
    bits = values[values.isfinite()].view(torch.int32)
    master = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    master = torch.where(master.isfinite(), master, 0)
    master = torch.cat([master, torch.zeros(-len(master) % 4096)]).view(-1, 4096)
    recipe = RECIPES[0] if isinstance(numerics, NVFP4Numerics) else RECIPES[1]
    # Scaled so that the largest is not so large that all others vanish under its scale.
    for scale in (1.0, 2.0**-60, 2.0**-100, 2.0**-118):
        scaled = (master.double() * scale).clamp(-6, 6).float()
        actual = zerocast.quantize(scaled.cuda(), recipe, dtype=torch.float32)
        assert_same(actual, reference(scaled, recipe, torch.float32), f"{recipe} times {scale}")


def gathered(comm: Communicator, case: Case) -> list[torch.Tensor]:
    """One rank's weights on the GPU, after a plan's casts and all-gathers."""
    with torch.device("cuda"):
        weights = case.unfilled()
    masters, starts = case.shards(comm.rank)
    masters = [None if m is None else m.cuda() for m in masters]
    plan = zerocast.CastPlan(weights, masters, starts, comm)
    for _ in range(case.casts):
        plan.cast()
        plan.all_gather()
    return weights


def check_on_gpu(case: Case, world_size: int) -> None:
    """Every rank, a thread, holds the unsharded bytes."""
    expected = case.whole()
    by_rank = run_in_process(world_size, lambda comm: gathered(comm, case))
    for rank, weights in enumerate(by_rank):
        for i, weight in enumerate(weights):
            what = f"seed {case.seed}, rank {rank}, weight {i} {weight.recipe}"
            assert_same(weight, expected[i], what)


def test_random_partitions() -> None:
    """60 drawn cases on 1 to 9 ranks, which are threads, give the unsharded bytes."""
    for seed in range(60):
        check_on_gpu(Case(seed, 1 + seed % 9), 1 + seed % 9)


def test_a_plan_of_many_weights() -> None:
    """160 weights of three recipes on 4 ranks, most shards of them empty."""
    check_on_gpu(many_weights(11, 4), 4)


def test_sanitized() -> None:
    """A small mixed plan on 3 ranks, and one weight of each recipe: what scripts/gpu_check.sh runs
    under compute-sanitizer.
    """
    check_on_gpu(many_weights(5, 3, count=12), 3)
    case = Case(6, 2)
    case.recipes = [VARIANTS[name] for name in SHARDABLE]
    count = len(case.recipes)
    case.shapes, case.dtypes = [torch.Size((40, 96))] * count, [torch.bfloat16] * count
    case.columnwise, case.own_buffers = [True] * count, False
    case.masters = [draw_values("normal", 40 * 96, seed) for seed in range(count)]
    case.partitions = [[Extent(0, 1801), Extent(1801, 40 * 96)]] * count
    check_on_gpu(case, 2)


def plan_of(count: int) -> tuple[zerocast.CastPlan, list[torch.Tensor], list[torch.Tensor]]:
    """A plan of one rank on the GPU, its weights and its masters."""
    shapes = [(64 + 16 * (i % 5), 256) for i in range(count)]
    recipes = [RECIPES[i % 2] for i in range(count)]
    weights = [zerocast.empty(s, r, device="cuda") for s, r in zip(shapes, recipes, strict=True)]
    masters = [torch.randn(s, device="cuda") for s in shapes]
    return zerocast.CastPlan(weights, masters, [0] * count), weights, masters


def assert_cast(weights: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
    """The weights are what their masters give now."""
    torch.cuda.synchronize()
    for i, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        expected = reference(master, weight.recipe, torch.bfloat16)
        assert_same(weight, expected, f"weight {i}")


def test_the_current_stream_is_used() -> None:
    """A cast is ordered with what torch does on the same side stream, and needs no other order."""
    plan, weights, masters = plan_of(6)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for master in masters:
            master.mul_(3).sub_(1)
        plan.cast()
        plan.post_all_gather_processing()
    stream.synchronize()
    assert_cast(weights, masters)


def test_a_graph_replays_a_step() -> None:
    """A cast and its post-processing, captured once, cast whatever the masters hold at a replay."""
    plan, weights, masters = plan_of(9)
    plan.cast()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.cast()
        plan.post_all_gather_processing()
    for step in range(3):
        for master in masters:
            master.copy_(torch.randn_like(master) * (step + 1))
        graph.replay()
        assert_cast(weights, masters)


@pytest.mark.parametrize(
    "recipe",
    [
        zerocast.NVFP4BlockScaling(disable_stochastic_rounding=True),
        zerocast.MXFP8BlockScaling(),
        zerocast.Float8BlockScaling(),
        zerocast.Float8CurrentScaling(),
    ],
    ids=str,
)
def test_a_graph_replays_an_activation(recipe: Recipe) -> None:
    """Quantizing and decoding, done once outside and then captured, do at a replay whatever the
    tensor holds then.
    """
    source = torch.randn(96, 512, device="cuda")
    recipe = recipe.for_role("input")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        quantized = zerocast.quantize(source, recipe, dtype=torch.bfloat16)
        return quantized, quantized.dequantize(torch.float32)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantized, values = step()
    for i in range(3):
        source.copy_(torch.randn_like(source) * (i + 1))
        graph.replay()
        torch.cuda.synchronize()
        expected = reference(source, recipe, torch.bfloat16)
        assert_same(quantized, expected, "activation")
        decoded = expected.dequantize(torch.float32)
        assert_same_bytes(values.cpu(), decoded, "activation decoded")


@pytest.mark.parametrize("recipe", [RECIPES[0], zerocast.MXFP8BlockScaling()], ids=str)
def test_a_graph_replays_a_layer(recipe: Recipe) -> None:
    """The forward of a layer with a quantized weight, captured once, decodes at a replay what the
    weight holds then.
    """
    model = torch.nn.Sequential(torch.nn.Linear(512, 96, device="cuda", dtype=torch.bfloat16))
    zerocast.nn.convert(model, recipe)
    weight = model[0].weight
    master = torch.randn(96, 512, device="cuda")
    plan = zerocast.CastPlan([weight], [master], [0])
    x = torch.randn(32, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for step in range(2):
            master.copy_(torch.randn_like(master) * (step + 1))
            plan.cast()
            plan.post_all_gather_processing()
            graph.replay()
            assert_same_bytes(y.cpu(), model(x).cpu(), f"outputs of step {step}")


def test_a_new_shape_in_a_capture_is_refused() -> None:
    """A tensor of a shape never seen, too large for its tiles to go with a launch, says so."""
    source = torch.randn(1048, 1072, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(BackendError, match="a tensor of a new shape"), torch.cuda.graph(graph):
        zerocast.quantize(source, RECIPES[0], dtype=torch.bfloat16)
    torch.cuda.synchronize()
    zerocast.quantize(source, RECIPES[0], dtype=torch.bfloat16)


def test_a_capture_of_other_masters_is_refused() -> None:
    """Binding masters inside of a capture, which a replay would not repeat, says what to do."""
    plan, _, masters = plan_of(2)
    plan.cast()
    others = [master.clone() for master in masters]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(BackendError, match="must be bound before"), torch.cuda.graph(graph):
        plan.cast(others)
    torch.cuda.synchronize()
    plan.cast(others)


def test_a_step_takes_no_memory() -> None:
    """After the first, steps neither allocate from torch nor from CuPy."""
    import cupy

    plan, _, _ = plan_of(40)
    plan.cast()
    plan.post_all_gather_processing()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    pool = cupy.get_default_memory_pool().total_bytes()
    for _ in range(5):
        plan.cast()
        plan.post_all_gather_processing()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert cupy.get_default_memory_pool().total_bytes() == pool


def test_a_step_does_not_wait() -> None:
    """A step returns while the GPU is still busy with what came before it."""
    plan, weights, masters = plan_of(12)
    plan.cast()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.current_stream()):
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(2_000_000_000)
            plan.cast()
            plan.post_all_gather_processing()
            assert not torch.cuda.current_stream().query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_cast(weights, masters)


def test_decoding_does_not_wait() -> None:
    """A weight is decoded behind what the GPU still has to do, and the host goes on."""
    master = draw_values("normal", 64 * 256, 1).view(64, 256)
    weight = zerocast.quantize(master.cuda(), RECIPES[0], dtype=torch.bfloat16)
    weight.dequantize()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        values = weight.dequantize()
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = reference(master, RECIPES[0], torch.bfloat16).dequantize()
    assert_same_bytes(values.cpu(), expected, "values")


def test_a_scale_of_the_callers_does_not_wait() -> None:
    """Delayed scaling by a function of the caller's makes the host wait for nothing, either."""
    recipe = zerocast.DelayedScaling(amax_compute_algo=lambda history: history.mean())
    weights = [zerocast.empty((64, 256), recipe, device="cuda") for _ in range(3)]
    masters = [torch.randn(64, 256, device="cuda") for _ in weights]
    plan = zerocast.CastPlan(weights, masters, [0] * 3)
    plan.cast()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        plan.cast()
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with zerocast.use_backend("reference"):
        for i, master in enumerate(masters):
            expected = zerocast.empty((64, 256), recipe)
            for _ in range(2):
                zerocast.quantize_master_weights([expected], [master.cpu()], [0])
            zerocast.post_all_gather_processing([weights[i]])
            zerocast.post_all_gather_processing([expected])
            assert_same(weights[i], expected, f"weight {i}")


def test_a_plan_made_on_another_stream() -> None:
    """A launch on one stream waits for the tables that a plan has sent on another."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        masters = [torch.randn(64, 256, device="cuda")]
        weights = [zerocast.empty((64, 256), RECIPES[0], device="cuda")]
        streams[0].synchronize()
        torch.cuda._sleep(500_000_000)
        plan = zerocast.CastPlan(weights, masters, [0])
    with torch.cuda.stream(streams[1]):
        plan.cast()
        plan.post_all_gather_processing()
    assert_cast(weights, masters)


@pytest.mark.parametrize("count", [2, 200])
def test_launches_are_constant(kernels: CudaBackend, count: int) -> None:
    """Three launches a recipe kind for a cast, one for post-processing, beside one memset."""
    plan, _, _ = plan_of(count)
    launcher = kernels.launcher
    before = launcher.launches
    plan.cast()
    assert launcher.launches - before == 3 * 2
    plan.post_all_gather_processing()
    assert launcher.launches - before == 4 * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [RECIPES[0], RECIPES[1], zerocast.MXFP8BlockScaling()], ids=["nvfp4", "fp8", "mxfp8"]
)
def test_more_than_2_to_31_elements(recipe: Recipe) -> None:
    """A shard past element 2^31 of one weight gets the codes that it gets at the start of one."""
    cols = 65536
    rows = 2**31 // cols + 32
    size = 16 * cols + 7
    master = torch.randn(size, device="cuda")
    masters = Masters(1)
    masters.bind([master])

    def cast_end_of(height: int) -> tuple[list[torch.Tensor], QuantizedStorage]:
        independent = recipe.columnwise_source is Source.MASTER
        weight = zerocast.empty((height, cols), recipe, device="cuda", columnwise=independent)
        storage, end = weight.quantized_storage, height * cols
        amax = torch.zeros(storage.amax_slots, dtype=torch.int32, device="cuda")
        operand = tensor_operand(storage, 0, Extent(end - size, end), amax)
        backend = backend_for(storage.device)
        backend.partial_amax([operand], masters)()
        backend.partial_cast(recipe.numerics, [operand], masters)()
        return [each.block_amax for each in operand.cast_planes], storage

    (amaxes, storage), (expected, few) = cast_end_of(rows), cast_end_of(64)
    for plane, whole, tail in zip(storage.cast_planes, amaxes, expected, strict=True):
        assert_same_bytes(whole[-len(tail) :].cpu(), tail.cpu(), f"{plane.name} amaxes")
    for name in storage.gathered:
        codes, tail = storage.buffers[name].view(-1), few.buffers[name].view(-1)
        assert_same_bytes(codes[-len(tail) :].cpu(), tail.cpu(), name)
        assert not codes[: len(codes) - len(tail)].any()


RANK = """
import torch, zerocast
from mpi4py import MPI
world = MPI.COMM_WORLD
torch.manual_seed(0)
recipe = zerocast.NVFP4BlockScaling()
master = torch.randn(100 * 96)
cuts = [0, 1301, 1302, 7000, 9600]
start, end = cuts[world.rank], cuts[world.rank + 1]
weight = zerocast.empty((100, 96), recipe, device="cuda")
plan = zerocast.CastPlan([weight], [master[start:end].cuda()], [start], world)
plan.cast()
plan.all_gather()
with zerocast.use_backend("reference"):
    whole = zerocast.quantize(master.view(100, 96), recipe, dtype=torch.bfloat16)
for name, buffer in whole.quantized_storage.buffers.items():
    assert torch.equal(weight.quantized_storage.buffers[name].cpu(), buffer), (world.rank, name)
print("same bytes on", world.size)
"""


def test_mpi_ranks_on_one_gpu() -> None:
    """Four MPI processes that share the GPU hold the unsharded bytes, through host memory."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    command = ["mpiexec", "-n", "4", sys.executable, "-c", RANK]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=200, env={**os.environ}
        )
    except FileNotFoundError:
        pytest.skip("there is no mpiexec")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same bytes on 4") == 4, done.stdout
