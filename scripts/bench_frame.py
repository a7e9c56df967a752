"""What the benchmarks of casts share: weights, the steps of a rank, clocks, the memory's bound.

llama      the 224 linear weights of Llama-3-8B: 32 layers of 7
experts    5,568 small expert weights, in the proportions of DeepSeek-V3: 58 layers of 32
           experts of 3 matrices, each an eighth of the original's sides
narrow     512 weights of 256 columns, which are half as wide as a tile of blocks of 16x16

The steps are launched as a plan launches them, from the same operands, but one by one, and with a
count of the bytes that each must move.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from zerocast.layout import Extent, FlatLayout, SharedBlocks
from zerocast.numerics import Backend, FourOverSixErrors, Launch, Masters, TensorOperand
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedStorage
from zerocast.tensors.cast_steps import whole_rows_of
from zerocast.tensors.weight_operands import Amaxes, tensor_operand

Work = Callable[[], object]
Shape = tuple[int, int]

# --- what is cast ---

LLAMA: list[Shape] = [
    (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096),
    (14336, 4096), (14336, 4096), (4096, 14336),
] * 32  # fmt: skip
EXPERTS: list[Shape] = [(256, 896), (256, 896), (896, 256)] * (58 * 32)

NARROW: list[Shape] = [(8192, 256)] * 512

SETS = {"llama": LLAMA, "experts": EXPERTS, "narrow": NARROW}
WORLD_SIZES = (1, 64)
"""Ranks of which the first is measured."""

READS = ("amax", "select", "select and cast", "cast", "one pass")
"""The steps that read the masters, where a recipe has them."""


def rank_0(shapes: Sequence[Shape], world_size: int) -> list[Extent]:
    """Return what the first of ``world_size`` ranks owns of each weight, as ZeRO divides them."""
    layout = FlatLayout(tuple(rows * cols for rows, cols in shapes), world_size)
    return layout.shards(0)


@dataclass(frozen=True)
class RankSteps:
    """The steps of one rank over a set of weights, and what each must read and write.

    Attributes:
        steps: by name, in order: "memset", "amax", "select", "select and cast", "one pass" (amax
            and cast of whole blocks, in their place), "scale", "cast" and "transpose", as far as
            the recipe and the backend have them.
        read, written: bytes by step.
        tables: bytes by step that were uploaded when it was prepared.
    """

    steps: dict[str, Work]
    read: dict[str, int]
    written: dict[str, int]
    tables: dict[str, int]
    storages: list[QuantizedStorage]
    shards: list[TensorOperand]
    masters: Masters

    @property
    def cast(self) -> list[Work]:
        """Those that a cast runs: amax and cast, or the one pass in their place."""
        left_out = {"transpose", *(("amax", "cast") if "one pass" in self.steps else ())}
        return [launch for step, launch in self.steps.items() if step not in left_out]


def run_all(launches: Iterable[Work]) -> None:
    """Run them one after the other."""
    for launch in launches:
        launch()


def prepare(
    backend: Backend,
    recipe: Recipe,
    shapes: Sequence[Shape],
    extents: Sequence[Extent],
    master_weights: Sequence[torch.Tensor | None],
    device: torch.device,
    uploaded: Callable[[], int] = lambda: 0,
) -> RankSteps:
    """Make weights and the launches of a rank that owns ``extents`` of them; the reduction between
    the launches is not one of them.

    Args:
        uploaded: returns the bytes that the backend has uploaded since it was last asked.
    """
    storages = [
        QuantizedStorage.empty(shape, torch.bfloat16, recipe, device, columnwise=True)
        for shape in shapes
    ]
    masters = Masters(len(shapes))
    masters.bind(list(master_weights))
    slots = [storage.amax_slots for storage in storages]
    amax = torch.zeros(sum(slots), dtype=torch.int32, device=device)
    shards = [
        tensor_operand(storage, i, extent, Amaxes.whole(storage, own), candidates=_errors(storage))
        for i, (storage, extent, own) in enumerate(
            zip(storages, extents, amax.split(slots), strict=True)
        )
    ]
    numerics, first = recipe.numerics, storages[0]
    makers: dict[str, Callable[[], Launch]] = {}
    if not recipe.casts_before_reduction:
        makers["amax"] = lambda: backend.partial_amax(shards, masters)
    pairs = zip(storages, shards, strict=True)
    whole = [replace(s, whole=whole_rows_of(storage, s, backend)) for storage, s in pairs]
    all_whole = all(shard.whole == shard.extent for shard in whole)
    if recipe.chooses_scales and all_whole:
        makers["select and cast"] = lambda: backend.partial_select(numerics, whole, masters)
    elif recipe.chooses_scales:
        makers["select"] = lambda: backend.partial_select(numerics, shards, masters)
    elif all_whole:
        makers["one pass"] = lambda: backend.partial_amax(whole, masters, numerics)
    makers["scale"] = lambda: backend.compute_scale(numerics, shards)
    if "select and cast" not in makers:
        makers["cast"] = lambda: backend.partial_cast(numerics, shards, masters)
    if first.derived_names:
        makers["transpose"] = lambda: backend.transpose(numerics, shards)
    steps: dict[str, Work] = {"memset": lambda: amax.zero_()}
    tables = {"memset": 0}
    for name, make in makers.items():
        steps[name] = make()
        tables[name] = uploaded()

    def stored(*names: str) -> int:
        return sum(s.buffers[name].nbytes for s in storages for name in names if name in s.buffers)

    owned = sum(extent.size for extent in extents)
    codes = owned * numerics.fmt.bits // 8 * len(first.cast_planes)
    # Each scale is needed once of the rows that repeat it.
    scales = stored("columnwise_scale_inv") // first.planes[-1].scales.row_repeat
    read = {"scale": amax.nbytes, "transpose": stored("rowwise_data") + scales}
    written = {
        "memset": amax.nbytes,
        "scale": stored(*(plane.scales_name for plane in first.cast_planes)),
        **dict.fromkeys(("cast", "select and cast", "one pass"), codes),
        "transpose": stored(*first.derived_names),
    }
    read |= dict.fromkeys(READS, 4 * owned)
    return RankSteps(
        steps,
        {step: read.get(step, 0) for step in steps},
        {step: written.get(step, 0) for step in steps},
        tables,
        storages,
        shards,
        masters,
    )


def _errors(storage: QuantizedStorage) -> FourOverSixErrors | None:
    """Return room for the errors of both scales of each block, where a recipe chooses scales."""
    if not storage.recipe.chooses_scales:
        return None
    count = FourOverSixErrors.words(storage.grid, SharedBlocks())
    words = torch.zeros(count, dtype=torch.int32, device=storage.device)
    return FourOverSixErrors.carve(words, storage.grid, SharedBlocks())


# --- how it is timed ---


def host_clock(work: Work) -> float:
    """Return the seconds until ``work`` returns."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cpu_clock(work: Work) -> float:
    """Return the CPU seconds that this process takes for ``work``."""
    start = time.process_time()
    work()
    return time.process_time() - start


def device_clock(work: Work) -> float:
    """Return the seconds that ``work`` takes on the GPU, by events on the stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def medians(
    works: dict[str, Work],
    rounds: int,
    clock: Callable[[Work], float] = host_clock,
    before: Work = lambda: None,
    warm_up: int = 1,
) -> dict[str, float]:
    """Return the median seconds of each work. Every round runs all of them in turn, after
    ``warm_up`` rounds that are not counted; ``before`` runs before each, outside the measured time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(warm_up + rounds):
        for name, work in works.items():
            before()
            seconds[name].append(clock(work))
    return {name: median(values[warm_up:]) for name, values in seconds.items()}


# --- what the memory allows ---


@dataclass(frozen=True)
class Memory:
    """Bytes a second: reading alone, writing alone, and read plus written by a copy."""

    read: float
    write: float
    copy: float

    def seconds(self, read: int, written: int) -> float:
        """Return the least time for these bytes: of reading and writing one after the other, and of
        a copy for as much as goes both ways, the shorter.
        """
        apart = read / self.read + written / self.write
        both = min(read, written)
        rest = (read - both) / self.read + (written - both) / self.write
        return min(apart, 2 * both / self.copy + rest)


# --- what is kept ---


def write_json(record: dict[str, Any], path: Path) -> None:
    """Write a record of everything measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
