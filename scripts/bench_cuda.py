"""How fast are the CUDA kernels, and how fast could this GPU's memory let them be?

For a set of weights (scripts/cuda_sets.py) and rank 0 of 1, 8, 64 and 512 it measures, by events on
the stream and as medians,

    the memory    our kernel that only reads, and the driver's copy and fill, in the same run
    each step     memset, amax, scale, cast, transpose: time; bytes that must move; bytes that
                  move, by count of what the launch touches, tables included; the share of the
                  bound, which is the time that the memory takes for the bytes that must move
    the host      microseconds until a step's calls have returned
    others        torch eager and compiled, doing the same maths on the largest weight
    one by one    our own kernels launched weight by weight: a re-enactment of how a library
                  without multi-tensor kernels would launch, and no other project's code

With --transformer-engine CHECKOUT it also compiles that project's own kernels out of a checkout, or
links what is built there, and runs them on the same tensors (bench_transformer_engine.py). With
--host it needs no GPU: plans of 224 and 5,000 weights whose launches do nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import bench_transformer_engine
import build_transformer_engine
import torch
from bench_others import PLAIN
from cuda_report import host_lines, markdown
from cuda_sets import SETS, WORLD_SIZES, Shape
from cuda_work import STEPS, Work, one_by_one, prepare

import zerocast
from zerocast.backends import backend_for
from zerocast.backends.cuda import Arguments, CudaBackend, Kernel
from zerocast.recipes import Recipe

RECIPES: dict[str, Recipe] = {
    "nvfp4": zerocast.NVFP4BlockScaling(),
    "fp8": zerocast.Float8CurrentScaling(),
    "fp8_blockwise": zerocast.Float8BlockScaling(),
}
PLANS = (224, 5000)
"""Weights of the plans whose host time is taken."""
PROBE_BYTES = 4 << 30
FLUSH_BYTES = 512 << 20
"""Written before each measurement, so that nothing is read from a cache."""


# --- measuring ---


def device_seconds(work: Work, rounds: int, flush: torch.Tensor | None = None) -> float:
    """Median time of ``work`` on the GPU, after one round that is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        if flush is not None:
            flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return median(seconds[1:])


def host_seconds(work: Work, rounds: int, settle: Work = lambda: None) -> float:
    """Median time until ``work`` returns, while nothing waits for the GPU."""
    seconds = []
    for _ in range(rounds + 5):
        settle()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median(seconds[5:])


@dataclass(frozen=True)
class Memory:
    """Bytes a second: reading alone, writing alone, and read plus written by a copy."""

    read: float
    write: float
    copy: float

    def seconds(self, read: int, written: int) -> float:
        """The least time for these bytes: of reading and writing one after the other, and of a copy
        for as much as goes both ways, the shorter.
        """
        apart = read / self.read + written / self.write
        both = min(read, written)
        rest = (read - both) / self.read + (written - both) / self.write
        return min(apart, 2 * both / self.copy + rest)


def probe(backend: CudaBackend, size: int, rounds: int) -> Memory:
    """The memory of this GPU, by ``size`` bytes."""
    source = torch.zeros(size // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    found = torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel = Kernel("probe_read", 256)
    handle = backend.launcher.prepare(kernel)
    pieces = size >> 17
    arguments = Arguments([source.data_ptr(), found.data_ptr(), pieces])

    def read() -> None:
        backend.launcher.launch(kernel, handle, pieces, arguments)

    return Memory(
        (pieces << 17) / device_seconds(read, rounds),
        size / device_seconds(lambda: target.zero_(), rounds),
        2 * size / device_seconds(lambda: target.copy_(source), rounds),
    )


# --- the work ---


def others(
    backend: CudaBackend, recipe: str, shapes: Sequence[Shape], rounds: int
) -> dict[str, float]:
    """Elements a second on the largest weight of the set: ours, and torch eager and compiled."""
    work = prepare(backend, RECIPES[recipe], [max(shapes, key=math.prod)], 1, "cuda")
    (x,) = (m.view(s.shape) for m, s in zip(work.masters.tensors, work.storages, strict=True))
    plain = PLAIN[recipe]
    compiled = torch.compile(plain)

    def cast() -> None:
        for step in STEPS[:-1]:
            work.steps[step]()

    casts = {
        "zerocast": cast,
        "torch eager": lambda: plain(x),
        "torch.compile": lambda: compiled(x),
    }
    return {name: x.numel() / device_seconds(run, rounds) for name, run in casts.items()}


# --- all of it ---


def measure(name: str, recipe: str, world_size: int, memory: Memory, rounds: int) -> dict:
    """One row of the report: a set, a recipe, a world size."""
    backend = backend_for(torch.device("cuda"))
    assert isinstance(backend, CudaBackend), "the reference stepped in for the kernels"
    work = prepare(backend, RECIPES[recipe], SETS[name], world_size, "cuda")
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    steps = {}
    launcher = backend.launcher
    for step, launch in work.steps.items():
        seconds = device_seconds(launch, rounds, flush)
        must = work.read[step] + work.written[step]
        before = launcher.launches
        launch()
        steps[step] = {
            "seconds": seconds,
            "bytes": must,
            "moved_over_must": (must + work.tables[step]) / must if must else 1.0,
            "of_bound": memory.seconds(work.read[step], work.written[step]) / seconds,
            "launches": launcher.launches - before + (step == "memset"),
        }

    def step() -> None:
        for launch in list(work.steps.values())[:-1]:
            launch()

    return {
        "set": name,
        "recipe": recipe,
        "world_size": world_size,
        "weights": len(work.storages),
        "owned": sum(shard.extent.size for shard in work.shards),
        "steps": steps,
        "host_seconds": host_seconds(step, rounds, torch.cuda.synchronize),
        "one_by_one_seconds": device_seconds(
            one_by_one(backend, RECIPES[recipe], work), rounds, flush
        ),
    }


def compare(checkout: Path, options: argparse.Namespace) -> dict:
    """TransformerEngine beside ours: a row for every set and recipe as rank 0 of 1 and of 64, or
    the reason why there is none.
    """
    found: dict = {"version": build_transformer_engine.version(checkout), "rows": []}
    capability = torch.cuda.get_device_capability()
    arch = build_transformer_engine.architecture(capability)
    try:
        path = build_transformer_engine.library(checkout, arch)
        driver = bench_transformer_engine.Driver(path)
    except (build_transformer_engine.BuildError, OSError) as error:
        return {**found, "reason": str(error)}
    backend = backend_for(torch.device("cuda"))
    assert isinstance(backend, CudaBackend), "the reference stepped in for the kernels"
    for name, recipe, world_size in product(options.sets, options.recipes, options.ranks):
        if world_size not in bench_transformer_engine.WORLD_SIZES:
            continue
        row = {"set": name, "recipe": recipe, "world_size": world_size}
        work = flush = None
        try:
            torch.cuda.empty_cache()
            work = prepare(backend, RECIPES[recipe], SETS[name], world_size, "cuda")
            flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
            row |= bench_transformer_engine.compare(
                driver,
                recipe,
                work.steps,
                work.storages,
                work.shards,
                work.masters.tensors,
                capability,
                partial(device_seconds, rounds=options.rounds, flush=flush),
            )
        except RuntimeError as error:  # a kernel of either side that failed ends the CUDA context
            row["reason"] = str(error).splitlines()[0]
        found["rows"].append(row)
    return found


class NoLauncher:
    """A launcher of nothing on CPU tensors: what is left is the host's own time."""

    device = torch.device("cpu")
    max_grid = 2**31 - 1
    capturing = False

    def __init__(self) -> None:
        self.launches = 0

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        """The table itself: nobody reads it."""
        return table

    def refresh(self, table: torch.Tensor, values: torch.Tensor) -> None:
        """Nothing."""

    def prepare(self, kernel: Kernel) -> int:
        """No handle."""
        return 0

    def launch(self, kernel: Kernel, handle: int, grid: int, arguments: Arguments) -> None:
        """Counted."""
        self.launches += 1


def host_time(backend: CudaBackend, weights: int, rounds: int) -> dict:
    """Host time of ``plan.cast()``, a quarter of the weights FP8, and its launches, memsets left
    out.
    """
    device = backend.launcher.device
    with zerocast.use_backend(backend):
        recipes = [RECIPES["fp8" if i % 4 == 0 else "nvfp4"] for i in range(weights)]
        models = [zerocast.empty((16, 16), recipe, device=device) for recipe in recipes]
        masters = [torch.zeros(256, device=device)] * weights
        plan = zerocast.CastPlan(models, masters, [0] * weights)
        settle = (torch.cuda.synchronize,) if device.type == "cuda" else ()
        seconds = host_seconds(plan.cast, rounds, *settle)
        before = backend.launcher.launches
        plan.cast()
        launches = backend.launcher.launches - before
    return {"weights": weights, "seconds": seconds, "launches": launches}


def main(arguments: Sequence[str]) -> int:
    """Measure, write the page and the JSON, print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(WORLD_SIZES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="without suffix: .md and .json are written")
    parser.add_argument("--host", action="store_true", help="the host's time only, without a GPU")
    parser.add_argument(
        "--transformer-engine",
        type=Path,
        metavar="CHECKOUT",
        help="where that project lies, to run its kernels beside ours",
    )
    options = parser.parse_args(arguments)
    if options.host:
        stubbed = CudaBackend(NoLauncher())
        print("Launches that do nothing:")
        print(*host_lines([host_time(stubbed, n, 20 * options.rounds) for n in PLANS]), sep="\n")
        return 0
    if not torch.cuda.is_available():
        print("bench_cuda.py needs a CUDA device; --host measures what can be measured without.")
        return 1
    backend = backend_for(torch.device("cuda"))
    assert isinstance(backend, CudaBackend), "the reference stepped in for the kernels"
    memory = probe(backend, PROBE_BYTES, options.rounds)
    rows = []
    for name in options.sets:
        for recipe in options.recipes:
            for world_size in options.ranks:
                rows.append(measure(name, recipe, world_size, memory, options.rounds))
                torch.cuda.empty_cache()
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "machine": platform.platform(),
        "rounds": options.rounds,
        "memory": asdict(memory),
        "host": [host_time(backend, n, 20 * options.rounds) for n in PLANS],
        "rows": rows,
        "others": {
            r: others(backend, r, SETS[options.sets[0]], options.rounds) for r in options.recipes
        },
    }
    # Written before another project's kernels run: should they take the process down, ours stand.
    write(report, options.output)
    if options.transformer_engine:
        report["transformer_engine"] = compare(options.transformer_engine.resolve(), options)
        write(report, options.output)
    print(markdown(report))
    return 0


def write(report: dict, output: Path | None) -> None:
    """The page and the JSON beside each other."""
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".md").write_text(markdown(report))
        output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


def driver_version() -> str:
    """Of the newest CUDA that the driver knows."""
    from cupy.cuda import runtime

    version = runtime.driverGetVersion()
    return f"{version // 1000}.{version % 1000 // 10}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
