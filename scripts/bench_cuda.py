"""How fast are the CUDA kernels, and how fast could this GPU's memory let them be?

For sets of weights (bench_frame.py) and rank 0 of 1 and 64 it measures, by events on the stream and
as medians,

    the memory    our kernel that only reads, and the driver's copy and fill, in the same run
    each step     memset, amax, scale, cast, transpose: time; bytes that must move; bytes that
                  move, by count of what the launch touches, tables included; the share of the
                  bound, which is the time that the memory takes for the bytes that must move
    the host      microseconds until a step's calls have returned
    others        torch eager and compiled, doing the same maths on the largest weight
    one by one    our own kernels launched weight by weight: a re-enactment of how a library
                  without multi-tensor kernels would launch, and no other project's code

Each is a row of its own (bench_rows.py), written to OUTPUT.jsonl as soon as it is found; OUTPUT.md
is the page of all rows that are there. With --transformer-engine CHECKOUT it also compiles that
project's own kernels out of a checkout, or links what is built there, and runs them on the same
tensors (bench_transformer_engine.py). With --once it measures nothing, and runs steps for a
profiler. Two ways need no GPU: --host, the host's time alone (bench_host.py); and --rehearse, a few
rows of small weights on the tests' emulation.
"""

from __future__ import annotations

import argparse
import atexit
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import bench_transformer_engine
import build_transformer_engine
import torch
from bench_frame import (
    SETS,
    WORLD_SIZES,
    Memory,
    RankSteps,
    Shape,
    Work,
    device_clock,
    host_clock,
    medians,
    prepare,
    rank_0,
    run_all,
)
from bench_host import PLANS, host_seconds, host_time, without_device
from bench_others import PLAIN, TORCHAO, torchao_blocks, torchao_casts
from bench_rows import Result, Rows, supervise
from cuda_report import markdown

import zerocast
from zerocast.backends import backend_for
from zerocast.backends.cuda import CudaBackend, Kernel, KernelArguments, Launcher
from zerocast.recipes import Recipe

RECIPES: dict[str, Recipe] = {
    "nvfp4": zerocast.NVFP4BlockScaling(),
    "fp8": zerocast.Float8CurrentScaling(),
    "fp8_blockwise": zerocast.Float8BlockScaling(),
    "mxfp8": zerocast.MXFP8BlockScaling(),
    "fp8_rowwise": zerocast.Float8RowwiseScaling(),
    "fp8_delayed": zerocast.DelayedScaling(),
    "nvfp4_4over6": zerocast.NVFP4BlockScaling(nvfp4_4over6="weights"),
    "nvfp4_stochastic": zerocast.NVFP4BlockScaling(
        fp4_quant_fwd_weight=zerocast.QParams(fp4_2d_quantization=True, stochastic_rounding=True)
    ),
}
PARTS = ("speed", "others")
"""Of the benchmark, beside the comparison with TransformerEngine."""

ROW_LIMIT = 90.0
"""Seconds after which a row counts as hung."""

Seconds = Callable[[Work], float]
"""Measures a work on a machine."""


@dataclass(frozen=True)
class Machine:
    """What the kernels run on.

    Attributes:
        device: of the tensors.
        clock: measures the seconds of a work.
        wait: returns when everything that was launched is done.
        sets: of weights, by name.
        probe_bytes: by which the memory is measured.
        flush_bytes: written before each measurement, so that nothing is read from a cache.
    """

    backend: CudaBackend
    device: str
    clock: Callable[[Work], float]
    wait: Callable[[], None]
    sets: Mapping[str, Sequence[Shape]]
    probe_bytes: int
    flush_bytes: int

    def seconds(self, rounds: int, *, flushing: bool = False) -> Seconds:
        """Return a function that measures the median time of a work."""
        flushed = torch.empty(
            self.flush_bytes if flushing else 0, dtype=torch.uint8, device=self.device
        )
        return lambda work: medians({"work": work}, rounds, self.clock, flushed.zero_)["work"]

    def free(self) -> None:
        """Give the memory of the row before back."""
        if self.device == "cuda":
            torch.cuda.empty_cache()


def gpu() -> Machine:
    """Return the current GPU."""
    wait = torch.cuda.synchronize
    return Machine(cuda_backend(), "cuda", device_clock, wait, SETS, 4 << 30, 512 << 20)


def emulation() -> Machine:
    """Return the tests' emulation of one, whose times say nothing, and small weights."""
    from tests.cuda_emulation.emulator import BUILDS, Emulator

    if BUILDS not in os.environ:
        builds = tempfile.TemporaryDirectory(prefix="zerocast-emulation-")
        os.environ[BUILDS] = builds.name
        atexit.register(builds.cleanup)
    sets = {name: [(32, 64), (128, 128)] for name in SETS}
    return Machine(CudaBackend(Emulator()), "cpu", host_clock, lambda: None, sets, 1 << 17, 1)


class Uploads:
    """A launcher that counts the bytes of the tables that pass through it to another."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._bytes = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._launcher, name)

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        """Upload as the other launcher does, and count."""
        self._bytes += table.nbytes
        return self._launcher.upload(table)

    def taken(self) -> int:
        """Return the bytes since this was last asked."""
        taken, self._bytes = self._bytes, 0
        return taken


def prepare_rank_0(
    backend: CudaBackend, recipe: Recipe, shapes: Sequence[Shape], world_size: int, device: str
) -> RankSteps:
    """Make weights and random masters of the first of ``world_size`` ranks, and its launches."""
    extents = rank_0(shapes, world_size)
    flat = torch.randn(sum(extent.size for extent in extents), device=device)
    pieces = iter(flat.split([extent.size for extent in extents if extent]))
    masters = [next(pieces) if extent else None for extent in extents]
    counting = Uploads(backend.launcher)
    counted = CudaBackend(counting, on_trial=backend.on_trial)
    place = torch.device(device)
    return prepare(counted, recipe, shapes, extents, masters, place, counting.taken)


def one_by_one(backend: CudaBackend, recipe: Recipe, work: RankSteps) -> Work:
    """Return amax and cast with separate launches for each weight."""
    launches = [
        launch
        for shard in work.shards
        if shard.extent
        for launch in (
            backend.partial_amax([shard], work.masters),
            backend.partial_cast(recipe.numerics, [shard], work.masters),
        )
    ]
    return lambda: run_all(launches)


def probe(machine: Machine, rounds: int) -> Result:
    """Measure the memory."""
    backend, size, seconds = machine.backend, machine.probe_bytes, machine.seconds(rounds)
    source = torch.zeros(size // 4, dtype=torch.float32, device=machine.device)
    target = torch.empty_like(source)
    found = torch.zeros(1, dtype=torch.int32, device=machine.device)
    kernel = Kernel("probe_read", 256)
    handle = backend.launcher.prepare(kernel)
    pieces = size >> 17
    arguments = KernelArguments([source.data_ptr(), found.data_ptr(), pieces])

    def read() -> None:
        backend.launcher.launch(kernel, handle, pieces, arguments)

    memory = Memory(
        (pieces << 17) / seconds(read),
        size / seconds(lambda: target.zero_()),
        2 * size / seconds(lambda: target.copy_(source)),
    )
    return asdict(memory)


def others(machine: Machine, recipe: str, rounds: int) -> Result:
    """Measure elements a second on the largest weight: ours, torch's and torchao's, as they are and
    compiled.
    """
    shape = max(next(iter(machine.sets.values())), key=math.prod)
    work = prepare_rank_0(machine.backend, RECIPES[recipe], [shape], 1, machine.device)
    (x,) = (m.view(s.shape) for m, s in zip(work.masters.tensors, work.storages, strict=True))
    casts: dict[str, Work] = {"zerocast": lambda: run_all(work.cast)}
    theirs = {"torch": PLAIN[recipe]}
    if (torchao := torchao_casts().get(recipe.upper())) is not None:
        theirs[f"torchao {TORCHAO}"] = torchao
    for name, cast in theirs.items():
        casts[f"{name}, eager"] = partial(cast, x)
        if machine.device == "cuda":
            casts[f"{name}, compiled"] = partial(torch.compile(cast), x)
    seconds = machine.seconds(rounds)
    return {name: x.numel() / seconds(run) for name, run in casts.items()}


def blocks_beside_torchao(machine: Machine, rounds: int) -> Result:
    """Measure bytes a second on the largest weight in 128x128 blocks: ours, and torchao's kernel on
    FP32 and, as its users call it, on BF16.
    """
    if (theirs := torchao_blocks()) is None:
        return {"skipped": "torchao is not installed"}
    shape, recipe = max(next(iter(machine.sets.values())), key=math.prod), RECIPES["fp8_blockwise"]
    work = prepare_rank_0(machine.backend, recipe, [shape], 1, machine.device)
    x = next(iter(work.masters.tensors)).view(shape)
    rounded, seconds = x.bfloat16(), machine.seconds(rounds, flushing=True)
    return {
        "zerocast": 5 * x.numel() / seconds(work.steps["one pass"]),
        "torchao, FP32": 5 * x.numel() / seconds(lambda: theirs(x)),
        "torchao, BF16": 3 * x.numel() / seconds(lambda: theirs(rounded)),
    }


def run_once(machine: Machine, steps: Sequence[str]) -> None:
    """Run steps, each a ``RECIPE:STEP``, on eight of the largest weight, after a whole cast: what a
    profiler counts that begins when it is told.
    """
    shapes = [max(next(iter(machine.sets.values())), key=math.prod)] * 8
    for each in steps:
        recipe, step = each.split(":")
        machine.free()
        work = prepare_rank_0(machine.backend, RECIPES[recipe], shapes, 1, machine.device)
        run_all(work.cast)
        machine.wait()
        with torch.cuda.profiler.profile() if machine.device == "cuda" else nullcontext():
            work.steps[step]()
            machine.wait()


def cuda_backend() -> CudaBackend:
    """Return the backend of the kernels."""
    backend = backend_for(torch.device("cuda"))
    assert isinstance(backend, CudaBackend), "the reference stepped in for the kernels"
    return backend


def measure(machine: Machine, name: str, recipe: str, world_size: int, rounds: int) -> Result:
    """Measure one row of the report: a set, a recipe, a world size."""
    machine.free()
    backend, shapes = machine.backend, machine.sets[name]
    work = prepare_rank_0(backend, RECIPES[recipe], shapes, world_size, machine.device)
    clock = machine.seconds(rounds, flushing=True)
    steps = {}
    launcher = backend.launcher
    for step, launch in work.steps.items():
        seconds = clock(launch)
        must = work.read[step] + work.written[step]
        before = launcher.launches
        launch()
        steps[step] = {
            "seconds": seconds,
            "read": work.read[step],
            "written": work.written[step],
            "moved_over_must": (must + work.tables[step]) / must if must else 1.0,
            "launches": launcher.launches - before + (step == "memset"),
        }
    return {
        "set": name,
        "recipe": recipe,
        "world_size": world_size,
        "weights": len(work.storages),
        "owned": sum(shard.extent.size for shard in work.shards),
        "steps": steps,
        "host_seconds": host_seconds(lambda: run_all(work.cast), rounds, machine.wait),
        "one_by_one_seconds": clock(one_by_one(backend, RECIPES[recipe], work)),
    }


def compare(
    machine: Machine, checkout: Path, name: str, recipe: str, world_size: int, rounds: int
) -> Result:
    """Measure TransformerEngine beside ours: one row."""
    machine.free()
    capability = torch.cuda.get_device_capability()
    arch = build_transformer_engine.architecture(capability)
    driver = bench_transformer_engine.Driver(build_transformer_engine.library(checkout, arch))
    shapes = machine.sets[name]
    work = prepare_rank_0(machine.backend, RECIPES[recipe], shapes, world_size, machine.device)
    clock = machine.seconds(rounds, flushing=True)
    row = {"set": name, "recipe": recipe, "world_size": world_size}
    return row | bench_transformer_engine.compare(driver, recipe, work, capability, clock)


def works(machine: Machine, options: argparse.Namespace) -> dict[str, Callable[[], Result]]:
    """Return what makes each row, the most telling first."""
    rounds = options.rounds
    found: dict[str, Callable[[], Result]] = {
        "machine": partial(describe, machine, rounds),
        "memory": partial(probe, machine, rounds),
    }
    rows = list(product(options.sets, options.ranks, options.recipes))
    if "speed" in options.parts:
        for name, ranks, recipe in rows:
            row = f"speed {name} {ranks} {recipe}"
            found[row] = partial(measure, machine, name, recipe, ranks, rounds)
        for count in PLANS if machine.device == "cuda" else ():
            found[f"host {count}"] = partial(host_time, machine.backend, count, 20 * rounds)
    if "others" in options.parts:
        for recipe in PLAIN:
            found[f"others {recipe}"] = partial(others, machine, recipe, rounds)
        found["peers torchao 128x128"] = partial(blocks_beside_torchao, machine, rounds)
    if options.transformer_engine:
        checkout = options.transformer_engine.resolve()
        for name, ranks, recipe in rows:
            if recipe in bench_transformer_engine.SCHEMES:
                row = f"transformer_engine {name} {ranks} {recipe}"
                found[row] = partial(compare, machine, checkout, name, recipe, ranks, rounds)
    return found


def describe(machine: Machine, rounds: int) -> Result:
    """Return what the page says of the machine."""
    on_gpu = machine.device == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "no GPU: a rehearsal on an emulation",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "driver": driver_version() if on_gpu else "none",
        "machine": platform.platform(),
        "rounds": rounds,
    }


def report_of(rows: Rows, checkout: Path | None) -> Result | None:
    """Return the report of the rows that are there; None before the memory was measured."""
    results, failures = rows.results(), rows.failures()
    if not {"machine", "memory"} <= results.keys():
        return None

    def of(kind: str) -> dict[str, Result]:
        return {row: result for row, result in results.items() if row.split()[0] == kind}

    memory = Memory(**results["memory"])
    for result in of("speed").values():
        for step in result["steps"].values():
            step["bytes"] = step["read"] + step["written"]
            step["of_bound"] = memory.seconds(step["read"], step["written"]) / step["seconds"]
    report = {
        **results["machine"],
        "memory": asdict(memory),
        "host": list(of("host").values()),
        "rows": list(of("speed").values()),
        "others": {row.split()[1]: result for row, result in of("others").items()},
        "failed": failures,
        "peers": of("peers"),
    }
    if checkout is not None:
        beside = list(of("transformer_engine").values())
        for row, reason in failures.items():
            if row.startswith("transformer_engine "):
                _, name, ranks, recipe = row.split()
                place = {"set": name, "world_size": int(ranks), "recipe": recipe}
                beside.append({**place, "reason": reason})
        report["transformer_engine"] = {
            "version": build_transformer_engine.version(checkout),
            "rows": beside,
        }
    return report


def main(arguments: Sequence[str]) -> int:
    """Let processes measure the rows, then write and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(WORLD_SIZES))
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--output", type=Path, default=Path("bench_cuda"), help="without suffix: .jsonl and .md"
    )
    parser.add_argument("--host", action="store_true", help="the host's time only, without a GPU")
    parser.add_argument("--rehearse", action="store_true", help="small weights on an emulation")
    parser.add_argument(
        "--transformer-engine",
        type=Path,
        metavar="CHECKOUT",
        help="where that project lies, to run its kernels beside ours",
    )
    parser.add_argument(
        "--once", nargs="+", metavar="RECIPE:STEP", help="run these once, for a profiler"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.host:
        print(*without_device(options.rounds), sep="\n")
        return 0
    if not (options.rehearse or torch.cuda.is_available()):
        print("bench_cuda.py needs a CUDA device; --host measures what can be measured without.")
        return 1
    if options.once:
        run_once(emulation() if options.rehearse else gpu(), options.once)
        return 0
    rows = Rows(options.output.with_suffix(".jsonl"))
    if options.worker:
        machine = emulation() if options.rehearse else gpu()
        return 0 if rows.do(works(machine, options)) else 1
    command = [sys.executable, str(Path(__file__)), *arguments, "--worker"]
    done = supervise(rows, command, ROW_LIMIT)
    if (report := report_of(rows, options.transformer_engine)) is not None:
        page = markdown(report)
        options.output.with_suffix(".md").write_text(page)
        print(page)
    return 0 if done and not rows.failures() else 1


def driver_version() -> str:
    """Return the newest CUDA that the driver knows."""
    from cupy.cuda import runtime

    version = runtime.driverGetVersion()
    return f"{version // 1000}.{version % 1000 // 10}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
