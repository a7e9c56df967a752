"""The rows of the queue (gpu_queue.py): what each trains, compares and measures.

    train     FSDP2 over one rank of NCCL: losses, tokens a second, memory, who multiplies, and the
              bytes that are gathered at the end
    zero      ZeroOptimizer, alone and on ranks that share the GPU: its weights' bytes; a step in a
              CUDA graph, a checkpoint, an export
    qat       the methods of examples/qat.py at the size of ``train``, with quantized weights
    kernels   the steps of a cast, one variant of its kernels a row

Bytes are compared with ``zerocast.quantize`` of the whole master: of all weights on this device, of
one layer's on the host, by the reference. A wrong one raises, and the row has failed. A rehearsal
runs the same lines on the CPU, with small shapes, over gloo, and NVFP4's casts under the tests'
emulation of a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import bench_cuda
import torch
import torch.distributed as dist
from bench_frame import RankSteps, prepare, run_all
from bench_rows import Result, Rows
from gpu_model import ByteLlama, load_text
from gpu_queue import ROWS, limit
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import zerocast
from examples.gpt.check import first_difference, unsharded_cast
from examples.gpt.data import sample
from examples.gpt.launch import launched_ranks
from zerocast.backends import backend_for
from zerocast.backends.cuda import CudaBackend, Launcher
from zerocast.comm import Communicator
from zerocast.export import load_pretrained, save_pretrained
from zerocast.layout import Extent
from zerocast.numerics import Backend
from zerocast.optim import FusedAdamW, ZeroOptimizer

RECIPES = {
    "bf16": None,
    "nvfp4": zerocast.NVFP4BlockScaling(),
    "fp8": zerocast.Float8CurrentScaling(),
    "mxfp8": zerocast.MXFP8BlockScaling(),
    "mxfp4": zerocast.MXFP4BlockScaling(scale_rounding="even"),
}
LR, PRETRAINING_LR = 3e-4, 1e-3
DTYPE = torch.bfloat16
SIZES = {"layers": 16, "width": 1024, "heads": 16, "context": 1024}
"""Of the model that is trained on a GPU, of 80 GiB or more: 187 M parameters."""
SMALL = {"layers": 2, "width": 64, "heads": 4, "context": 32}
RESIDENT = {"nvfp4_stochastic": 5, "nvfp4_4over6": 6, "nvfp4": 6, "mxfp8": 5}
"""By recipe the thread blocks of its casts that a multiprocessor holds."""


@dataclass(frozen=True)
class Place:
    """Where rows run, and how much they do.

    Attributes:
        machine: the device, and the kernels' backend.
        folder: of the rows.
        sizes: of the model; that of ``zero`` has a fourth of the layers.
        batch: sequences of a step, over all ranks.
        steps: of a training; a sixth of them warm up, and are not timed.
    """

    machine: bench_cuda.Machine
    folder: Path
    sizes: dict[str, int]
    batch: int
    steps: int

    @property
    def on_gpu(self) -> bool:
        """Whether this is no rehearsal."""
        return self.machine.device == "cuda"

    def clock(self) -> float:
        """The time when the device has nothing to do."""
        self.machine.wait()
        return time.perf_counter()

    def backend(self, recipe: str) -> AbstractContextManager[object]:
        """In which casts of NVFP4 are launched as on a GPU."""
        emulated = recipe == "nvfp4" and not self.on_gpu
        return zerocast.use_backend(self.machine.backend) if emulated else nullcontext()

    def model(self, **sizes: int) -> ByteLlama:
        """One in FP32, always of the same values."""
        torch.manual_seed(0)
        with torch.device(self.machine.device):
            return ByteLlama(**{**self.sizes, **sizes})

    def text(self, draw: torch.Generator, *, held: bool = False, ranks: int = 1) -> list:
        """Inputs and targets of a step, a rank's part of them."""
        corpus, _ = load_text()
        part = corpus.validation if held else corpus.training
        text = sample(part, self.batch // ranks, self.sizes["context"], draw)
        return [each.to(self.machine.device) for each in text]


# --- bytes ---


def equal(name: str, weight: zerocast.QuantizedTensor, master: torch.Tensor) -> int:
    """How many bytes of a weight were compared with the casts of its whole ``master``."""
    stored = weight.quantized_storage
    casts = {"this device": zerocast.quantize(master, stored.recipe, dtype=stored.dtype)}
    if ".0." in name:
        casts["the host"] = unsharded_cast(master.cpu(), stored)
    count = 0
    for where, cast in casts.items():
        for buffer, expected in cast.quantized_storage.buffers.items():
            found = stored.buffers[buffer]
            count += found.nbytes
            wrong = first_difference(f"{name}.{buffer}", found.cpu(), expected.cpu())
            assert wrong is None, f"WRONG beside {where}: {wrong}"
    return count


def equal_zero(model: ByteLlama, optimizer: ZeroOptimizer) -> Result:
    """Compare all weights of a ZeroOptimizer. Collective."""
    zerocast.verify(model)
    weights = {name: p for name, p in model.named_parameters() if name.startswith("blocks")}
    matrices = {name: weight for name, weight in weights.items() if weight.ndim == 2}
    masters = {name: optimizer.gather_master(weight) for name, weight in matrices.items()}
    return {"bytes_compared": sum(equal(name, matrices[name], masters[name]) for name in masters)}


def equal_sharded(model: ByteLlama) -> Result:
    """Compare all weights that FSDP2 gathers. Collective."""
    zerocast.sharded.precompute_scales_for_fsdp(model)  # reshards, too
    masters = {
        name: parameter.full_tensor()
        for name, parameter in model.named_parameters()
        if isinstance(parameter.to_local(), zerocast.sharded.MasterWeight)
    }
    for module in (*model.blocks, model):
        module.unshard()
    weights = dict(model.named_parameters())
    return {"bytes_compared": sum(equal(name, weights[name], masters[name]) for name in masters)}


# --- train and qat ---


def sharded(place: Place, recipe: str, how: str = "eager", state: dict | None = None) -> ByteLlama:
    """FP32 masters under FSDP2, gathered in codes of ``recipe``."""
    model = place.model()
    model.load_state_dict(state or model.state_dict())
    if recipe == "torchao":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=lambda _, name: name != "head")
    elif RECIPES[recipe] is not None:
        zerocast.nn.convert(model, RECIPES[recipe], weights="master", filter_fqns=["head"])
    policy = MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32)
    for block in model.blocks:
        if how == "compiled":
            block.compile(backend="inductor" if place.on_gpu else "aot_eager")
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of the next byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fit(
    place: Place, model: ByteLlama, recipe: str, *, steps: int = 0, lr: float = LR,
    products: bool = False, teacher: ByteLlama | None = None,
) -> Result:  # fmt: skip
    """Train by AdamW; its losses, its speed, and the loss on held-out text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=True)  # as by default on GPUs
    draw, losses, began = torch.Generator().manual_seed(0), [], 0.0
    warm, steps, known = place.steps // 6, steps or place.steps, RECIPES.get(recipe)
    for step in range(steps):
        if step == warm:
            began = place.clock()
        inputs, targets = place.text(draw)
        with zerocast.autocast(recipe=known) if products and known else nullcontext():
            logits = model(inputs)
        loss = cross_entropy(logits, targets)
        if teacher is not None:
            with torch.no_grad():
                wanted = teacher(inputs).flatten(0, 1).log_softmax(-1)
            own = logits.flatten(0, 1).log_softmax(-1)
            loss = F.kl_div(own, wanted, log_target=True, reduction="batchmean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / warm)
        optimizer.step()
        optimizer.zero_grad()
        if known is not None:
            zerocast.sharded.precompute_scales_for_fsdp(model)
        losses.append(loss.detach())
    tokens = (steps - warm) * place.batch * place.sizes["context"]
    found = {"tokens_a_second": round(tokens / (place.clock() - began)), "text": load_text()[1]}
    return found | {"losses": [round(loss.item(), 4) for loss in losses], **validate(place, model)}


@torch.no_grad()
def validate(place: Place, model: ByteLlama) -> Result:
    """The mean loss on batches of held-out text, in nats a byte."""
    draw = torch.Generator().manual_seed(0)
    batches = [place.text(draw, held=True) for _ in range(place.steps // 6)]
    losses = [cross_entropy(model(inputs), targets).item() for inputs, targets in batches]
    return {"validation": round(sum(losses) / len(losses), 4)}


def train(place: Place, recipe: str, products: str, how: str) -> Result:
    """A row of ``train``."""
    if recipe == "torchao" and find_spec("torchao") is None:
        return {"skipped": "torchao is not installed"}
    if place.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model = sharded(place, recipe, how)
    found = fit(place, model, recipe, products=products == "products")
    if place.on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    if RECIPES.get(recipe) is not None:
        where = {"device": place.machine.device, "dtype": DTYPE}
        explained = zerocast.nn.explain(model, RECIPES[recipe], **where).products
        by_library = sum(product.engine == "library" for product in explained)
        found["products_on_codes"] = f"{by_library} of {len(explained)}, under autocast"
        found |= equal_sharded(model)
    return found


def qat(place: Place, method: str, recipe: str = "bf16") -> Result:
    """A row of ``qat``. What other rows begin from is kept in the folder of the rows."""

    def kept(name: str) -> Path:
        return place.folder / f"qat_{name}.pt"

    begins = "BF16" if method == "PTC-of-BF16" else "start"
    if method != "start" and not kept(begins).exists():
        qat(place, begins)  # its row was done on a machine that is gone
    state = None if method == "start" else torch.load(kept(begins))
    model = sharded(place, recipe, state=state)
    if method.startswith("PTC"):
        return validate(place, model) | equal_sharded(model)
    teacher = sharded(place, "bf16", state=state) if method == "QAD" else None
    most = {"steps": 4 * place.steps, "lr": PRETRAINING_LR} if method == "start" else {}
    found = fit(place, model, recipe, teacher=teacher, **most)
    if recipe != "bf16":
        return found | equal_sharded(model)
    values = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    torch.save(values, kept("new"))
    kept("new").replace(kept(method))
    return found


# --- zero ---


def zero_model(
    place: Place, recipe: str, inner: type = torch.optim.AdamW, **options: object
) -> tuple[ByteLlama, ZeroOptimizer]:
    """A model that holds codes of ``recipe``, and its optimizer."""
    model = place.model(layers=max(1, place.sizes["layers"] // 4)).to(DTYPE)
    zerocast.nn.convert(model, RECIPES[recipe], weights="quantized", filter_fqns=["head"])
    return model, ZeroOptimizer(model.named_parameters(), inner, lr=LR, **options)


def steps_of(
    place: Place, model: ByteLlama, optimizer: ZeroOptimizer, steps: range,
    comm: Communicator | None = None,
) -> None:  # fmt: skip
    """Make steps, each on this rank's part of its text. Collective."""
    rank, ranks = (comm.rank, comm.size) if comm else (0, 1)
    for step in steps:
        draw = torch.Generator().manual_seed(step * ranks + rank)
        inputs, targets = place.text(draw, ranks=ranks)
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def alone(
    place: Place, recipe: str, comm: Communicator | None = None, inner: type = torch.optim.AdamW
) -> Result:
    """Train, and compare. Collective."""
    model, optimizer = zero_model(place, recipe, inner, group=comm, verify="hash")
    began = place.clock()
    steps_of(place, model, optimizer, range(place.steps // 3), comm)
    return {"seconds": round(place.clock() - began, 3), **equal_zero(model, optimizer)}


def graph(place: Place, recipe: str) -> Result:
    """Capture the optimizer's step in a CUDA graph, and replay it on other gradients."""
    # AdamW asks for a GPU where its step can be captured.
    model, optimizer = zero_model(place, recipe, capturable=place.on_gpu)
    steps_of(place, model, optimizer, range(2))  # launches are made ready, gradients have memory
    if place.on_gpu:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            optimizer.step()
        optimizer.step = captured.replay
    steps_of(place, model, optimizer, range(2, 5))
    place.clock()
    return equal_zero(model, optimizer)


def checkpoint(place: Place, recipe: str) -> Result:
    """Save, load into a new optimizer, and go on: the same masters, and their casts."""
    pairs = [zero_model(place, recipe) for _ in range(2)]
    steps_of(place, *pairs[0], range(1))
    with tempfile.TemporaryDirectory() as folder:
        zerocast.checkpoint.save(f"{folder}/saved", pairs[0][1], pairs[0][0])
        zerocast.checkpoint.load(f"{folder}/saved", pairs[1][1], pairs[1][0])
    for pair in pairs:
        steps_of(place, *pair, range(1, 2))
    for own, other in zip(*(model.parameters() for model, _ in pairs), strict=True):
        masters = pairs[0][1].gather_master(own), pairs[1][1].gather_master(other)
        assert torch.equal(*masters), "WRONG: a master differs after loading"
    return equal_zero(*pairs[1])


def export(place: Place, recipe: str) -> Result:
    """Export weights of the device, and compare the values that a server reads."""
    model, optimizer = zero_model(place, recipe)
    steps_of(place, model, optimizer, range(1))
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, f"{folder}/export", dialect="compressed-tensors/nvfp4", dtype=DTYPE)
        exported = load_pretrained(f"{folder}/export", dtype=DTYPE)
    for name, weight in exported.items():
        if isinstance(weight, zerocast.QuantizedTensor):
            own = model.get_parameter(name).dequantize().cpu()
            wrong = first_difference(name, weight.dequantize(), own)
            assert wrong is None, f"WRONG in the export: {wrong}"
    return equal_zero(model, optimizer)


def on_ranks(place: Place, kind: str, ranks: str, recipe: str) -> Result:
    """Processes that share the device; what rank 0 found."""
    if kind == "mpi" and (find_spec("mpi4py") is None or shutil.which("mpiexec") is None):
        return {"skipped": "mpi4py or mpiexec is not installed"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr", "127.0.0.1", "--nproc-per-node"]
    mpi = ["mpiexec", "-n", ranks, sys.executable, "-m", "mpi4py"]
    command = [*torchrun, ranks] if kind == "gloo" else mpi
    command += [str(Path(__file__)), "zero", str(place.folder), "--rank", recipe]
    # Open MPI starts ranks for root, as in a container, and on fewer cores, if it is told to; gloo
    # needs no name of the host where it knows the interface.
    allowed = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        command + ["--rehearse"] * (not place.on_gpu), stdout=subprocess.PIPE, text=True,
        timeout=0.8 * limit("zero"), env=os.environ | allowed,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the ranks ended with {done.returncode}; their words are in the log")
    return json.loads(done.stdout.splitlines()[-1])


def zero(place: Place, what: str, ranks: str, recipe: str) -> Result:
    """A row of ``zero``."""
    fused, shared = partial(alone, inner=FusedAdamW), partial(on_ranks, ranks=ranks)
    known = {"nccl": alone, "fused": fused, "graph": graph, "checkpoint": checkpoint,
             "export": export}  # fmt: skip
    return known[what](place, recipe) if what in known else shared(place, what, recipe=recipe)


# --- kernels ---


def kernels(place: Place, weights: str, recipe: str, variant: str) -> Result:
    """Time the steps of a cast by one variant, and compare what they write with what the kernels in
    use write, or these with the reference, by hash.
    """
    machine, launcher = place.machine, place.machine.backend.launcher
    processors = torch.cuda.get_device_properties(0).multi_processor_count if place.on_gpu else 1
    if variant == "present":
        with zerocast.use_backend("reference"):
            expected = hashed(backend_for(torch.device("cpu")), recipe, "cpu")
    else:
        expected = hashed(machine.backend, recipe, machine.device)
    copy, usual = bench_cuda.probe(machine, 5)["copy"], launcher.max_grid
    machine.free()
    backend, scales = CudaBackend(launcher, on_trial=variant == "ahead"), variant == "scales"
    scheme, shapes, found = bench_cuda.RECIPES[recipe], machine.sets[weights], {}
    seconds = machine.seconds(5, flushing=True)
    try:
        if variant in ("staying", "ahead"):
            launcher.max_grid = RESIDENT[recipe] * processors
        own = hashed(backend, recipe, machine.device, scales=scales)
        work = bench_cuda.prepare_rank_0(backend, scheme, shapes, 1, machine.device)
        work = writing_scales(work, launcher) if scales else work
        for step, run in work.steps.items():
            took = seconds(run)
            share = (work.read[step] + work.written[step]) / took / copy
            found[step] = {"seconds": float(f"{took:.5g}"), "of_copy": round(share, 3)}
    finally:
        launcher.max_grid = usual
    assert own == expected, f"WRONG: the bytes have the hash {own}, not {expected}; {found}"
    return {"steps": found, "copy": copy, "bytes": "equal", "hash": own}


def writing_scales(work: RankSteps, launcher: Launcher) -> RankSteps:
    """One pass that writes scales in place of amaxes, and is all of the cast. It knows of no
    padding between rows of scales, as columns are a multiple of 128; that below is written here.
    """
    whole = []
    for shard in work.shards:
        for plane in shard.planes:
            plane.scale_inv.zero_()
        planes = tuple(replace(plane, block_amax=plane.scale_inv) for plane in shard.planes)
        whole.append(replace(shard, planes=planes, whole=shard.extent))
    numerics = work.storages[0].recipe.numerics
    launch = CudaBackend(launcher, on_trial=True).partial_amax(whole, work.masters, numerics)
    written = {"one pass": work.written["one pass"] + work.written["scale"]}
    return replace(work, steps={"one pass": launch}, written=written)


def hashed(backend: Backend, recipe: str, device: str, *, scales: bool = False) -> str:
    """A hash of all that a cast of weights of several widths writes."""
    shapes, draw = [(160, 256), (48, 128), (128, 1024)], torch.Generator().manual_seed(0)
    masters = [torch.randn(rows * cols, generator=draw).to(device) for rows, cols in shapes]
    extents, scheme = [Extent(0, len(master)) for master in masters], bench_cuda.RECIPES[recipe]
    work = prepare(backend, scheme, shapes, extents, masters, torch.device(device))
    run_all((writing_scales(work, backend.launcher) if scales else work).cast)
    digest = hashlib.sha256()
    for storage in work.storages:
        for _, buffer in sorted(storage.buffers.items()):
            digest.update(bytes(buffer.cpu().view(torch.uint8).flatten().tolist()))
    return digest.hexdigest()[:16]


# --- the worker ---

STAGES = {"train": train, "zero": zero, "qat": qat, "kernels": kernels}


def do(place: Place, row: str, seen: Result) -> Result:
    """Do a row, say when and on what, and leave no memory to the next."""
    stage, *words = row.split()
    faulthandler.dump_traceback_later(0.9 * limit(stage))  # into the log, before it is killed
    try:
        with place.backend("nvfp4" if "nvfp4" in words else ""):
            return STAGES[stage](place, *words) | {"seen": seen}
    finally:
        faulthandler.cancel_dump_traceback_later()
        torch.compiler.reset()
        gc.collect()
        place.machine.free()


def be_rank(place: Place, recipe: str) -> None:
    """One of the processes of :func:`on_ranks`: rank 0 prints what it found."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # where its launcher is killed
    with launched_ranks() as comm:
        with place.backend(recipe):
            found = alone(place, recipe, comm)
        if comm.rank == 0:
            print(json.dumps(found), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Do the rows of a stage that are not there; or be one rank of such a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=ROWS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="small, without a GPU")
    parser.add_argument("--seen", type=json.loads, default={}, help="noted in each row")
    parser.add_argument("--rank", metavar="RECIPE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    machine = bench_cuda.emulation() if options.rehearse else bench_cuda.gpu()
    sizes = (SMALL, 4, 6) if options.rehearse else (SIZES, 16, 60)
    place = Place(machine, options.directory, *sizes)
    if options.rank:
        be_rank(place, options.rank)
        return 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    transport = "nccl" if place.on_gpu else "gloo"
    dist.init_process_group(transport, store=store, rank=0, world_size=1)
    works = {row: partial(do, place, row, options.seen) for row in ROWS[options.stage]}
    if not Rows(options.directory / "rows.jsonl").do(works):
        return 1  # the device may be in a state in which nothing ends
    dist.destroy_process_group()
    for kept in options.directory.glob("qat_*.pt"):
        kept.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
