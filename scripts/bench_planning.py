"""What planning costs one rank of many, of which this process is the only one.

    python scripts/bench_planning.py                       the table
    python scripts/bench_planning.py 1000 16384 boundary   one row: weights, ranks, exchange
    python scripts/bench_planning.py 1000 16384 optimizer  the same of a ZeroOptimizer

A simulated group answers this rank's exchanges with what the others would have sent. Weights are
1024x1024 of NVFP4 end to end in a flat layout, on the CPU, and of this rank's memory alone what
CastPlan takes is counted, in a process of its own: the process's growth and its peak, after the
weights and masters have been made. A ZeroOptimizer's weights are smaller, for it moves them: its
memory, of masters and buffers, is not counted.
"""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

import zerocast
from zerocast.lab.costs.one_of_many import OneOfMany
from zerocast.layout import FlatLayout

TABLE = [(1000, 64), (1000, 512), (1000, 2048), (1000, 16384), (10_000, 64), (100_000, 64)]
SIDE = 1024
"""Of a weight; 64 where so many would not fit here, or an optimizer has them."""


class OneOf(OneOfMany):
    """A group of ``size`` ranks of which this one is alone; it knows what the others gather while a
    plan is made: how many numbers each tells of its shards, and these.
    """

    def __init__(self, rank: int, size: int, layout: FlatLayout) -> None:
        super().__init__(rank, size, "cpu")
        shards: list[tuple[int, int, int, int]] = []
        counts = [0] * size
        for i, weight in enumerate(layout.weight_extents()):
            for owner, part in layout.owners(weight):
                own = part.shifted(-weight.start)
                shards.append((i, owner, own.start, own.end))
                counts[owner] += len(shards[-1])
        shards.sort(key=lambda shard: (shard[1], shard[0]))
        self._gathers = [torch.tensor(counts), torch.tensor(shards).view(-1)]

    def all_gather_(self, buffer: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        if buffer.dtype == torch.int64:  # what is gathered later is this rank's, and zeros
            buffer.copy_(self._gathers.pop(0))


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def plan(weights: int, ranks: int, exchange: str) -> tuple[float, int, int]:
    """CPU seconds of making a plan, and bytes that the process holds more then and at its peak."""
    side = SIDE if weights < 10_000 else 64
    recipe = zerocast.NVFP4BlockScaling()
    layout = FlatLayout((side * side,) * weights, ranks)
    comm = OneOf(ranks // 2, ranks, layout)
    shards = layout.shards(comm.rank)
    # This rank's codes and scales are there; those of the others are never written.
    models = [zerocast.empty((side, side), recipe, columnwise=False) for _ in shards]
    masters = [torch.zeros(own.size) if own else None for own in shards]
    starts = [own.start if own else None for own in shards]
    zerocast.CastPlan(
        [zerocast.empty((side, side), recipe)], [torch.zeros(side * side)], [0]
    ).cast()  # loads what is loaded once
    ctypes.CDLL(None).malloc_trim(0)  # what is free is given back, and counts once it is taken
    held, begin = resident(), time.process_time()
    made = zerocast.CastPlan(models, masters, starts, comm, exchange=exchange)  # type: ignore[arg-type]
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert isinstance(made.fingerprints, list)
    return seconds, resident() - held, max(0, peak - held)


def optimizer(weights: int, ranks: int) -> float:
    """CPU seconds of making a ZeroOptimizer."""
    side, recipe = 64, zerocast.NVFP4BlockScaling()

    def named(count: int) -> list[tuple[str, torch.Tensor]]:
        made = (zerocast.empty((side, side), recipe, columnwise=False) for _ in range(count))
        return [(f"layers.{i}.weight", torch.nn.Parameter(w)) for i, w in enumerate(made)]

    zerocast.optim.ZeroOptimizer(named(1))  # loads what is loaded once
    comm = OneOf(ranks // 2, ranks, FlatLayout((side * side,) * weights, ranks))
    given, begin = named(weights), time.process_time()
    made = zerocast.optim.ZeroOptimizer(given, group=comm)
    seconds = time.process_time() - begin
    assert len(made.named_weights) == weights
    return seconds


def main() -> None:
    """Print the table, each row by a process of its own, or one row."""
    if len(sys.argv) > 1:
        weights, ranks, exchange = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        if exchange == "optimizer":
            print(f"| {weights:,} | {ranks:,} | {exchange} | {optimizer(weights, ranks):.2f} | | |")
            return
        seconds, grown, peak = plan(weights, ranks, exchange)
        print(
            f"| {weights:,} | {ranks:,} | {exchange} | {seconds:.2f} | {grown / 1e6:.1f} | "
            f"{peak / 1e6:.1f} |",
            flush=True,
        )
        return
    print("| weights | ranks | exchange | CPU s | MB held | MB at the peak |")
    print("|--:|--:|---|--:|--:|--:|", flush=True)
    for weights, ranks in TABLE:
        for exchange in ("boundary", "full", "optimizer"):
            row = [sys.executable, __file__, str(weights), str(ranks), exchange]
            subprocess.run(row, check=True)


if __name__ == "__main__":
    main()
