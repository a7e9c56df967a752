"""Steps of a plan and of an optimizer on simulated ranks, one of which may have a fault, and what
must hold of every such run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import zerocast
from tests.optim.training import Training
from tests.support.claims import assert_same_tensors, stored
from tests.support.partitions import draw_partition
from tests.support.recipes import RECIPES
from tests.support.simulation import Killed, World
from zerocast.comm import Communicator, SingleRank
from zerocast.errors import (
    InputError,
    NonFiniteError,
    PeerFailedError,
    RankMismatchError,
    ZerocastError,
)

STEPS = 3
SHAPES = ((17, 64), (1, 32), (34, 96))
Buffers = Mapping[str, torch.Tensor]

HEARD = {
    "wrong master": InputError,
    "not finite": NonFiniteError,
    "other step": RankMismatchError,
}
"""Faults that ranks tell each other of in a collective that all of them make, and as what. Then
nothing is changed, and the step can be made again."""

ENDING = ("raises", "killed")
"""Faults of a rank that comes to no further collective."""


@dataclass(frozen=True)
class Scenario:
    """What a seed stands for.

    Attributes:
        size: the number of ranks.
        recipe: its name among those of tests.
        drives: "plan" or "optimizer".
        options: those of the plan or the optimizer.
        fault: of :data:`HEARD` or :data:`ENDING`, or "none".
        faulty: the rank that has it.
        step: when, where it belongs to a step.
        collective: before which one, where it ends the rank.
        announces: whether the transport tells others of an error.
    """

    size: int
    recipe: str
    drives: str
    options: tuple[tuple[str, Any], ...]
    fault: str
    faulty: int
    step: int
    collective: int
    announces: bool

    @classmethod
    def drawn(cls, draw: random.Random) -> Scenario:
        """One of all that there are."""
        size, drives = draw.randint(2, 4), draw.choice(("plan", "plan", "plan", "optimizer"))
        fault = draw.choice(("none", *HEARD, *ENDING, *ENDING))
        options: dict[str, Any] = {"verify": draw.choice(("off", "off", "hash", "full"))}
        if drives == "plan":
            options |= {"exchange": draw.choice(("full", "boundary"))}
            options |= {"check_finite": fault == "not finite" or draw.random() < 0.3}
        else:
            options |= {"overlap_cast": draw.random() < 0.5}
            fault = "other step" if fault in HEARD else fault
        return cls(size, draw.choice(list(RECIPES)), drives, tuple(options.items()), fault,
                   draw.randrange(size), draw.randrange(STEPS), draw.randint(1, 30),
                   draw.random() < 0.5)  # fmt: skip


@dataclass
class Ended:
    """How a rank came out.

    Attributes:
        steps: how many it has made.
        heard: what it raised and went on after, by step.
        error: what it ended with.
        weights: what its quantized weights hold, by name; None of one that cannot be read.
    """

    steps: int
    heard: dict[int, type[Exception]]
    error: Exception | None
    weights: dict[str, Buffers | None]


class PlanSteps:
    """Casts of three weights, whose masters are other ones in each step."""

    def __init__(self, comm: Communicator, recipe: str, extents: Any, **options: Any) -> None:
        self.weights = [zerocast.empty(shape, RECIPES[recipe]) for shape in SHAPES]
        self.extents = [by_rank[comm.rank] for by_rank in extents]
        self.masters = [values(0, i)[e.start : e.end].clone() for i, e in enumerate(self.extents)]
        starts = [e.start for e in self.extents]
        self.plan = zerocast.CastPlan(self.weights, self.masters, starts, comm, **options)

    def named(self) -> dict[str, zerocast.QuantizedTensor]:
        """The weights."""
        return {f"weight {i}": weight for i, weight in enumerate(self.weights)}

    def make(self, step: int, fault: str) -> None:
        """Make a step, with or without a fault that is heard of."""
        for i, (master, e) in enumerate(zip(self.masters, self.extents, strict=True)):
            master.copy_(values(step, i)[e.start : e.end])
        given = None
        if fault == "not finite":
            for master in self.masters:
                master[:1] = float("nan")
        elif fault == "wrong master":
            given = [master.double() for master in self.masters]
        self.plan.step = step + (fault == "other step")
        self.plan.cast(given)
        self.plan.all_gather()
        self.plan.post_all_gather_processing()


class OptimizerSteps:
    """Steps of AdamW on quantized and plain weights."""

    def __init__(self, comm: Communicator, recipe: str, extents: Any, **options: Any) -> None:
        self.training = Training(comm, RECIPES[recipe], **options)

    def named(self) -> dict[str, zerocast.QuantizedTensor]:
        """The quantized weights."""
        params = enumerate(self.training.params)
        return {f"weight {i}": p for i, p in params if isinstance(p, zerocast.QuantizedTensor)}

    def make(self, step: int, fault: str) -> None:
        """Make a step, with or without a fault that is heard of."""
        self.training.feed(step, alike=True)
        self.training.optimizer.step(number=step + (fault == "other step"))


DRIVERS: dict[str, Any] = {"plan": PlanSteps, "optimizer": OptimizerSteps}


@cache
def values(step: int, weight: int) -> torch.Tensor:
    """The master of a weight, flat."""
    generator = torch.Generator().manual_seed(10 * step + weight)
    rows, cols = SHAPES[weight]
    drawn = torch.randn(rows * cols, generator=generator)
    return drawn * 10.0 ** torch.randint(-6, 4, drawn.shape, generator=generator)


@cache
def expected(drives: str, recipe: str) -> list[dict[str, Buffers]]:
    """What the weights hold on one rank, before the first step and after each."""
    extents = [[zerocast.layout.Extent(0, rows * cols)] for rows, cols in SHAPES]
    steps = DRIVERS[drives](SingleRank(), recipe, extents)
    held = [contents(steps.named())]
    for step in range(STEPS):
        steps.make(step, "none")
        held.append(contents(steps.named()))
    return held


def contents(weights: Mapping[str, zerocast.QuantizedTensor]) -> dict[str, Any]:
    """Copies of all buffers of each weight; None of one that refuses to be read."""
    return {name: stored({name: w}) if is_whole(w) else None for name, w in weights.items()}


def is_whole(weight: zerocast.QuantizedTensor) -> bool:
    """Whether the weight can be read."""
    try:
        weight.dequantize()
    except ZerocastError:
        return False
    return True


def failure(seed: int) -> tuple[Scenario, str]:
    """The scenario of a seed, and what did not hold in it; nothing where all did."""
    draw = random.Random(seed)
    scenario = Scenario.drawn(draw)
    try:
        play(scenario, draw)
    except Exception as error:
        return scenario, f"seed {seed}, {scenario}: {error!r}"
    return scenario, ""


def play(scenario: Scenario, draw: random.Random) -> None:
    """Run a scenario, in the order that is drawn.

    Raises:
        AssertionError: where something that must hold does not.
    """
    numels = [rows * cols for rows, cols in SHAPES]
    extents = [draw_partition(numel, scenario.size, draw) for numel in numels]
    world = World(scenario.size, draw, announces=scenario.announces)
    fired: list[int] = []

    def fault(rank: int, number: int) -> None:
        if rank == scenario.faulty and number >= scenario.collective:
            fired.append(number)
            raise Killed if scenario.fault == "killed" else OSError("planted")

    if scenario.fault in ENDING:
        world.fault = fault

    def body(comm: Communicator) -> Ended:
        ended = Ended(0, {}, None, {})
        steps: Any = None
        try:
            steps = DRIVERS[scenario.drives](
                comm, scenario.recipe, extents, **dict(scenario.options)
            )
            for step in range(STEPS):
                if step == scenario.step and scenario.fault in HEARD:
                    mine = scenario.fault if comm.rank == scenario.faulty else "none"
                    ended.heard = heard(lambda mine=mine, step=step: steps.make(step, mine), step)
                if step != scenario.step or scenario.fault not in HEARD or ended.heard:
                    steps.make(step, "none")  # a rank without an element has no master to be wrong
                ended.steps += 1
                check(contents(steps.named()), [expected_of(scenario)[ended.steps]], "all ranks")
        except (ZerocastError, OSError) as error:
            ended.error = error
        ended.weights = contents(steps.named()) if steps else {}
        return ended

    outcomes = world.run(body)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Killed):
            raise outcome
    judge(scenario, outcomes, bool(fired), extents)


def heard(make: Callable[[], None], step: int) -> dict[int, type[Exception]]:
    """Which error a step raises, by its number; none where it raises none."""
    try:
        make()
    except ZerocastError as error:
        return {step: type(error)}
    return {}


def expected_of(scenario: Scenario) -> list[dict[str, Buffers]]:
    """What the scenario's weights hold on one rank."""
    return expected(scenario.drives, scenario.recipe)


def judge(
    scenario: Scenario, outcomes: Sequence[Ended | Killed], fired: bool, extents: Any
) -> None:
    """What must hold of how the ranks came out."""
    ends = [outcome for outcome in outcomes if isinstance(outcome, Ended)]
    for rank, end in enumerate(outcomes):
        if isinstance(end, Killed):
            continue
        said = (
            f"rank {rank} of {len(outcomes)}: {end.steps} steps, heard {end.heard}, {end.error!r}"
        )
        whole = expected_of(scenario)[end.steps : end.steps + 2]
        check(end.weights, whole, said)
        if not fired:
            assert end.error is None, said
            assert end.steps == STEPS, said
        elif rank == scenario.faulty:
            assert type(end.error) is OSError, said
        else:
            assert isinstance(end.error, PeerFailedError), said
            named = rf"of a group of {len(outcomes)}, .*\branks? (\d, )*{scenario.faulty}(, \d)* "
            why = "(raised OSError: planted|neither came nor answered)"
            assert re.search(named + why, str(end.error)), said
        if scenario.fault in HEARD:
            is_empty = not any(by_rank[scenario.faulty] for by_rank in extents)
            kind = {scenario.step: HEARD[scenario.fault]}
            if not (scenario.fault == "not finite" and is_empty):
                assert end.heard == kind, said
    assert max(end.steps for end in ends) - min(end.steps for end in ends) <= 1


def check(held: Mapping[str, Buffers | None], whole: Sequence[Any], said: str) -> None:
    """Each weight that can be read is, whole, that of one of the steps."""
    for name, buffers in held.items():
        found = buffers and [difference(buffers, step[name], said) for step in whole]
        assert not found or None in found, found[0]


def difference(held: Buffers, expected: Buffers, said: str) -> str | None:
    """What differs between a weight's buffers and those expected."""
    try:
        assert_same_tensors(held, expected, said)
    except AssertionError as error:
        return str(error)
    return None
