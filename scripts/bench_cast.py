"""How fast is the cast, and how fast could this machine's memory let it be?

For one FP32 shard it measures, with the medians of interleaved rounds,

    the memory       native loops that only read, write or copy, on the same threads
    the cast         amax, scale, cast and their sum under every recipe, as a share of the memory's
                     bound for them: a read of the FP32 shard for amax and cast each, and one write
                     of the codes, of both planes where there are two. (Delayed scaling has one pass
                     for both, and so have scales that belong to blocks alone; under 4-over-6
                     the second read chooses scales and casts)
    the transpose    the columnwise codes and scales that it writes, as a share of the copy rate
    one part of 64   amax and cast of 1/64 of the weight, caches flushed, against the whole
    memory           the peak of temporary memory of CastPlan.cast() on one rank
    others           torch eager and compiled, torchao, on the same tensor

and the cast again with AVX2 and with one thread. The machine should be idle: the script says what
share of the processors others took while it ran, and figures from a busy machine mean little.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_frame import READS, Memory, RankSteps, Shape, Work, medians, prepare, write_json
from bench_others import TORCHAO, all_casts, torchao_casts
from rich.console import Console
from rich.table import Table

import zerocast
from zerocast.backends import native_library
from zerocast.backends.cpu import CpuBackend
from zerocast.layout import Extent, Source
from zerocast.recipes import (
    NAMED,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

RECIPES: dict[str, Recipe] = {
    "NVFP4": NVFP4BlockScaling(),
    "FP8": Float8CurrentScaling(),
    "FP8 delayed": DelayedScaling(),
    "FP8 rowwise": Float8RowwiseScaling(),
    "FP8 128x128": Float8BlockScaling(),
    "MXFP8": MXFP8BlockScaling(),
    "MXFP8 32x32": MXFP8BlockScaling(enable_2d_quantization=True),
    "MXFP4": MXFP4BlockScaling(),
    "MXFP4 32x32": MXFP4BlockScaling(enable_2d_quantization=True),
    "NVFP4 4-over-6": NVFP4BlockScaling(nvfp4_4over6="weights"),
    "NVFP4 4-over-6, 1x16": NAMED["nvfp4-4over6-1x16"],
    "NVFP4 stochastic": NVFP4BlockScaling(
        fp4_quant_fwd_weight=QParams(stochastic_rounding=True, fp4_2d_quantization=True)
    ),
}
STEPS = ("amax", "select", "select and cast", "scale", "cast", "one pass")
GOALS = {"MXFP8": 0.65, "MXFP8 32x32": 0.80, "FP8 128x128": 0.80,
         "NVFP4 4-over-6": 0.50, "NVFP4 4-over-6, 1x16": 0.35,
         "NVFP4 stochastic": 0.45}  # fmt: skip
"""Of recipes of which one pass writes what two wrote, and of those that compute more than memory
keeps them from."""
GOAL_CAST, GOAL_TRANSPOSE, GOAL_PART, GOAL_TEMPORARY = 0.75, 0.60, 1 / 50, 0.02
IDLE = 0.05
"""The share of the processors that others may take before the figures are called unreliable."""

Shares = dict[str, float]
console = Console()


# --- measuring ------------------------------------------------------------------------------------


class Processors:
    """What share of all processors other processes take, between two looks."""

    def __init__(self) -> None:
        self._start = self._look()

    @staticmethod
    def _look() -> tuple[float, float, float]:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
        idle = fields[3] + fields[4]
        own = sum(os.times()[:4])
        return sum(fields) / tick, (sum(fields) - idle) / tick, own

    def taken_by_others(self) -> float:
        """Since this was made."""
        total, busy, own = (b - a for a, b in zip(self._start, self._look(), strict=True))
        return max(0.0, (busy - own) / total)


def temporary_memory(work: Work) -> int | None:
    """By how many bytes resident memory rises at most while ``work`` runs; None where the system
    does not say.
    """

    def status(field: str) -> int:
        line = next(
            line for line in Path("/proc/self/status").read_text().splitlines() if field in line
        )
        return int(line.split()[1]) * 1024

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before would be taken again, unseen
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status("VmRSS")
        work()
        return max(0, status("VmHWM") - before)
    except OSError:
        return None


# --- what is measured -----------------------------------------------------------------------------


def cast_steps(
    backend: CpuBackend, recipe: Recipe, shape: Shape, master: torch.Tensor
) -> RankSteps:
    """Prepare the steps of casting the first elements of a weight, those of ``master``."""
    extents = [Extent(0, master.numel())]
    return prepare(backend, recipe, [shape], extents, [master], master.device)


def read_steps(work: RankSteps) -> None:
    """Run the steps whose work follows the shard."""
    for step in run_of(work.steps):
        if step in READS:
            work.steps[step]()


def shares(work: RankSteps, seconds: dict[str, float], rates: Memory) -> Shares:
    """Return what memory alone would take, as a share of each step's seconds and of their sum."""
    bounds = {step: work.read[step] / rates.read for step in READS if step in work.steps}
    for step in bounds:
        bounds[step] += work.written[step] / rates.write
    bounds["sum"] = sum(
        bounds[step] for step in run_of(work.steps) if step not in ("select", "scale")
    )
    if "transpose" in work.steps:
        bounds["transpose"] = work.written["transpose"] / rates.copy
    return {step: bound / seconds[step] for step, bound in bounds.items()}


def run_of(steps: Iterable[str]) -> list[str]:
    """Of these steps those that a cast runs: one pass, or amax and cast."""
    left_out = ("amax", "cast") if "one pass" in steps else ()
    return [step for step in STEPS if step in steps and step not in left_out]


class Probes:
    """Native loops over memory: they read ``source``, write ``sink``, copy between them."""

    def __init__(self, isa: str, threads: int, source: torch.Tensor, sink: torch.Tensor) -> None:
        self._alive = source, sink  # the works below know their addresses only
        library, n = native_library.load(), ctypes.c_int64(threads)
        read, write, copy = (
            getattr(library, f"zerocast_{isa}_probe_{name}") for name in ("read", "write", "copy")
        )
        for function in (read, write, copy):
            function.restype = None
        a, b = ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(sink.data_ptr())
        source_bytes, sink_bytes = source.nbytes, min(source.nbytes, sink.nbytes)
        self.bytes = {"read": source_bytes, "write": sink_bytes, "copy": sink_bytes}
        self.works: dict[str, Work] = {
            "read": lambda: read(a, ctypes.c_int64(source_bytes), n),
            "write": lambda: write(b, ctypes.c_int64(sink_bytes), n),
            "copy": lambda: copy(b, a, ctypes.c_int64(sink_bytes), n),
        }


def measure(
    isa: str,
    threads: int,
    recipes: dict[str, Recipe],
    shape: Shape,
    master: torch.Tensor,
    rounds: int,
) -> dict[str, Any]:
    """Memory rates in bytes a second, and for each recipe its steps' seconds and shares."""
    backend = CpuBackend(isa, threads)
    probes = Probes(isa, threads, master, torch.zeros(master.nbytes // 2, dtype=torch.uint8))
    casts = {name: cast_steps(backend, recipe, shape, master) for name, recipe in recipes.items()}
    works = dict(probes.works)
    for name, cast in casts.items():
        works |= {f"{name} {step}": cast.steps[step] for step in cast.steps if step != "memset"}
    seconds = medians(works, rounds)
    rates = Memory(**{name: nbytes / seconds[name] for name, nbytes in probes.bytes.items()})
    record: dict[str, Any] = {"isa": isa, "threads": threads, "rates": asdict(rates)}
    for name, cast in casts.items():
        steps = {step: seconds[f"{name} {step}"] for step in cast.steps if step != "memset"}
        steps["sum"] = sum(steps[step] for step in run_of(steps))
        record[name] = {"seconds": steps, "shares": shares(cast, steps, rates)}
    return record


def measure_part(
    recipes: dict[str, Recipe], shape: tuple[int, int], master: torch.Tensor, rounds: int
) -> dict[str, float]:
    """For each recipe, what amax and cast of 1/64 of the shard take of what the whole takes."""
    library = native_library.load()
    backend = CpuBackend()
    other = torch.zeros(64 * 2**20, dtype=torch.float32)  # larger than any cache
    flush = Probes(native_library.instruction_sets(library)[0], 1, other, other)
    parts = {}
    for name, recipe in recipes.items():
        part = master[: master.numel() // 64]
        works = {
            "whole": partial(read_steps, cast_steps(backend, recipe, shape, master)),
            "part": partial(read_steps, cast_steps(backend, recipe, shape, part)),
        }
        seconds = medians(works, rounds, before=flush.works["read"])
        parts[name] = seconds["part"] / seconds["whole"]
    return parts


def measure_temporary(
    recipes: dict[str, Recipe], shape: tuple[int, int], master: torch.Tensor
) -> dict[str, float | None]:
    """For each recipe, the peak of a one-rank plan and its cast, as a share of the FP32 bytes.

    The plan's own buffers, made within the measured time, count too.
    """
    shares: dict[str, float | None] = {}
    for name, recipe in recipes.items():
        both = recipe.columnwise_source is not Source.TRANSPOSED_MASTER  # which no shard has
        # A first cast, so that what is imported late is there.
        small = zerocast.empty((32, 32), recipe, columnwise=both)
        zerocast.CastPlan([small], [torch.zeros(1024)], [0]).cast()
        weight = zerocast.empty(shape, recipe, columnwise=both)
        for buffer in weight.quantized_storage.buffers.values():
            buffer.zero_()  # or its pages would first be touched by the cast
        peak = temporary_memory(
            lambda weight=weight: zerocast.CastPlan([weight], [master], [0]).cast()
        )
        shares[name] = None if peak is None else peak / master.nbytes
    return shares


def measure_others(
    shape: tuple[int, int], master: torch.Tensor, rounds: int
) -> dict[str, dict[str, float]]:
    """For each recipe, the median seconds of each other cast of the same tensor."""
    matrix = master.view(shape)
    seconds = {}
    for recipe, casts in all_casts().items():
        works = {name: lambda cast=cast: cast(matrix) for name, cast in casts.items()}
        seconds[recipe] = medians(works, rounds)
    return seconds


# --- what is shown --------------------------------------------------------------------------------


def judged(value: float, goal: float, *, at_most: bool = False, digits: int = 0) -> str:
    """A share, green where it reaches its goal and red where it does not."""
    reached = value <= goal if at_most else value >= goal
    return f"[{'green' if reached else 'red'}]{value:.{digits}%}[/]"


def show_casts(records: list[dict[str, Any]], nbytes: int) -> None:
    """A row for each step of each recipe and configuration."""
    table = Table(title=f"Casting {nbytes / 2**20:.0f} MiB of FP32")
    for column in ("code", "threads", "recipe", "step", "ms", "GB/s of FP32", "share of bound"):
        table.add_column(
            column, justify="left" if column in ("code", "recipe", "step") else "right"
        )
    for record in records:
        for recipe in (name for name in RECIPES if name in record):
            steps, shares = record[recipe]["seconds"], record[recipe]["shares"]
            for step in (step for step in (*STEPS, "sum") if step in steps):
                goal = judged(shares[step], GOALS.get(recipe, GOAL_CAST)) if step == "sum" else ""
                share = goal or (f"{shares[step]:.0%}" if step in shares else "")
                ms, rate = steps[step] * 1e3, nbytes / steps[step] / 1e9
                table.add_row(record["isa"], str(record["threads"]), recipe, step, f"{ms:.2f}",
                              "" if step == "scale" else f"{rate:.1f}", share)  # fmt: skip
        table.add_section()
    console.print(table)
    for record in records:
        for recipe in (name for name in RECIPES if name in record):
            seconds = record[recipe]["seconds"]
            if "one pass" in seconds:
                factor = (seconds["amax"] + seconds["cast"]) / seconds["one pass"]
                way = f"{record['isa']}, {record['threads']} threads, {recipe}"
                console.print(f"{way}: one pass is {factor:.2f} times as fast as two")


def show_memory(records: list[dict[str, Any]]) -> None:
    """The probes, and the columnwise bytes that the transposes make against the copy rate."""
    table = Table(title="Memory, GB/s, and columnwise bytes made as a share of the copy rate")
    recipes = [
        name for name in RECIPES if "transpose" in records[0].get(name, {"shares": ()})["shares"]
    ]
    for column in ("code", "threads", "read", "write", "copy", *recipes):
        table.add_column(column, justify="left" if column == "code" else "right")
    for record in records:
        rates = [f"{record['rates'][name] / 1e9:.1f}" for name in ("read", "write", "copy")]
        shares = [judged(record[name]["shares"]["transpose"], GOAL_TRANSPOSE) for name in recipes]
        table.add_row(record["isa"], str(record["threads"]), *rates, *shares)
    console.print(table)


def show_others(ours: dict[str, Any], others: dict[str, dict[str, float]], nbytes: int) -> None:
    """zerocast's sum beside the others, slowest last."""
    table = Table(title="The same tensor, others' casts")
    for column in ("recipe", "who", "ms", "GB/s of FP32", "zerocast is faster by"):
        table.add_column(column, justify="left" if column in ("recipe", "who") else "right")
    for recipe, seconds in others.items():
        if recipe not in ours:
            continue
        own = ours[recipe]["seconds"]["sum"]
        rows = {"zerocast": own, **dict(sorted(seconds.items(), key=lambda item: item[1]))}
        for who, value in rows.items():
            factor = "" if who == "zerocast" else f"{value / own:.1f}x"
            table.add_row(recipe, who, f"{value * 1e3:.2f}", f"{nbytes / value / 1e9:.2f}", factor)
        table.add_section()
    console.print(table)


def main() -> None:
    """Measure, show, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=8192, help="of the weight; a multiple of 1024")
    parser.add_argument("--cols", type=int, default=8192, help="of the weight; a multiple of 32")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=21, help="that a median is taken of")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--skip-others", action="store_true", help="measure zerocast only")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args()
    if options.rows % 1024 or options.cols % 32:
        parser.error("--rows must be a multiple of 1024 and --cols of 32")
    recipes = {name: RECIPES[name] for name in options.recipes}
    torch.set_num_threads(options.threads)
    shape = (options.rows, options.cols)
    master = torch.randn(options.rows * options.cols, generator=torch.Generator().manual_seed(0))

    watch = Processors()
    time.sleep(1)
    if (others := watch.taken_by_others()) > IDLE:
        console.print(f"[red]Not idle: other processes take {others:.0%} of the processors.[/]")
    isas = native_library.instruction_sets(native_library.load())
    configurations = [(isas[0], options.threads)]
    configurations += [("avx2", options.threads)] if isas[0] == "avx512" else []
    configurations += [(isas[0], 1)] if options.threads > 1 else []

    watch = Processors()
    records = [measure(*each, recipes, shape, master, options.rounds) for each in configurations]
    show_memory(records)
    show_casts(records, master.nbytes)
    parts = measure_part(recipes, shape, master, options.rounds)
    for recipe, part in parts.items():
        share = judged(part, GOAL_PART, at_most=True, digits=2)
        console.print(f"{recipe}: amax and cast of 1/64 of the shard take {share} of the whole")
    temporary = measure_temporary(recipes, shape, master)
    for recipe, peak in temporary.items():
        share = "?" if peak is None else judged(peak, GOAL_TEMPORARY, at_most=True, digits=2)
        console.print(f"{recipe}: a plan's temporary memory peaks at {share} of the FP32 bytes")
    seconds = {}
    if not options.skip_others:
        if not torchao_casts():
            console.print(f"torchao {TORCHAO} is not installed and not measured.")
        seconds = measure_others(shape, master, max(3, options.rounds // 7))
        show_others(records[0], seconds, master.nbytes)
    taken = watch.taken_by_others()
    color = "red" if taken > IDLE else "green"
    console.print(f"[{color}]Other processes took {taken:.0%} of the processors meanwhile.[/]")
    if options.json:
        record = {
            "date": datetime.date.today().isoformat(),
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "shape": shape,
            "rounds": options.rounds,
            "taken_by_others": taken,
            "casts": records,
            "part_of_64": parts,
            "temporary_memory": temporary,
            "others_seconds": seconds,
        }
        write_json(record, options.json)


if __name__ == "__main__":
    main()
