"""A rank of scripts/hosts_check.py.

    hosts_ranks.py bytes FOLDER                     casts, trains, saves, loads; compares bytes
    hosts_ranks.py steps FOLDER TIMEOUT TRANSPORT   trains on gloo or MPI, and says what it raised

The second writes its lines into a file of this rank, because a launcher may end before it has
passed on what a rank printed.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import zerocast
from zerocast.comm import Communicator, MpiCommunicator, TorchDistributedCommunicator
from zerocast.optim import ZeroOptimizer

LARGE, SMALL = (2048, 4096), (160, 224)
"""Shapes of weights. Parts of the large one have 2 MiB, which ranks of one node would copy out of
each other's memory.
"""

STEPS, PAUSE = 40, 0.1
"""Steps of a training into which a fault is planted, and seconds between them."""

Model = list[tuple[str, torch.nn.Parameter]]


# --- a training whose weights follow from the number of ranks and steps ---


def made(comm: Communicator) -> tuple[Model, ZeroOptimizer]:
    """Weights under two recipes and their optimizer, the same on every rank."""
    model = []
    for name, shape in (("nvfp4", (256, 512)), ("delayed", (96, 80))):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        model.append((name, torch.nn.Parameter(zerocast.quantize(values, name))))
    return model, ZeroOptimizer(model, torch.optim.AdamW, comm, lr=0.01, verify="hash")


def step(model: Model, optimizer: ZeroOptimizer, number: int) -> None:
    """One step, whose gradients depend on its number and the rank."""
    draw = torch.Generator().manual_seed(1000 * number + optimizer.comm.rank)
    for _, weight in model:
        weight.grad = torch.randn(weight.shape, generator=draw).to(weight.dtype)
    optimizer.step(number=number)


def digest(model: Model) -> str:
    """Of every stored byte."""
    total = hashlib.sha256()
    for _, weight in model:
        for _, buffer in sorted(weight.quantized_storage.buffers.items()):
            total.update(buffer.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def trained(comm: Communicator, begun: Callable[[int], None] = lambda number: None) -> str:
    """The digest after all steps; ``begun`` is called before each with its number."""
    model, optimizer = made(comm)
    for number in range(STEPS):
        begun(number)
        step(model, optimizer, number)
    return digest(model)


# --- every byte ---


def groups(comm: Communicator) -> Iterator[tuple[str, Communicator]]:
    """All ranks and those of even numbers, on each transport that the launcher has."""
    from gpt.launch import MPI_VARIABLES

    even = [rank for rank in range(comm.size) if rank % 2 == 0]
    yield "gloo", comm
    some = dist.new_group(even)
    if comm.rank in even:
        yield f"gloo, ranks {even}", zerocast.as_communicator(some)
    if any(name in os.environ for name in MPI_VARIABLES):
        from mpi4py import MPI

        yield "MPI", zerocast.as_communicator(MPI.COMM_WORLD)
        half = MPI.COMM_WORLD.Split(comm.rank % 2, comm.rank)
        if comm.rank in even:
            yield f"MPI, ranks {even}", zerocast.as_communicator(half)


def cast(comm: Communicator, name: str, shape: tuple[int, int]) -> str | None:
    """Cast twice from parts that begin anywhere, one of them empty; the first wrong byte."""
    from gpt.check import first_difference, stored_and_expected

    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    cuts = [rank * values.numel() // comm.size // 7 * 7 + rank for rank in range(comm.size)]
    bounds = [0, 0, *cuts[2:], values.numel()]
    start, end = bounds[comm.rank], bounds[comm.rank + 1]
    weight = zerocast.empty(shape, name)
    master = values.view(-1)[start:end].clone()
    plan = zerocast.CastPlan([weight], [master], [start], comm, verify="hash")
    for _ in range(2):
        plan.cast()
        plan.all_gather()
    zerocast.verify(weight, comm)
    pairs = stored_and_expected(weight, values).items()
    found = (first_difference(f"{name}.{buffer}", *pair) for buffer, pair in pairs)
    return next(filter(None, found), None)


def continued(comm: Communicator, folder: Path) -> str | None:
    """Train, save, load into another optimizer and step both; what is wrong, if anything."""
    from gpt.check import check_weights

    model, optimizer = made(comm)
    for number in range(3):
        step(model, optimizer, number)
    zerocast.checkpoint.save(folder, optimizer)
    other, loaded = made(comm)
    zerocast.checkpoint.load(folder, loaded)
    if digest(other) != digest(model):
        return "loading gives other bytes than were saved"
    for each, its in ((model, optimizer), (other, loaded)):
        step(each, its, 3)
        right, verdict = check_weights(named(each), its.gather_master, comm)
        if not right:
            return verdict
    return None if digest(other) == digest(model) else "a step after loading gives other bytes"


def named(model: Model) -> torch.nn.Module:
    """A module with these parameters."""
    module = torch.nn.Module()
    for name, weight in model:
        module.register_parameter(name, weight)
    return module


def compare_bytes(folder: Path) -> None:
    """Every check on every group; the first mistake ends the job."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from gpt.launch import launched_process_group

    with launched_process_group() as world:
        for group, comm in groups(world):
            for name in zerocast.recipes.RECIPES:
                for shape in (SMALL, LARGE) if name == "current" else (SMALL,):
                    if wrong := cast(comm, name, shape):
                        raise SystemExit(f"WRONG on rank {world.rank} over {group}: {wrong}")
            if wrong := continued(comm, folder / group.replace(" ", "")):
                raise SystemExit(f"WRONG on rank {world.rank} over {group}: {wrong}")
            print(f"rank {world.rank}: every byte is equal over {group}", flush=True)
        world.barrier()


# --- with a fault ---


def train_with_a_fault(folder: Path, timeout: float, transport: str) -> None:
    """Write each step, and the digest or the error at the end, with the time."""
    if transport == "mpi":
        comm: Communicator = MpiCommunicator(timeout=timeout)
    else:
        dist.init_process_group("gloo")
        comm = TorchDistributedCommunicator(dist.group.WORLD, timeout=timeout)
    with (folder / f"{comm.rank}").open("w", buffering=1) as file:

        def say(what: str, text: object) -> None:
            file.write(f"{time.time():.2f}|{what}|{text}\n".replace("\n", " ").strip() + "\n")

        def begun(number: int) -> None:
            time.sleep(PAUSE)
            say("step", number)

        try:
            say("digest", trained(comm, begun))
        except BaseException as error:
            say("raised", f"{type(error).__name__}: {error}")
            raise
    comm.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "bytes":
        compare_bytes(Path(sys.argv[2]))
    else:
        train_with_a_fault(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
