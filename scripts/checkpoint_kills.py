"""Kills trainings at random moments while they save, and continues from what is left.

    python scripts/checkpoint_kills.py --kills 200

Ranks are processes of a gloo group that train a small model under ZeroOptimizer and save it after
every step into one directory, by turns at once and beside the training. One rank or all of them are
killed (SIGKILL) after a random time. Then another number of ranks loads the directory: the masters
must be, bit for bit, those of a run that never stopped after the step that the checkpoint says, and
that step no earlier than the last whose save had returned. Exits with 1 where one was not.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

import zerocast
from zerocast.checkpoint import load, save
from zerocast.comm import Communicator, SingleRank, as_communicator, run_in_process
from zerocast.optim import ZeroOptimizer

RECIPES = (zerocast.DelayedScaling(amax_history_len=4), zerocast.NVFP4BlockScaling())
STEPS = 400
processes = get_context("fork")


def make(comm: Communicator) -> tuple[torch.nn.Module, ZeroOptimizer]:
    """A model and its optimizer, the same on every rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(96, 80, bias=False) for _ in RECIPES)).bfloat16()
    for layer, recipe in zip(model, RECIPES, strict=True):
        quantized = zerocast.quantize(layer.weight.detach(), recipe)
        layer.weight = torch.nn.Parameter(quantized)
    return model, ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, comm, lr=0.01)


def step(model: torch.nn.Module, optimizer: ZeroOptimizer, number: int) -> None:
    """One step, whose gradients depend on its number alone."""
    generator = torch.Generator().manual_seed(number)
    for weight in model.parameters():
        draw = torch.randint(-127, 128, weight.shape, generator=generator).float() / 64
        weight.grad = draw.to(weight.dtype)
    optimizer.step()


def masters(model: torch.nn.Module, optimizer: ZeroOptimizer) -> list[torch.Tensor]:
    """All of them, whole."""
    return [optimizer.gather_master(weight) for weight in model.parameters()]


def train(rank: int, ranks: int, store: str, path: Path, told: list) -> None:
    """Train and save until killed; ``told[rank]`` is the last step whose save has returned."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the others say when one is killed
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    model, optimizer = make(as_communicator(None))
    if path.exists():
        load(path, optimizer, model)
    pending = None
    for number in range(optimizer.state_dict()["zero"]["steps"], STEPS):
        step(model, optimizer, number)
        asynchronous = number % 2 == 1
        pending = save(path, optimizer, model, asynchronous=asynchronous)
        if pending is None or (rank == 0 and pending.is_done):
            told[rank] = number + 1


def check(path: Path, ranks: int, reference: list[list[torch.Tensor]]) -> tuple[int, str]:
    """The step of the checkpoint, and what is wrong with it."""

    def body(comm: Communicator) -> tuple[int, list[torch.Tensor]]:
        model, optimizer = make(comm)
        loaded = load(path, optimizer, model)
        step(model, optimizer, loaded.steps)
        return loaded.steps, masters(model, optimizer)

    steps, found = run_in_process(ranks, body)[0]
    same = all(map(torch.equal, found, reference[steps + 1]))
    return steps, "" if same else f"other masters after step {steps}"


def main() -> int:
    """Kill, check, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draw, found, wrong = random.Random(asked.seed), Counter(), []
    model, optimizer = make(SingleRank())
    reference = [masters(model, optimizer)]
    for number in range(STEPS + 1):
        step(model, optimizer, number)
        reference.append(masters(model, optimizer))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        for kill in range(asked.kills):
            ranks, told = draw.randint(1, 3), processes.Array("q", 3)
            store = f"{folder}/store{kill}"
            children = [
                processes.Process(target=train, args=(rank, ranks, store, path, told))
                for rank in range(ranks)
            ]
            for child in children:
                child.start()
            end = time.monotonic() + 30
            while told[0] == 0 and time.monotonic() < end:  # until saves have begun
                time.sleep(0.005)
            time.sleep(draw.random() * 0.5)
            last = told[0]
            victims = children if draw.random() < 0.5 else [draw.choice(children)]
            for child in victims:
                os.kill(child.pid, signal.SIGKILL)
            time.sleep(0.05)
            for child in children:  # the others cannot go on
                child.kill()
                child.join()
            left = sorted(each.name for each in path.iterdir()) if path.exists() else []
            manifests = sum(name == "checkpoint.json" for name in left)
            files = sum(name.endswith((".safetensors", ".draft")) for name in left)
            found["killed amid a save" if files > ranks else "killed between saves"] += 1
            if not manifests:
                problem = "nothing to load" if last else ""
                found["before the first checkpoint"] += 1
            else:
                steps, problem = check(path, draw.choice([1, 2, 3, 4]), reference)
                if steps < last:
                    problem = problem or f"step {steps}, and the save of {last} had returned"
                if steps > STEPS - 60:
                    shutil.rmtree(path)
            if problem:
                wrong.append(f"kill {kill}, {ranks} ranks: {problem}")
                print(wrong[-1], flush=True)
            if kill % 20 == 19:
                print(f"{kill + 1} kills: {dict(found)}, {len(wrong)} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
