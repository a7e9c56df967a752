"""What does a cast cost beside the optimizer's step, and how little could it cost?

For one FP32 master on one rank it measures, with the medians of interleaved rounds,

    torch fused           torch.optim.AdamW(fused=True) alone: what all else is compared with
    FusedAdamW            ours alone
    one pass              FusedAdamW and the cast, whose amaxes (and codes of whole blocks) the
                          update has taken
    two passes            torch fused, then the cast
    foreach + torchao     torch.optim.AdamW(foreach=True), then torchao's compiled cast, where that
                          is installed and has the recipe

and what the memory alone would take for the bytes that each must move: four arrays read and three
written by the step, another read of the master where the cast needs one, the codes. All steps
update the same master and share its averages.

NVFP4's codes wait for the tensor's amax, so its one pass reads the master once more.

    python scripts/bench_step.py                     # 64 Mi elements, 1.5 GiB
    python scripts/bench_step.py --rows 1024         # fewer

Exit code 0 where one pass takes at most as much of torch's fused step as is wanted (NVFP4 1.45,
MXFP8 in 32x32 blocks and FP8 in 128x128 blocks 1.15), by the wall's clock; else 1. On a machine
that others use, the CPU seconds say more.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_cast import IDLE, Probes, Processors, judged
from bench_frame import Memory, Work, host_clock, medians, write_json
from bench_others import TORCHAO, torchao_casts
from rich.console import Console
from rich.table import Table

import zerocast
from zerocast.backends import native_library
from zerocast.comm import SingleRank
from zerocast.optim import FusedAdamW
from zerocast.recipes import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

RECIPES: dict[str, tuple[Recipe, float]] = {
    "NVFP4": (NVFP4BlockScaling(), 1.45),
    "MXFP8 32x32": (MXFP8BlockScaling(enable_2d_quantization=True), 1.15),
    "FP8 128x128": (Float8BlockScaling(), 1.15),
}
"""By name, and what one pass may take of torch's fused step."""

ALONE = "torch fused"
OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
console = Console()


class Step:
    """One master, its gradient, and optimizers that share its averages.

    Args:
        shape: of the weight.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        g = torch.Generator().manual_seed(0)
        self.shape = shape
        self.master = torch.nn.Parameter(torch.randn(shape, generator=g).view(-1))
        self.master.grad = torch.randn(shape, generator=g).view(-1)
        self.ours = FusedAdamW([self.master], **OPTIONS)
        self.ours.step()
        self.theirs = {
            name: torch.optim.AdamW([self.master], **{name: True}, **OPTIONS)
            for name in ("fused", "foreach")
        }
        for optimizer in self.theirs.values():
            optimizer.state[self.master] = {
                **self.ours.state[self.master], "step": torch.tensor(1.0)
            }  # fmt: skip

    def plan(self, recipe: Recipe) -> tuple[zerocast.CastPlan, zerocast.QuantizedTensor]:
        """The cast of the master, and the weight."""
        weight = zerocast.empty(self.shape, recipe, dtype=torch.bfloat16)
        masters = [self.master.detach()]
        return zerocast.CastPlan([weight], masters, [0], SingleRank(), exchange="boundary"), weight

    def in_one_pass(self, plan: zerocast.CastPlan, weight: zerocast.QuantizedTensor) -> None:
        """Update, measure, cast."""
        self.ours.plan = plan
        self.ours.step()
        plan.cast()
        self.ours.plan = None

    def works(self, recipes: dict[str, Recipe]) -> dict[str, Work]:
        """What is timed, by name."""
        works: dict[str, Work] = {ALONE: self.theirs["fused"].step, "FusedAdamW": self.ours.step}
        torchao = torchao_casts()
        for name, recipe in recipes.items():
            works[f"{name}: one pass"] = partial(self.in_one_pass, *self.plan(recipe))
            plan, _ = self.plan(recipe)
            works[f"{name}: two passes"] = partial(_in_turn, self.theirs["fused"].step, plan.cast)
            if name in torchao:
                cast = torch.compile(torchao[name], dynamic=False)
                matrix = self.master.detach().view(self.shape)
                works[f"{name}: foreach + torchao {TORCHAO}"] = partial(
                    _in_turn, self.theirs["foreach"].step, partial(cast, matrix)
                )
        return works


def _in_turn(*works: Callable[[], object]) -> None:
    for work in works:
        work()


def moved(work: str, elements: int, recipes: dict[str, Recipe]) -> tuple[int, int]:
    """Return the bytes that a work must read and write."""
    read, written = 16 * elements, 12 * elements
    name, _, way = work.partition(": ")
    if way:
        recipe = recipes[name]
        read += 4 * elements * ((way != "one pass") + recipe.scales_tensor)
        written += elements * recipe.numerics.fmt.bits // 8
    return read, written


def measure(
    step: Step, recipes: dict[str, Recipe], rounds: int
) -> tuple[dict[str, float], dict[str, float], Memory]:
    """Return the median seconds and CPU seconds of each work, and the memory's rates."""
    threads = torch.get_num_threads()
    isa = native_library.instruction_sets(native_library.load())[0]
    sink = torch.zeros(2 * step.master.numel(), dtype=torch.uint8)
    probes = Probes(isa, threads, step.master.detach(), sink)
    cpu: dict[str, list[float]] = {}
    works = {**probes.works, **step.works(recipes)}
    names = {id(work): name for name, work in works.items()}

    def both_clocks(work: Work) -> float:
        start = time.process_time()
        seconds = host_clock(work)
        cpu.setdefault(names[id(work)], []).append(time.process_time() - start)
        return seconds

    seconds = medians(works, rounds, both_clocks)
    cpu_seconds = {name: sorted(each[1:])[len(each[1:]) // 2] for name, each in cpu.items()}
    rates = Memory(**{name: nbytes / seconds[name] for name, nbytes in probes.bytes.items()})
    return seconds, cpu_seconds, rates


def main() -> int:
    """Measure, show, write the record; 0 where all bars are kept."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=8192, help="of the weight")
    parser.add_argument("--cols", type=int, default=8192, help="of the weight; a multiple of 32")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=11, help="that a median is taken of")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recipes = {name: RECIPES[name][0] for name in options.recipes}
    watch = Processors()
    step = Step((options.rows, options.cols))
    elements = step.master.numel()
    seconds, cpu_seconds, rates = measure(step, recipes, options.rounds)
    taken = watch.taken_by_others()

    table = Table(title=f"A step of AdamW on {elements / 2**20:g} Mi elements, {options.threads} "
                        f"threads")  # fmt: skip
    for column in ("work", "ms", "of torch fused", "CPU ms", "of its CPU", "share of bound"):
        table.add_column(column, justify="left" if column == "work" else "right")
    bars_kept = True
    for work in (name for name in seconds if name not in ("read", "write", "copy")):
        ratio, cpu_ratio = seconds[work] / seconds[ALONE], cpu_seconds[work] / cpu_seconds[ALONE]
        name, _, way = work.partition(": ")
        shown = f"{ratio:.2f}"
        if way == "one pass":
            shown = judged(ratio, RECIPES[name][1], at_most=True)
            bars_kept &= ratio <= RECIPES[name][1]
        bytes_moved = moved(work, elements, recipes)
        share = rates.seconds(*bytes_moved) / seconds[work]
        table.add_row(work, f"{1e3 * seconds[work]:.1f}", shown, f"{1e3 * cpu_seconds[work]:.1f}",
                      f"{cpu_ratio:.2f}", f"{share:.0%}")  # fmt: skip
    console.print(table)
    if not torchao_casts():
        console.print(f"torchao {TORCHAO} is not installed and not measured.")
    color = "red" if taken > IDLE else "green"
    console.print(f"[{color}]Other processes took {taken:.0%} of the processors meanwhile.[/]")
    if options.json:
        record = {
            "machine": platform.processor() or platform.machine(), "torch": torch.__version__,
            "shape": step.shape, "threads": options.threads, "rounds": options.rounds,
            "taken_by_others": taken,
            "seconds": seconds, "cpu_seconds": cpu_seconds,
            "bytes_a_second": {"read": rates.read, "write": rates.write, "copy": rates.copy},
        }  # fmt: skip
        write_json(record, options.json)
    return 0 if bars_kept else 1


if __name__ == "__main__":
    sys.exit(main())
