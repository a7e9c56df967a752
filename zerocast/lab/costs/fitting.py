"""fit: measures the costs of this machine, and the error of the estimate of a step.

Collectives are timed alone. Phases are timed in steps of small models, without their collectives.
Each cost is fitted by the least sum of squared relative errors. Then a step of another model, which
was not used for fitting, is timed and compared with its estimate.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zerocast import Recipe, empty
from zerocast.comm import Communicator, RecordingCommunicator, Traffic
from zerocast.lab.costs.dry_run import StepOptions
from zerocast.lab.costs.estimation import Estimate, estimate
from zerocast.lab.costs.machine import Cost, Machine, messages
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import as_recipe

Shapes = Sequence[tuple[int, int]]

FITTED: list[Shapes] = [[(side, side)] * 4 for side in (128, 256, 512, 1024)]
"""The shapes of the weights of the models whose steps are fitted."""
CHECKED: Shapes = [(384, 384)] * 6 + [(768, 768)] * 2
"""The shapes of the weights of the model whose step is compared with its estimate."""
WARM, TIMED = 2, 7
"""The numbers of untimed warm-up runs and of timed runs, of steps and of collectives."""
SIZES = [1 << bits for bits in range(10, 25, 2)]
"""The sizes of the buffers of timed collectives, in bytes."""


@dataclass(frozen=True, slots=True)
class Check:
    """The time and the estimate of a phase, in a step that was not used for fitting.

    Attributes:
        phase: the name of the phase.
        measured: the seconds, as the mean over ranks of medians over steps.
        estimated: the seconds of the estimate.
    """

    phase: str
    measured: float
    estimated: float


def fit(comm: Communicator, recipe: Recipe | str = "nvfp4") -> tuple[Machine, list[Check]]:
    """Fit the costs of collectives over ``comm`` and of a step's phases on the CPU. Collective.

    It takes some seconds. Other load on the machine makes the measured costs higher.

    Args:
        comm: the ranks, two or more for the costs of collectives.
        recipe: the recipe of the weights.

    Returns:
        The machine, and for each phase of a step its measured and its estimated time; the same on
        every rank.
    """
    recipe = as_recipe(recipe)
    collectives = _fit_collectives(comm) if comm.size > 1 else {}
    points: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for shapes in FITTED:
        estimated = _estimate(comm, shapes, recipe)
        for phase, (_, local) in _measure(comm, shapes, recipe).items():
            points[phase].append((1, estimated.phase_bytes(phase), local))
    phases = {name: cost_of(found) for name, found in points.items() if any(n for _, n, _ in found)}
    name = f"this machine: {comm.size} ranks of {type(comm).__name__}, {type(recipe).__name__}"
    anything = Cost(0.0, min(cost.rate for cost in phases.values()))
    machine = Machine(name, anything, anything, collectives, phases)
    expected = _estimate(comm, CHECKED, recipe).seconds(machine)
    measured = _measure(comm, CHECKED, recipe)
    return machine, [Check(phase, all_, expected[phase]) for phase, (all_, _) in measured.items()]


def cost_of(points: Sequence[tuple[int, int, float]]) -> Cost:
    """Return the cost with the least sum of squared relative errors.

    Args:
        points: tuples of the number of messages or phases, their bytes, and their seconds.
    """
    table = torch.tensor(points, dtype=torch.float64, device="cpu").clamp(min=1e-12)
    fixed, by_byte = (table[:, i] / table[:, 2] for i in (0, 1))
    both = torch.stack([fixed, by_byte], dim=1)
    seconds, per_byte = torch.linalg.lstsq(both, torch.ones_like(fixed).unsqueeze(1)).solution[:, 0]
    # If one part is negative, it is set to zero cost, and the other part alone is fitted.
    if seconds < 0:
        return Cost(0.0, float(by_byte.square().sum() / by_byte.sum()))
    if per_byte <= 0:
        return Cost(float(fixed.sum() / fixed.square().sum()), 1e15)
    return Cost(float(seconds), float(1 / per_byte))


def _fit_collectives(comm: Communicator) -> dict[str, Cost]:
    """Return the cost of each kind of collective, on buffers of :data:`SIZES`. Collective."""
    points: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for nbytes in SIZES:
        buffer = torch.zeros(nbytes // 4 // comm.size * comm.size, dtype=torch.int32, device="cpu")
        seconds: dict[str, list[float]] = defaultdict(list)
        sent: dict[str, Traffic] = {}
        for _ in range(WARM + TIMED):
            recording = RecordingCommunicator(comm)
            comm.barrier()
            recording.all_reduce_max_(buffer)
            comm.barrier()
            recording.all_gather_(buffer)
            comm.barrier()
            recording.start_all_to_all(buffer, buffer)()
            for (_, kind), sent[kind] in recording.traffic.items():
                seconds[kind].append(sent[kind].seconds)
        for kind, by_call in _mean_over_ranks(comm, seconds).items():
            points[kind].append((messages(kind, comm.size), sent[kind].sent_bytes, by_call))
    return {kind: cost_of(found) for kind, found in points.items()}


def _mean_over_ranks(comm: Communicator, seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the medians of the timed runs, averaged over the ranks. Collective."""
    medians = {name: statistics.median(each[WARM:]) for name, each in seconds.items()}
    everyone = comm.all_gather_object(medians)
    return {name: statistics.fmean(each[name] for each in everyone) for name in medians}


def _estimate(comm: Communicator, shapes: Shapes, recipe: Recipe) -> Estimate:
    params = [(f"w{i}", empty(shape, recipe, device="meta")) for i, shape in enumerate(shapes)]
    options = StepOptions(device="cpu")
    return estimate(list(params), comm.size, rank=comm.rank, options=options)


def _measure(comm: Communicator, shapes: Shapes, recipe: Recipe) -> dict[str, tuple[float, float]]:
    """Return the seconds of each phase of a step, in total and outside of collectives."""
    recording = RecordingCommunicator(comm)
    params = [
        (f"w{i}", torch.nn.Parameter(empty(shape, recipe, device="cpu")))
        for i, shape in enumerate(shapes)
    ]
    for _, param in params:
        param.grad = torch.ones(param.shape, dtype=param.dtype, device="cpu")
    optimizer = ZeroOptimizer(params, group=recording)
    whole: dict[str, list[float]] = defaultdict(list)
    local: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def on_phase(name: str) -> Iterator[None]:
        comm.barrier()  # so that no rank waits for another's earlier phase
        start = time.perf_counter()
        with recording.label(name):
            yield
        whole[name].append(time.perf_counter() - start)
        local[name].append(whole[name][-1] - recording.total(label=name).seconds)

    optimizer.on_phase = on_phase
    for _ in range(WARM + TIMED):
        recording.reset()
        optimizer.step()
    alone = _mean_over_ranks(comm, local)
    return {
        name: (seconds, max(alone[name], 0.0))
        for name, seconds in _mean_over_ranks(comm, whole).items()
    }
