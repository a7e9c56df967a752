"""How fast are the CUDA kernels, and how fast could this GPU's memory let them be?

For a set of weights (bench_frame.py) and rank 0 of 1, 8, 64 and 512 it measures, by events on the
stream and as medians,

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
import math
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
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
    write_json,
)
from bench_others import PLAIN
from cuda_report import host_lines, markdown

import zerocast
from zerocast.backends import backend_for
from zerocast.backends.cuda import Arguments, CudaBackend, Kernel, Launcher
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


Seconds = Callable[[Work], float]
"""Measures a work on the GPU."""


def device_seconds(rounds: int, before: Work = lambda: None) -> Seconds:
    """Return a function that measures the median time of a work on the GPU."""
    return lambda work: medians({"work": work}, rounds, device_clock, before)["work"]


def host_seconds(work: Work, rounds: int, before: Work = lambda: None) -> float:
    """Return the median time until ``work`` returns, while nothing waits for the GPU."""
    return medians({"work": work}, rounds, host_clock, before, warm_up=5)["work"]


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
    counted = CudaBackend(counting)
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


def run_all(launches: Iterable[Work]) -> None:
    """Run them one after the other."""
    for launch in launches:
        launch()


def probe(backend: CudaBackend, size: int, seconds: Seconds) -> Memory:
    """Measure the memory of this GPU by ``size`` bytes."""
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
        (pieces << 17) / seconds(read),
        size / seconds(lambda: target.zero_()),
        2 * size / seconds(lambda: target.copy_(source)),
    )


def others(
    backend: CudaBackend, recipe: str, shapes: Sequence[Shape], seconds: Seconds
) -> dict[str, float]:
    """Measure elements a second on the largest weight: ours, and torch eager and compiled."""
    work = prepare_rank_0(backend, RECIPES[recipe], [max(shapes, key=math.prod)], 1, "cuda")
    (x,) = (m.view(s.shape) for m, s in zip(work.masters.tensors, work.storages, strict=True))
    plain = PLAIN[recipe]
    compiled = torch.compile(plain)
    casts: dict[str, Work] = {
        "zerocast": lambda: run_all(list(work.steps.values())[:-1]),
        "torch eager": lambda: plain(x),
        "torch.compile": lambda: compiled(x),
    }
    return {name: x.numel() / seconds(run) for name, run in casts.items()}


def cuda_backend() -> CudaBackend:
    """Return the backend of the kernels."""
    backend = backend_for(torch.device("cuda"))
    assert isinstance(backend, CudaBackend), "the reference stepped in for the kernels"
    return backend


def measure(name: str, recipe: str, world_size: int, memory: Memory, rounds: int) -> dict:
    """Measure one row of the report: a set, a recipe, a world size."""
    backend = cuda_backend()
    work = prepare_rank_0(backend, RECIPES[recipe], SETS[name], world_size, "cuda")
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    clock = device_seconds(rounds, flush.zero_)
    steps = {}
    launcher = backend.launcher
    for step, launch in work.steps.items():
        seconds = clock(launch)
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
    cast = list(work.steps.values())[:-1]
    return {
        "set": name,
        "recipe": recipe,
        "world_size": world_size,
        "weights": len(work.storages),
        "owned": sum(shard.extent.size for shard in work.shards),
        "steps": steps,
        "host_seconds": host_seconds(lambda: run_all(cast), rounds, torch.cuda.synchronize),
        "one_by_one_seconds": clock(one_by_one(backend, RECIPES[recipe], work)),
    }


def compare(checkout: Path, options: argparse.Namespace) -> dict:
    """Measure TransformerEngine beside ours: a row for every set and recipe as rank 0 of 1 and of
    64, or the reason why there is none.
    """
    found: dict = {"version": build_transformer_engine.version(checkout), "rows": []}
    capability = torch.cuda.get_device_capability()
    arch = build_transformer_engine.architecture(capability)
    try:
        path = build_transformer_engine.library(checkout, arch)
        driver = bench_transformer_engine.Driver(path)
    except (build_transformer_engine.BuildError, OSError) as error:
        return {**found, "reason": str(error)}
    backend = cuda_backend()
    for name, recipe, world_size in product(options.sets, options.recipes, options.ranks):
        if world_size not in bench_transformer_engine.WORLD_SIZES:
            continue
        row = {"set": name, "recipe": recipe, "world_size": world_size}
        work = flush = clock = None  # gives the memory of the row before back
        try:
            torch.cuda.empty_cache()
            work = prepare_rank_0(backend, RECIPES[recipe], SETS[name], world_size, "cuda")
            flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
            clock = device_seconds(options.rounds, flush.zero_)
            row |= bench_transformer_engine.compare(driver, recipe, work, capability, clock)
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
        """Return the table itself, which nothing reads."""
        return table

    def refresh(self, table: torch.Tensor, values: torch.Tensor) -> None:
        """Do nothing."""

    def prepare(self, kernel: Kernel) -> int:
        """Return no handle."""
        return 0

    def launch(self, kernel: Kernel, handle: int, grid: int, arguments: Arguments) -> None:
        """Count the launch."""
        self.launches += 1


def host_time(backend: CudaBackend, weights: int, rounds: int) -> dict:
    """Measure the host time of ``plan.cast()``, a quarter of the weights FP8, and its launches,
    memsets left out.
    """
    device = backend.launcher.device
    with zerocast.use_backend(backend):
        recipes = [RECIPES["fp8" if i % 4 == 0 else "nvfp4"] for i in range(weights)]
        models = [zerocast.empty((16, 16), recipe, device=device) for recipe in recipes]
        masters = [torch.zeros(256, device=device)] * weights
        plan = zerocast.CastPlan(models, masters, [0] * weights)
        wait = (torch.cuda.synchronize,) if device.type == "cuda" else ()
        seconds = host_seconds(plan.cast, rounds, *wait)
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
    backend, clock = cuda_backend(), device_seconds(options.rounds)
    memory = probe(backend, PROBE_BYTES, clock)
    rows = []
    for name, recipe, world_size in product(options.sets, options.recipes, options.ranks):
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
        "others": {r: others(backend, r, SETS[options.sets[0]], clock) for r in options.recipes},
    }
    # Written before another project's kernels run: should they take the process down, ours stand.
    write(report, options.output)
    if options.transformer_engine:
        report["transformer_engine"] = compare(options.transformer_engine.resolve(), options)
        write(report, options.output)
    print(markdown(report))
    return 0


def write(report: dict, output: Path | None) -> None:
    """Write the page and the JSON beside each other."""
    if output:
        write_json(report, output.with_suffix(".json"))
        output.with_suffix(".md").write_text(markdown(report))


def driver_version() -> str:
    """Return the newest CUDA that the driver knows."""
    from cupy.cuda import runtime

    version = runtime.driverGetVersion()
    return f"{version // 1000}.{version % 1000 // 10}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
