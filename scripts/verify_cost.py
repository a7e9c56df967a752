"""What verify="hash" costs beside the cast and the gather: CPU time of all ranks.

    OMP_NUM_THREADS=1 python scripts/verify_cost.py              # ranks that are threads
    OMP_NUM_THREADS=1 python scripts/verify_cost.py --processes  # processes, over gloo
    OMP_NUM_THREADS=1 mpiexec -n 2 python scripts/verify_cost.py --mpi  # one a core, as they spin

Rounds without it, with it, without it again, and of the comparison alone follow each other in turn,
of plans that cast the same masters into the same weights. What a step takes depends on where its
memory lies, so all are made anew several times, those with it first in every second. Printed are
medians over the rounds: of the ratio to the mean of both steps without it, and of the ratio of
these two, which says what a ratio is worth.

Digests are read from memory after the gather. With --in-place, codes lie as they travel: threads,
and processes of one node, copy them from each other.

Plain reading of so many bytes is measured in the same rounds. Threads gather by one copy in memory,
which is less than any transport between machines does.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from operator import truediv
from pathlib import Path
from typing import Any

import torch

import zerocast
from zerocast.cast.verified import VerifyMode
from zerocast.comm import Communicator, MpiCommunicator, as_communicator, run_in_process
from zerocast.layout import chunk

SHAPES = [(2048, 2048), (2048, 2048), (8192, 2048), (2048, 8192)]
RECIPES = ("nvfp4", "mxfp8", "block", "current")
EXCHANGES = ("full", "boundary")
MODES: Sequence[VerifyMode] = ("off", "hash")
MAKINGS = 16
"""How often weights and plans are made, where there are as many rounds."""

Times = list[tuple[float, ...]]
"""Seconds of each round: without, with, without, of comparing alone, and of reading as many bytes.
"""


def planned(
    comm: Communicator, recipe: str, exchange: Any, modes: Sequence[VerifyMode]
) -> dict[VerifyMode, zerocast.CastPlan]:
    """Plans of these modes, made in their order, of the same weights, which are cut into equal
    parts.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [zerocast.empty(shape, recipe) for shape in SHAPES]
    own = [chunk(torch.Size(shape).numel(), comm.rank, comm.size) for shape in SHAPES]
    masters = [torch.randn(each.size, generator=generator) * 0.02 for each in own]
    starts = [each.start for each in own]
    return {
        mode: zerocast.CastPlan(weights, masters, starts, comm, exchange=exchange, verify=mode)
        for mode in modes
    }


def measure(comm: Communicator, recipe: str, exchange: str, rounds: int) -> Times:
    """CPU time of this process."""
    found: Times = []
    makings = min(MAKINGS, rounds)
    for k in range(makings):
        plans = planned(comm, recipe, exchange, MODES[::-1] if k % 2 else MODES)
        turns = range(k * rounds // makings, (k + 1) * rounds // makings)
        found += measure_plans(comm, plans["off"], plans["hash"], recipe, turns)
        del plans  # before the next ones are made
    return found


def measure_plans(
    comm: Communicator, off: zerocast.CastPlan, on: zerocast.CastPlan, recipe: str, turns: range
) -> Times:
    """CPU time of this process, after two rounds to warm up."""
    read = torch.ones(held(recipe) // 8, dtype=torch.int64)
    steps = [functools.partial(step, plan) for plan in (off, on, off)]
    works: list[Callable[[], object]] = [*steps, on.verify, read.max]
    found = []
    for turn in [turns[0], turns[0], *turns]:
        seconds = [0.0] * len(works)
        for k in range(len(works)):
            i = (turn + k) % len(works)  # what ran before fills the caches: each is first in turn
            comm.barrier()
            begin = time.process_time()
            comm.barrier()
            works[i]()
            comm.barrier()
            seconds[i] = time.process_time() - begin
        found.append(tuple(seconds))
    return found[2:]


def step(plan: zerocast.CastPlan) -> None:
    """What training runs."""
    plan.cast()
    plan.all_gather()


def held(recipe: str) -> int:
    """Bytes that a rank compares: all but derived copies."""
    storages = [zerocast.empty(shape, recipe).quantized_storage for shape in SHAPES]
    return sum(
        tensor.nbytes
        for storage in storages
        for name, tensor in storage.buffers.items()
        if name not in storage.derived_names
    )


def show(recipe: str, exchange: str, found: Times) -> None:
    """Print a line."""
    plain = [(each[0] + each[2]) / 2 for each in found]
    ratios = [statistics.median(map(truediv, each, plain)) for each in zip(*found, strict=True)]
    again = statistics.median(each[2] / each[0] for each in found)
    print(f"  {recipe}, {exchange}: {1e3 * statistics.median(plain):.1f} ms, "
          f"with hash {100 * (ratios[1] - 1):+.1f} % (without again {100 * (again - 1):+.1f} %); "
          f"comparing alone {100 * ratios[3]:.1f} %, reading {held(recipe) / 1e6:.0f} MB a rank "
          f"{100 * ratios[4]:.1f} %", flush=True)  # fmt: skip


def choose_shapes(given: argparse.Namespace) -> None:
    """Let this process measure the weights that are asked for."""
    one = (8192 * given.layers, 5120)
    SHAPES[:] = [one] if given.in_place else SHAPES * given.layers


def on_process(rank: int, given: argparse.Namespace, file: str) -> None:
    """Measure on one process of several, over gloo."""
    choose_shapes(given)
    torch.distributed.init_process_group(
        "gloo", f"file://{file}", rank=rank, world_size=given.ranks
    )
    measure_all(as_communicator(None), given.recipes, given.rounds)
    torch.distributed.destroy_process_group()


def measure_all(comm: Communicator, recipes: Sequence[str], rounds: int) -> None:
    """Measure on a rank that is a process; the first prints."""
    for recipe in recipes:
        for exchange in EXCHANGES:
            by_rank = comm.all_gather_object(measure(comm, recipe, exchange, rounds))
            if comm.rank == 0:
                sums = [
                    tuple(map(sum, zip(*each, strict=True))) for each in zip(*by_rank, strict=True)
                ]
                show(recipe, exchange, sums)


def main() -> None:
    """Print a line for each recipe and exchange."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--in-place", action="store_true", help="one weight, gathered where it is")
    parser.add_argument("--processes", action="store_true", help="over gloo, not in one process")
    parser.add_argument("--mpi", action="store_true", help="on the ranks that mpiexec started")
    parser.add_argument("--layers", type=int, default=1, help="so many times the elements")
    given = parser.parse_args()
    choose_shapes(given)
    if given.mpi:
        measure_all(MpiCommunicator(), given.recipes, given.rounds)
        return
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    print(f"{given.ranks} ranks, {elements:,} elements, {given.rounds} rounds each, CPU time")
    if given.processes:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder, "rendezvous"))
            torch.multiprocessing.spawn(on_process, (given, file), nprocs=given.ranks)
        return
    for recipe in given.recipes:
        for exchange in EXCHANGES:
            found = run_in_process(
                given.ranks,
                lambda comm, r=recipe, e=exchange: measure(comm, r, e, given.rounds),
            )
            show(recipe, exchange, found[0])


if __name__ == "__main__":
    main()
