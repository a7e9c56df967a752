"""Trains for thousands of steps under verify="hash", and watches memory, threads and descriptors.

    OMP_NUM_THREADS=1 python scripts/soak.py --ranks 3            # ranks that are threads
    OMP_NUM_THREADS=1 python scripts/soak.py --ranks 2 --gloo     # processes

A small model of several recipes is stepped, clipped and saved, at once and beside the training, by
turns. After the first fifth of the steps, resident memory may grow by 2 MiB, and threads and open
descriptors not at all, seen between two saves. Exits with 1 where they do.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

import zerocast
from zerocast.checkpoint import save
from zerocast.comm import Communicator, as_communicator, run_in_process
from zerocast.optim import ZeroOptimizer

RECIPES = ("nvfp4", "mxfp8", "delayed", "block")
SHAPES = ((48, 64), (33, 96))
SAVE_EVERY, LOOKS, GROWTH_MIB = 100, 10, 2.0


@dataclass(frozen=True)
class Held:
    """What this process holds.

    Attributes:
        mib: of resident memory.
        threads: how many.
        descriptors: open ones.
        objects: that Python's collector knows.
    """

    mib: float
    threads: int
    descriptors: int
    objects: int

    @classmethod
    def now(cls) -> "Held":
        """After a collection."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            len(gc.get_objects()),
        )

    def __str__(self) -> str:
        return (
            f"{self.mib:.1f} MiB, {self.threads} threads, {self.descriptors} descriptors, "
            f"{self.objects} objects"
        )


def train(comm: Communicator, steps: int, folder: Path) -> list[Held]:
    """Train; what was held at :data:`LOOKS` moments, the first after a tenth of the steps."""
    weights = [
        (f"{recipe}.{i}", torch.nn.Parameter(zerocast.quantize(torch.ones(shape), recipe)))
        for recipe in RECIPES
        for i, shape in enumerate(SHAPES)
    ]
    optimizer = ZeroOptimizer(weights, torch.optim.AdamW, comm, lr=1e-3, verify="hash")
    held, pending = [], None
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        for _, weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        if step % SAVE_EVERY == SAVE_EVERY // 2:
            pending = save(folder, optimizer, asynchronous=step // SAVE_EVERY % 2 == 1)
        if step % max(steps // LOOKS, 1) == 0:
            if pending is not None:
                pending.wait()
            comm.barrier()
            if comm.rank == 0:
                held.append(Held.now())
                print(f"step {step:6}: {held[-1]}", flush=True)
            comm.barrier()
    return held


def over_gloo(rank: int, ranks: int, steps: int, folder: str) -> None:
    """Train as one process of a group; end with 1 where it holds more and more."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    grown = judge(train(as_communicator(None), steps, Path(folder) / "run"))
    dist.destroy_process_group()
    sys.exit(grown)


def judge(held: list[Held]) -> int:
    """1 where more is held at the end than after a fifth of the steps; nothing seen is 0."""
    if not held:
        return 0
    first, last = held[1], held[-1]
    grown = (
        last.mib > first.mib + GROWTH_MIB
        or last.threads > first.threads
        or last.descriptors > first.descriptors
    )
    print("it GREW" if grown else "flat", flush=True)
    return int(grown)


def main() -> int:
    """Train, and say what was held."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--gloo", action="store_true", help="processes in place of threads")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if asked.gloo:
            children = [
                get_context("spawn").Process(
                    target=over_gloo, args=(rank, asked.ranks, asked.steps, folder)
                )
                for rank in range(asked.ranks)
            ]
            for child in children:
                child.start()
            for child in children:
                child.join()
            grown = max(abs(child.exitcode or 0) for child in children)
        else:
            path = Path(folder) / "run"
            grown = judge(
                run_in_process(asked.ranks, lambda comm: train(comm, asked.steps, path))[0]
            )
    print(
        f"{asked.steps} steps on {asked.ranks} {'processes' if asked.gloo else 'threads'}: "
        f"{time.process_time() - begun[0]:.0f} s of CPU in this process, "
        f"{time.monotonic() - begun[1]:.0f} s"
    )
    return min(grown, 1)


if __name__ == "__main__":
    sys.exit(main())
