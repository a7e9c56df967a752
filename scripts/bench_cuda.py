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

With --host it needs no GPU: plans of 224 and 5,000 weights whose launches do nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from bench_others import plain_fp8, plain_nvfp4
from cuda_report import markdown
from cuda_sets import SETS, WORLD_SIZES, Shape, rank_0

import zerocast
from zerocast.backends import backend_for
from zerocast.backends.cuda import Arguments, CudaBackend, Kernel, Launcher
from zerocast.ops import CastShard, Launch, Masters
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedStorage

Work = Callable[[], object]

RECIPES: dict[str, Recipe] = {
    "nvfp4": zerocast.NVFP4BlockScaling(),
    "fp8": zerocast.Float8CurrentScaling(),
}
STEPS = ("memset", "amax", "scale", "cast", "transpose")
HOST_GOAL = 150e-6
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
    kernel = Kernel("probe", "probe_read", 256)
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


class Uploads:
    """A launcher that counts the bytes of the tables that pass through it to another."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._bytes = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._launcher, name)

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        """As the other launcher's, counted."""
        self._bytes += table.nbytes
        return self._launcher.upload(table)

    def taken(self) -> int:
        """Bytes since this was last asked."""
        taken, self._bytes = self._bytes, 0
        return taken


@dataclass(frozen=True)
class Prepared:
    """The steps of one rank over a set of weights, and what each must read and write."""

    steps: dict[str, Work]
    read: dict[str, int]
    written: dict[str, int]
    tables: dict[str, int]
    storages: list[QuantizedStorage]
    shards: list[CastShard]
    masters: Masters


def prepare(
    backend: CudaBackend, recipe: Recipe, shapes: Sequence[Shape], world_size: int, device: str
) -> Prepared:
    """Weights and masters of rank 0, and its launches; the reduction between them is no kernel."""
    extents = rank_0(list(shapes), world_size)
    storages = [
        QuantizedStorage.empty(shape, torch.bfloat16, recipe, torch.device(device), columnwise=True)
        for shape in shapes
    ]
    owned = sum(extent.size for extent in extents)
    flat = torch.randn(owned, device=device) if owned else torch.empty(0, device=device)
    pieces = iter(flat.split([extent.size for extent in extents if extent]))
    masters = Masters(len(shapes))
    masters.bind([next(pieces) if extent else None for extent in extents])
    slots = [storage.grid.amax_slots for storage in storages]
    amax = torch.zeros(sum(slots), dtype=torch.int32, device=device)
    parts = amax.split(slots)
    shards = [
        storage.cast_shard(i, extent, part)
        for i, (storage, extent, part) in enumerate(zip(storages, extents, parts, strict=True))
    ]
    counting = Uploads(backend.launcher)
    counted = CudaBackend(counting)

    def tables_of(launch: Launch) -> Launch:
        """Notes what was uploaded for a launch just made."""
        uploaded.append(counting.taken())
        return launch

    uploaded: list[int] = []
    scales = [s.scale_target(part) for s, part in zip(storages, parts, strict=True)]
    copies = [s.transpose_target() for s in storages]
    steps: dict[str, Work] = {
        "memset": lambda: amax.zero_(),
        "amax": tables_of(recipe.partial_amax(counted, shards, masters)),
        "scale": tables_of(recipe.compute_scale(counted, scales)),
        "cast": tables_of(recipe.partial_cast(counted, shards, masters)),
        "transpose": tables_of(recipe.post_all_gather_processing(counted, copies)),
    }
    codes = owned * recipe.law.fmt.bits // 8
    planes = {
        name: sum(s.buffers[name].nbytes for s in storages if name in s.buffers)
        for name in (
            "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv",
        )
    }  # fmt: skip
    read = {
        "memset": 0,
        "amax": 4 * owned,
        "scale": amax.nbytes,
        "cast": 4 * owned,
        # Each scale is needed once of the rows that repeat it.
        "transpose": planes["rowwise_data"] + planes["columnwise_scale_inv"] // 16,
    }
    written = {
        "memset": amax.nbytes,
        "amax": 0,
        "scale": planes["rowwise_scale_inv"],
        "cast": codes,
        "transpose": planes["columnwise_data"] + planes["columnwise_scale_inv"],
    }
    tables = dict(zip(STEPS, (0, *uploaded), strict=True))
    return Prepared(steps, read, written, tables, storages, shards, masters)


def one_by_one(backend: CudaBackend, recipe: Recipe, work: Prepared) -> Launch:
    """Amax and cast, each weight by launches of its own."""
    launches = [
        launch
        for shard in work.shards
        if shard.extent
        for launch in (
            recipe.partial_amax(backend, [shard], work.masters),
            recipe.partial_cast(backend, [shard], work.masters),
        )
    ]

    def run() -> None:
        for launch in launches:
            launch()

    return run


def others(recipe: str, shapes: Sequence[Shape], rounds: int) -> dict[str, float]:
    """Elements a second of torch, eager and compiled, on the largest weight of the set."""
    x = torch.randn(max(shapes, key=lambda s: s[0] * s[1]), device="cuda")
    plain = {"nvfp4": plain_nvfp4, "fp8": plain_fp8}[recipe]
    compiled = torch.compile(plain)
    return {
        name: x.numel() / device_seconds(lambda cast=cast: cast(x), rounds)
        for name, cast in (("torch eager", plain), ("torch.compile", compiled))
    }


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


class NoLauncher:
    """A launcher of nothing on CPU tensors: what is left is the host's own time."""

    device = torch.device("cpu")
    max_grid = 2**31 - 1

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


def host_time(weights: int, rounds: int) -> dict:
    """Host time of ``plan.cast()`` with launches that do nothing; a quarter of the weights FP8."""
    launcher = NoLauncher()
    with zerocast.use_backend(CudaBackend(launcher)):
        recipes = [RECIPES["fp8" if i % 4 == 0 else "nvfp4"] for i in range(weights)]
        models = [zerocast.empty((16, 16), recipe) for recipe in recipes]
        plan = zerocast.CastPlan(models, [torch.zeros(256)] * weights, [0] * weights)
        seconds = host_seconds(plan.cast, rounds)
        before = launcher.launches
        plan.cast()
        return {"weights": weights, "seconds": seconds, "launches": launcher.launches - before}


def main(arguments: Sequence[str]) -> int:
    """Measure, print the page, write it and the JSON beside each other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(WORLD_SIZES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="without suffix: .md and .json are written")
    parser.add_argument("--host", action="store_true", help="the host's time only, without a GPU")
    options = parser.parse_args(arguments)
    if options.host:
        for weights in (224, 5000):
            row = host_time(weights, 20 * options.rounds)
            met = "met" if row["seconds"] <= HOST_GOAL else "MISSED"
            print(
                f"{weights} weights, two recipes: plan.cast() takes {row['seconds'] * 1e6:.0f} us "
                f"of the host and {row['launches']} launches, stubbed; 150 us {met}"
            )
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
        "rows": rows,
        "others": {r: others(r, SETS[options.sets[0]], options.rounds) for r in options.recipes},
    }
    page = markdown(report)
    print(page)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.with_suffix(".md").write_text(page)
        options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


def driver_version() -> str:
    """Of the newest CUDA that the driver knows."""
    from cupy.cuda import runtime

    version = runtime.driverGetVersion()
    return f"{version // 1000}.{version % 1000 // 10}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
