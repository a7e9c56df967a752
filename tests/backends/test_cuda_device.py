"""The CUDA backend on a GPU: the reference's bytes, torch's streams, graphs, memory, MPI ranks."""

import os
import subprocess
import sys

import pytest
import torch

import zerocast
from tests.backends.test_cuda_emulated import many_weights
from tests.cast.test_first_law import Case
from tests.support.same_bytes import assert_same_bytes
from tests.support.values import KINDS, draw_values
from zerocast.backends import backend_for
from zerocast.backends.cuda import CudaBackend
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import BackendError
from zerocast.layout import Extent
from zerocast.ops import CastShard, Float8Law, Masters, NVFP4Law
from zerocast.recipes import Recipe

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

RECIPES: list[Recipe] = [
    zerocast.NVFP4BlockScaling(),
    zerocast.Float8CurrentScaling(),
    zerocast.Float8CurrentScaling(fp8_format="e5m2", use_power_2_scales=True),
]
SHAPES = [(1, 16), (3, 80), (17, 96), (33, 112), (128, 128), (257, 1040), (300, 4096), (1000, 528)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> CudaBackend:
    """The backend of the current device; its being there is the first claim."""
    backend = backend_for(torch.device("cuda"))
    assert isinstance(backend, CudaBackend), "the reference stepped in for the kernels"
    return backend


def on_host(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The bytes of a weight."""
    return {name: buffer.cpu() for name, buffer in weight.storage.buffers.items()}


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


@pytest.mark.parametrize("law", [NVFP4Law(), Float8Law(RECIPES[1].law.fmt)], ids=["nvfp4", "fp8"])
def test_every_bf16_value(law: NVFP4Law | Float8Law) -> None:
    """All 65,536 BF16 values, and both their neighbours in FP32, get the reference's codes."""
    values = (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)
    bits = values[values.isfinite()].view(torch.int32)
    master = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    master = torch.where(master.isfinite(), master, 0)
    master = torch.cat([master, torch.zeros(-len(master) % 4096)]).view(-1, 4096)
    recipe = RECIPES[0] if isinstance(law, NVFP4Law) else RECIPES[1]
    # Scaled so that the largest is not so large that all others vanish under its scale.
    for scale in (1.0, 2.0**-60, 2.0**-100, 2.0**-118):
        scaled = (master.double() * scale).clamp(-6, 6).float()
        actual = zerocast.quantize(scaled.cuda(), recipe, dtype=torch.float32)
        assert_same(actual, reference(scaled, recipe, torch.float32), f"{recipe} times {scale}")


def gathered(comm: Communicator, case: Case) -> list[torch.Tensor]:
    """One rank's weights on the GPU, after a plan's cast and all-gather."""
    weights = [
        zerocast.empty(s, r, dtype=d, columnwise=c, device="cuda")
        for s, r, d, c in zip(case.shapes, case.recipes, case.dtypes, case.columnwise, strict=True)
    ]
    masters, starts = case.shards(comm.rank)
    masters = [None if m is None else m.cuda() for m in masters]
    plan = zerocast.CastPlan(weights, masters, starts, comm)
    plan.cast()
    plan.all_gather()
    return weights


def test_random_partitions() -> None:
    """60 drawn cases on 1 to 9 ranks, which are threads, give the unsharded bytes."""
    for seed in range(60):
        world_size = 1 + seed % 9
        case = Case(seed, world_size)
        by_rank = run_in_process(world_size, lambda comm, case=case: gathered(comm, case))
        for i, (master, shape) in enumerate(zip(case.masters, case.shapes, strict=True)):
            expected = reference(master.view(shape), case.recipes[i], case.dtypes[i])
            for rank, weights in enumerate(by_rank):
                for name, buffer in on_host(weights[i]).items():
                    what = f"seed {seed}, rank {rank}, weight {i}.{name}"
                    assert_same_bytes(buffer, expected.storage.buffers[name], what)


def test_a_plan_of_many_weights() -> None:
    """160 weights of three recipes on 4 ranks, most shards of them empty."""
    case = many_weights(11, 4)
    for weights in run_in_process(4, lambda comm: gathered(comm, case)):
        for i, weight in enumerate(weights):
            expected = reference(
                case.masters[i].view(case.shapes[i]), case.recipes[i], case.dtypes[i]
            )
            assert_same(weight, expected, f"weight {i}")


def test_sanitized() -> None:
    """A small mixed plan on 3 ranks: what scripts/gpu_check.sh runs under compute-sanitizer."""
    case = many_weights(5, 3, count=12)
    for weights in run_in_process(3, lambda comm: gathered(comm, case)):
        for i, weight in enumerate(weights):
            master = case.masters[i].view(case.shapes[i])
            expected = reference(master, case.recipes[i], case.dtypes[i])
            assert_same(weight, expected, f"weight {i}")


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
@pytest.mark.parametrize("bits", [4, 8])
def test_more_than_2_to_31_elements(bits: int) -> None:
    """A shard past element 2^31 of one weight gets the codes that it gets at the start of one."""
    cols = 65536
    rows = 2**31 // cols + 32
    recipe = RECIPES[0] if bits == 4 else RECIPES[1]
    size = 16 * cols + 7
    start = rows * cols - size
    weight = zerocast.empty((rows, cols), recipe, device="cuda", columnwise=False)
    storage = weight.storage
    master = torch.randn(size, device="cuda")
    amax = torch.zeros(storage.grid.amax_slots, dtype=torch.int32, device="cuda")
    masters = Masters(1)
    masters.bind([master])
    shard = storage.cast_shard(0, Extent(start, start + size), amax)
    backend = backend_for(storage.device)
    recipe.partial_amax(backend, [shard], masters)()
    recipe.partial_cast(backend, [shard], masters)()
    # The same shard of a weight that is only its last rows.
    few = zerocast.empty((48, cols), recipe, device="cuda", columnwise=False).storage
    small = torch.zeros(few.grid.amax_slots, dtype=torch.int32, device="cuda")
    moved = few.cast_shard(0, Extent(48 * cols - size, 48 * cols), small)
    assert isinstance(moved, CastShard)
    recipe.partial_amax(backend, [moved], masters)()
    recipe.partial_cast(backend, [moved], masters)()
    assert_same_bytes(amax[-len(small) :].cpu(), small.cpu(), "amax")
    codes = storage.buffers["rowwise_data"].view(-1)
    tail = few.buffers["rowwise_data"].view(-1)
    assert_same_bytes(codes[-len(tail) :].cpu(), tail.cpu(), "codes")
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
for name, buffer in whole.storage.buffers.items():
    assert torch.equal(weight.storage.buffers[name].cpu(), buffer), (world.rank, name)
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
