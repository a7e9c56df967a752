"""The CUDA backend on a GPU: the reference's bytes, torch's streams, graphs, memory, MPI ranks."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

import zerocast
from tests.support import fused_ops
from tests.support.recipes import RECIPES, VARIANTS, each
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.values import KINDS, draw_values
from zerocast.backends import backend_for
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.cuda import CudaBackend
from zerocast.errors import BackendError
from zerocast.layout import Extent, Source
from zerocast.nn.quantized_ops import apply_fused
from zerocast.numerics import FusedOp, Masters
from zerocast.recipes import Recipe, Role
from zerocast.tensors import QuantizedStorage
from zerocast.tensors.weight_operands import Amaxes, tensor_operand

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

Made = TypeVar("Made")

NVFP4, FP8, MXFP8 = RECIPES["nvfp4"], RECIPES["current"], RECIPES["mxfp8"]
ROLES: tuple[Role, ...] = ("weight", "input", "grad_output")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(1, 16), (3, 80), (17, 96), (33, 112), (128, 128), (257, 1040), (300, 4096), (1000, 528)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """The first claim: the current device has the backend, the reference did not step in."""
    assert isinstance(backend_for(torch.device("cuda")), CudaBackend)


def reference(master: torch.Tensor, recipe: Recipe, dtype: torch.dtype) -> torch.Tensor:
    """The unsharded cast by the reference, on the CPU."""
    with zerocast.use_backend("reference"):
        return zerocast.quantize(master.cpu(), recipe, dtype=dtype)


def assert_quantizes(
    recipe: Recipe, kind: str, shape: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    """Codes, scales, padding, amax, copies, what the recipe remembers, and decoded values are the
    reference's.
    """
    master = draw_values(kind, shape[0] * shape[1], seed).view(shape)
    actual = zerocast.quantize(master.cuda(), recipe, dtype=dtype)
    expected = reference(master, recipe, dtype)
    what = f"{recipe} {shape} {dtype} {kind}"
    assert_same_storage(actual, expected, what)
    with zerocast.use_backend("reference"):
        values = expected.dequantize(torch.float32)
    assert_same_bytes(actual.dequantize(torch.float32), values, f"{what} decoded")


@pytest.mark.parametrize("kind", KINDS)
@each("nvfp4", "current", "current-e5m2")
def test_quantize_equals_the_reference(recipe: Recipe, kind: str) -> None:
    """Of awkward shapes, rounded to every dtype."""
    for seed, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            assert_quantizes(recipe, kind, shape, dtype, seed)


@pytest.mark.parametrize("role", ROLES)
@each(*VARIANTS)
def test_every_recipe_and_role_equals_the_reference(recipe: Recipe, role: Role) -> None:
    """What a recipe makes of weights, activations and gradients, of every kind of values."""
    for i, kind in enumerate(KINDS):
        for shape in ((1, 32), (33, 544), (130, 288)):
            assert_quantizes(recipe.for_role(role), kind, shape, DTYPES[i % 3], i)


@each(*VARIANTS)
def test_masters_at_any_address(recipe: Recipe) -> None:
    """A master that does not lie at a multiple of 16 bytes gives the same bytes."""
    if recipe.columnwise_source is Source.TRANSPOSED_MASTER:
        pytest.skip("whole tensors only")
    master = draw_values("normal", 70 * 544, 3)

    def cast(given: torch.Tensor) -> torch.Tensor:
        weight = zerocast.empty((70, 544), recipe, device=given.device, name="weight")
        zerocast.quantize_master_weights([weight], [given], [0])
        zerocast.post_all_gather_processing([weight])
        return weight

    with zerocast.use_backend("reference"):
        expected = cast(master)
    for words in range(4):
        moved = torch.empty(master.numel() + words, device="cuda")[words:].copy_(master)
        assert_same_storage(cast(moved), expected, f"{recipe} {words} words off")


@each("nvfp4", "current")
def test_every_bf16_value(recipe: Recipe) -> None:
    """All 65,536 BF16 values, and both their neighbours in FP32, get the reference's codes."""
    values = (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)
    bits = values[values.isfinite()].view(torch.int32)
    master = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    master = torch.where(master.isfinite(), master, 0)
    master = torch.cat([master, torch.zeros(-len(master) % 4096)]).view(-1, 4096)
    # Scaled so that the largest is not so large that all others vanish under its scale.
    for scale in (1.0, 2.0**-60, 2.0**-100, 2.0**-118):
        scaled = (master.double() * scale).clamp(-6, 6).float()
        actual = zerocast.quantize(scaled.cuda(), recipe, dtype=torch.float32)
        what = f"{recipe} times {scale}"
        assert_same_storage(actual, reference(scaled, recipe, torch.float32), what)


# --- streams, graphs and memory ---


def plan_of(count: int) -> tuple[zerocast.CastPlan, list[torch.Tensor], list[torch.Tensor]]:
    """A plan of one rank on the GPU, its weights and its masters."""
    shapes = [(64 + 16 * (i % 5), 256) for i in range(count)]
    recipes = [(NVFP4, FP8)[i % 2] for i in range(count)]
    weights = [zerocast.empty(s, r, device="cuda") for s, r in zip(shapes, recipes, strict=True)]
    masters = [torch.randn(s, device="cuda") for s in shapes]
    return zerocast.CastPlan(weights, masters, [0] * count), weights, masters


def step(plan: zerocast.CastPlan) -> None:
    """A cast and its post-processing."""
    plan.cast()
    plan.post_all_gather_processing()


def assert_cast(weights: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
    """The weights are what their masters give now."""
    torch.cuda.synchronize()
    for i, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        expected = reference(master, weight.recipe, torch.bfloat16)
        assert_same_storage(weight, expected, f"weight {i}")


def captured(function: Callable[[], Made]) -> tuple[torch.cuda.CUDAGraph, Made]:
    """A graph of the call, which was made once outside of it; and what it gives at a replay."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = function()
    return graph, made


@contextmanager
def while_busy() -> Iterator[None]:
    """The GPU is busy until the end, and waiting for it is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        yield
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_current_stream_is_used() -> None:
    """A cast is ordered with what torch does on the same side stream, and needs no other order."""
    plan, weights, masters = plan_of(6)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for master in masters:
            master.mul_(3).sub_(1)
        step(plan)
    stream.synchronize()
    assert_cast(weights, masters)


def test_a_graph_replays_a_step() -> None:
    """A cast and its post-processing, captured once, cast whatever the masters hold at a replay."""
    plan, weights, masters = plan_of(9)
    graph, _ = captured(lambda: step(plan))
    for factor in range(1, 4):
        for master in masters:
            master.copy_(torch.randn_like(master) * factor)
        graph.replay()
        assert_cast(weights, masters)


@pytest.mark.parametrize(
    "recipe",
    [
        zerocast.NVFP4BlockScaling(disable_stochastic_rounding=True),
        MXFP8,
        RECIPES["block"],
        FP8,
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(96, 512), (1024, 1024)], ids=str)
def test_a_graph_replays_an_activation(recipe: Recipe, shape: tuple[int, int]) -> None:
    """Quantizing and decoding, done once outside and then captured, do at a replay whatever the
    tensor holds then, however large it is; memory that is free after the capture may be written.
    """
    source = torch.randn(shape, device="cuda")
    recipe = recipe.for_role("input")

    def quantize() -> tuple[torch.Tensor, torch.Tensor]:
        quantized = zerocast.quantize(source, recipe, dtype=torch.bfloat16)
        return quantized, quantized.dequantize(torch.float32)

    graph, (quantized, values) = captured(quantize)
    garbage = [
        torch.full((size,), -1, device="cuda") for size in (64, 512, 4096) for _ in range(64)
    ]
    for factor in range(1, 4):
        source.copy_(torch.randn_like(source) * factor)
        graph.replay()
        assert_cast([quantized], [source])
        decoded = reference(source, recipe, torch.bfloat16).dequantize(torch.float32)
        assert_same_bytes(values, decoded, "activation decoded")
    del garbage


def test_a_graph_replays_two_tensors_of_one_shape() -> None:
    """Each is decoded from its own codes."""
    masters = [draw_values("normal", 512 * 1024, seed).view(512, 1024) for seed in range(2)]
    weights = [zerocast.quantize(m.cuda(), NVFP4, dtype=torch.bfloat16) for m in masters]
    graph, values = captured(lambda: [weight.dequantize() for weight in weights])
    for value in values:
        value.zero_()
    graph.replay()
    for value, master in zip(values, masters, strict=True):
        decoded = reference(master, NVFP4, torch.bfloat16).dequantize()
        assert_same_bytes(value, decoded, "decoded in a graph")


@each("nvfp4", "mxfp8")
def test_a_graph_replays_a_layer(recipe: Recipe) -> None:
    """The forward of a layer with a quantized weight, captured once, decodes at a replay what the
    weight holds then.
    """
    model = torch.nn.Sequential(torch.nn.Linear(512, 96, device="cuda", dtype=torch.bfloat16))
    zerocast.nn.convert(model, recipe)
    master = torch.randn(96, 512, device="cuda")
    plan = zerocast.CastPlan([model[0].weight], [master], [0])
    x = torch.randn(32, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        graph, y = captured(lambda: model(x))
        for factor in range(1, 3):
            master.copy_(torch.randn_like(master) * factor)
            step(plan)
            graph.replay()
            assert_same_bytes(y, model(x), f"outputs of step {factor}")


def test_a_new_shape_in_a_capture_is_refused() -> None:
    """A tensor of a shape never seen, too large for its tiles to go with a launch, says so."""
    source = torch.randn(1048, 1072, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(BackendError, match="launches for a new shape"), torch.cuda.graph(graph):
        zerocast.quantize(source, NVFP4, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    zerocast.quantize(source, NVFP4, dtype=torch.bfloat16)


def test_a_capture_of_other_masters_is_refused() -> None:
    """Binding masters inside of a capture, which a replay would not repeat, says what to do."""
    plan, _, masters = plan_of(2)
    plan.cast()
    others = [master.clone() for master in masters]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(BackendError, match="must be given before"), torch.cuda.graph(graph):
        plan.cast(others)
    torch.cuda.synchronize()
    plan.cast(others)


def test_a_step_takes_no_memory() -> None:
    """After the first, steps neither allocate from torch nor from CuPy."""
    import cupy

    plan, _, _ = plan_of(40)
    step(plan)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    pool = cupy.get_default_memory_pool().total_bytes()
    for _ in range(5):
        step(plan)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert cupy.get_default_memory_pool().total_bytes() == pool


def test_a_step_does_not_wait() -> None:
    """A step returns while the GPU is still busy with what came before it."""
    plan, weights, masters = plan_of(12)
    plan.cast()
    with while_busy():
        step(plan)
    assert_cast(weights, masters)


def test_decoding_does_not_wait() -> None:
    """A weight is decoded behind what the GPU still has to do, and the host goes on."""
    master = draw_values("normal", 64 * 256, 1).view(64, 256)
    weight = zerocast.quantize(master.cuda(), NVFP4, dtype=torch.bfloat16)
    weight.dequantize()
    with while_busy():
        values = weight.dequantize()
    assert_same_bytes(values, reference(master, NVFP4, torch.bfloat16).dequantize(), "values")


def test_a_scale_of_the_callers_does_not_wait() -> None:
    """Delayed scaling by a function of the caller's makes the host wait for nothing, either."""
    recipe = zerocast.DelayedScaling(amax_compute_algo=lambda history: history.mean())
    weights = [zerocast.empty((64, 256), recipe, device="cuda") for _ in range(3)]
    masters = [torch.randn(64, 256, device="cuda") for _ in weights]
    plan = zerocast.CastPlan(weights, masters, [0] * 3)
    plan.cast()
    with while_busy():
        plan.cast()
    with zerocast.use_backend("reference"):
        for i, master in enumerate(masters):
            expected = zerocast.empty((64, 256), recipe)
            for _ in range(2):
                zerocast.quantize_master_weights([expected], [master.cpu()], [0])
            zerocast.post_all_gather_processing([weights[i]])
            zerocast.post_all_gather_processing([expected])
            assert_same_storage(weights[i], expected, f"weight {i}")


THREAD = """
import threading, torch, zerocast
recipe = zerocast.NVFP4BlockScaling()
weight = zerocast.quantize(torch.randn(64, 256, device="cuda"), recipe, dtype=torch.bfloat16)
expected = weight.dequantize()
made = []
thread = threading.Thread(target=lambda: made.append(weight.dequantize()))
thread.start()
thread.join()
assert torch.equal(made[0], expected)
layer = torch.nn.Sequential(torch.nn.Linear(256, 64, device="cuda", dtype=torch.bfloat16))
zerocast.nn.convert(layer, recipe)
x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
layer(x).sum().backward()
assert x.grad is not None
print("every thread")
"""


def test_a_thread_whose_first_call_is_ours() -> None:
    """In a fresh process a thread that has called CUDA for nothing yet decodes a weight, and so
    does autograd's.
    """
    run = subprocess.run(
        [sys.executable, "-c", THREAD], capture_output=True, text=True, timeout=120
    )
    assert "every thread" in run.stdout, run.stderr


def test_a_plan_made_on_another_stream() -> None:
    """A launch on one stream waits for the tables that a plan has sent on another."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        masters = [torch.randn(64, 256, device="cuda")]
        weights = [zerocast.empty((64, 256), NVFP4, device="cuda")]
        streams[0].synchronize()
        torch.cuda._sleep(500_000_000)
        plan = zerocast.CastPlan(weights, masters, [0])
    with torch.cuda.stream(streams[1]):
        step(plan)
    assert_cast(weights, masters)


@pytest.mark.slow
@each("nvfp4", "current", "mxfp8")
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
        operand = tensor_operand(storage, 0, Extent(end - size, end), Amaxes.whole(storage, amax))
        backend = backend_for(storage.device)
        backend.partial_amax([operand], masters)()
        backend.partial_cast(recipe.numerics, [operand], masters)()
        return [each.block_amax for each in operand.cast_planes], storage

    (amaxes, storage), (expected, few) = cast_end_of(rows), cast_end_of(64)
    for plane, whole, tail in zip(storage.cast_planes, amaxes, expected, strict=True):
        assert_same_bytes(whole[-len(tail) :], tail, f"{plane.name} amaxes")
    for name in storage.gathered:
        codes, tail = storage.buffers[name].view(-1), few.buffers[name].view(-1)
        assert_same_bytes(codes[-len(tail) :], tail, name)
        assert not codes[: len(codes) - len(tail)].any()


# --- fused operations ---


@pytest.mark.parametrize("shape", [(1, 32), (130, 288), (257, 4096), (1000, 544)], ids=str)
@pytest.mark.parametrize("name", fused_ops.RECIPES)
@pytest.mark.parametrize("function", fused_ops.FUNCTIONS)
def test_codes_of_fused_ops(function: str, name: str, shape: tuple[int, int]) -> None:
    """Both copies, and each alone, are what the reference makes of the rounded result."""
    x = fused_ops.source(function, shape, "normal", 2).bfloat16().cuda()
    for usage in fused_ops.USAGES:
        quantizer = fused_ops.quantizer_of(fused_ops.RECIPES[name], usage, "cuda")
        what = f"{function}, {name}, {shape}, {usage}"
        fused_ops.assert_fused(backend_for(x.device), function, quantizer, x, what)


@pytest.mark.parametrize("function", fused_ops.FUNCTIONS)
def test_bits_of_fused_ops(function: str) -> None:
    """Every BF16 input, and rows of normal values: the bits of the native loops."""
    inputs = [fused_ops.source(function, shape, "normal", 1) for shape in ((77, 4098), (5, 10))]
    if function not in fused_ops.NORMS:
        inputs.append(fused_ops.every_bfloat16())
    for x in inputs:
        given = fused_ops.parameters(function, x.shape[1] // (2 if function == "swiglu" else 1), 1)
        made = apply_fused(
            FusedOp(function), x.cuda(), **{name: t.cuda() for name, t in given.items()}
        )
        with zerocast.use_backend(CpuBackend()):
            expected = apply_fused(FusedOp(function), x, **given)
        assert made.output is not None
        assert expected.output is not None
        assert_same_bytes(made.output, expected.output, f"{function} of {tuple(x.shape)}")


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


OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
}
"""By which Open MPI starts four ranks for root, as in a container, and on fewer cores. MPICH, which
does so anyway, knows none of them."""


def test_mpi_ranks_on_one_gpu() -> None:
    """Four MPI processes that share the GPU hold the unsharded bytes, through host memory."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    command = ["mpiexec", "-n", "4", sys.executable, "-c", RANK]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=200, env=os.environ | OPEN_MPI
        )
    except FileNotFoundError:
        pytest.skip("there is no mpiexec")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same bytes on 4") == 4, done.stdout
