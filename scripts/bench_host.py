"""How long does the host take for a plan's calls, whatever the GPU takes?

Plans of 224 and 5,000 weights [16, 16] of one rank: without a device, the CPU seconds of each call
of a step, of making a plan, and of what a ZeroOptimizer pays, where launches do nothing
(``scripts/bench_cuda.py --host``); with one, the time of ``plan.cast()`` until it returns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from bench_frame import Work, cpu_clock, host_clock, medians, run_all
from bench_rows import Result
from cuda_report import host_lines

import zerocast
from zerocast.backends.cuda import CudaBackend, Kernel, KernelArguments
from zerocast.recipes import Recipe
from zerocast.tensors.allocations import allocate_together, lay_together
from zerocast.tensors.ledger import Scope

NVFP4, FP8 = zerocast.NVFP4BlockScaling(), zerocast.Float8CurrentScaling()

PLANS = (224, 5000)
"""Weights of the plans whose host time is taken."""

ZERO_PARTS = {
    "cast": ("partial_amax", "reduce_amax", "compute_scale", "partial_cast", "store_plain"),
    "all_gather": ("all_gather_scales", "all_gather"),
    "post-processing": ("post_all_gather_processing",),
}
"""The phases of a ZeroOptimizer's step that make the weights from the masters."""

PART_GOALS = {
    "cast": 10e-6,
    "post-processing": 20e-6,
    "plan": 1.0,
    "ZeroOptimizer, cast": 10e-6,
    "ZeroOptimizer, all_gather": 20e-6,
    "ZeroOptimizer, post-processing": 20e-6,
}
"""CPU seconds for 5,000 weights, one rank, launches that do nothing, in a few allocations."""


def without_device(rounds: int) -> list[str]:
    """Return the report of what can be measured without a GPU."""
    stubbed = CudaBackend(NoLauncher())
    return [
        "Launches that do nothing:",
        *host_lines([host_time(stubbed, n, 20 * rounds) for n in PLANS]),
        *part_lines([host_parts(n, rounds) for n in PLANS]),
    ]


def host_seconds(work: Work, rounds: int, before: Work = lambda: None) -> float:
    """Return the median time until ``work`` returns, while nothing waits for the GPU."""
    return medians({"work": work}, rounds, host_clock, before, warm_up=5)["work"]


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

    def launch(self, kernel: Kernel, handle: int, grid: int, arguments: KernelArguments) -> None:
        """Count the launch."""
        self.launches += 1


def plan_of(
    scope: Scope,
    recipes: Sequence[Recipe],
    device: torch.device,
    *,
    in_place: bool = False,
) -> zerocast.CastPlan:
    """Plan weights [16, 16] of one rank, laid together where one tensor of each storage is looked
    at; in place, codes lie end to end.
    """
    models = [zerocast.empty((16, 16), recipe, device=device) for recipe in recipes]
    sizes = [model.rowwise_data.numel() for model in models]
    if scope == "storage":
        lay_together(model.quantized_storage for model in models)
    if in_place:
        flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        places = list(flat.split(sizes))
    else:
        places = allocate_together(sizes, torch.uint8, device)
    if scope == "storage" or in_place:
        for model, codes in zip(models, places, strict=True):
            zerocast.replace_raw_data(model, codes)
    masters = torch.zeros(len(models) * 256, device=device)
    return zerocast.CastPlan(models, masters.split(256), [0] * len(models), scope=scope)


def host_time(backend: CudaBackend, weights: int, rounds: int) -> Result:
    """Measure the host time of ``plan.cast()``, a quarter of the weights FP8, of a plan that looks
    at storages and of one that looks at tensors, and its launches, memsets left out.
    """
    device = backend.launcher.device
    wait = (torch.cuda.synchronize,) if device.type == "cuda" else ()
    with zerocast.use_backend(backend):
        recipes = [FP8 if i % 4 == 0 else NVFP4 for i in range(weights)]
        few = max(rounds // 20, 1)
        looking = host_seconds(plan_of("tensor", recipes, device).cast, few, *wait)
        plan = plan_of("storage", recipes, device)
        seconds = host_seconds(plan.cast, rounds, *wait)
        before = backend.launcher.launches
        plan.cast()
        launches = backend.launcher.launches - before
    return {"weights": weights, "seconds": seconds, "looking": looking, "launches": launches}


def host_parts(weights: int, rounds: int) -> Result:
    """Measure the CPU seconds of every call of a step of NVFP4 weights, whose launches do nothing:
    of plans that look at storages, of plans whose tensors are their caller's, and of making one of
    these; then what a ZeroOptimizer pays.
    """
    found: Result = {"weights": weights}

    def seconds(work: Work) -> float:
        return medians({"work": work}, rounds, cpu_clock, warm_up=3)["work"]

    recipes, device = [NVFP4] * weights, torch.device("cpu")
    with zerocast.use_backend(CudaBackend(NoLauncher())):
        scopes: dict[Scope, str] = {"tensor": ", a caller's tensors", "storage": ""}
        for scope, suffix in scopes.items():
            for in_place in (False, True):
                plan = plan_of(scope, recipes, device, in_place=in_place)
                gather = "in place" if in_place else "staged"
                found |= {
                    f"cast{suffix}": seconds(plan.cast),
                    f"post-processing{suffix}": seconds(plan.post_all_gather_processing),
                    f"all_gather, {gather}{suffix}": seconds(plan.all_gather),
                }
        models = [zerocast.empty((16, 16), recipe) for recipe in recipes]
        masters = [torch.zeros(256) for _ in recipes]
        start = time.process_time()
        zerocast.CastPlan(models, masters, [0] * weights)
        found["plan"] = time.process_time() - start
        parts = zero_parts(weights)
        found |= {f"ZeroOptimizer, {name}": seconds(work) for name, work in parts.items()}
    return found


def zero_parts(weights: int) -> dict[str, Work]:
    """Return by name the parts of a step of a ZeroOptimizer of NVFP4 weights [16, 16], one rank."""
    params = [(f"{i}", torch.nn.Parameter(zerocast.empty((16, 16), NVFP4))) for i in range(weights)]
    optimizer = zerocast.optim.ZeroOptimizer(
        params, torch.optim.SGD, zerocast.comm.SingleRank(), lr=0.1
    )
    gradient = torch.zeros(16, 16, dtype=torch.bfloat16)
    for _, param in params:
        param.grad = gradient
    optimizer.step()
    phases = dict(optimizer.phases)
    parts: dict[str, Work] = {}
    for part, names in ZERO_PARTS.items():
        parts[part] = partial(run_all, [phases[name] for name in names])
    return parts | {"whole step, with gradients and torch's optimizer": optimizer.step}


def part_lines(rows: list[dict]) -> list[str]:
    """CPU time of every call of a step, by numbers of weights, whether the goals for the largest
    number were met, and how much longer that takes than the smallest.
    """
    first, last = rows[0], rows[-1]
    lines = []
    for part in sorted(first.keys() - {"weights"}):
        times = ", ".join(f"{row[part] * 1e6:.0f} us for {row['weights']}" for row in rows)
        goal = PART_GOALS.get(part)
        verdict = ""
        if goal is not None:
            verdict = f", {goal * 1e6:.0f} {'met' if last[part] <= goal else 'MISSED'}"
        lines.append(
            f"- {part}: {times} weights{verdict}; {last[part] / first[part]:.1f} times as long"
        )
    return lines
