"""Steps of plans, functional calls and optimizers on simulated ranks, one of which may have a
fault, and what must hold of every such run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import torch

import zerocast
from tests.optim.training import Training
from tests.support.claims import assert_same_tensors
from tests.support.partitions import draw_partition
from tests.support.recipes import RECIPES
from tests.support.simulation import Fault, Killed, World
from zerocast.comm import Communicator, SingleRank
from zerocast.errors import (
    InputError,
    NonFiniteError,
    PeerFailedError,
    RankMismatchError,
    UnfinishedStepError,
    VerificationError,
    ZerocastError,
)
from zerocast.layout import Extent

SHAPES = ((17, 64), (1, 32), (34, 96))
Extents: TypeAlias = Sequence[Sequence[Extent]]
"""By weight and rank."""

HEARD = {"raises": InputError, "not finite": NonFiniteError, "skips": RankMismatchError}
"""Faults of a step that ranks tell each other of in a collective that all of them make, and as
what. Then nothing is changed, and the step can be made again."""

ENDING = (("raises", ".*: .*"), ("dies", ".*: .*"))
"""Faults of a rank that comes to no further collective, which is the event that they are at."""

FAULTS = (("none", "none"), *((kind, "step") for kind in HEARD), *ENDING, *ENDING)
ENDS = (
    (PeerFailedError, "gave up"),
    (OSError, "raised"),
    ((UnfinishedStepError, VerificationError), "refused"),
)
"""By its error the end of a rank that does not make the step again."""


@cache
def values(step: int, shape: tuple[int, int]) -> torch.Tensor:
    """The master of a weight, flat."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(shape[0] * shape[1], generator=generator)
    return drawn * 10.0 ** torch.randint(-6, 4, drawn.shape, generator=generator)


class PlanSteps:
    """Casts by a plan, or by functional calls, of masters that are other ones in each step."""

    late = False

    def __init__(self, comm: Communicator, recipe: str, shapes: Any, extents: Extents, *,
                 calls: bool = False, columnwise: bool = True, **options: Any) -> None:  # fmt: skip
        self.comm, self.shapes = comm, shapes
        self.extents = [by_rank[comm.rank] for by_rank in extents]
        self.weights = [
            zerocast.empty(shape, RECIPES[recipe], columnwise=columnwise) for shape in shapes
        ]
        self.starts = [extent.start for extent in self.extents]
        self.masters = [torch.ones(extent.size) for extent in self.extents]
        if not calls:
            self.plan = zerocast.CastPlan(self.weights, self.masters, self.starts, comm, **options)

    def step(self, step: int, fault: str) -> None:
        """Make a step, with or without a fault."""
        for master, shape, e in zip(self.masters, self.shapes, self.extents, strict=True):
            master.copy_(values(step, shape)[e.start : e.end])
            master[: fault == "not finite"] = torch.nan
        given = [master.double() if fault == "raises" else master for master in self.masters]
        if hasattr(self, "plan"):
            self.plan.step = step + (fault == "skips") - (fault == "repeats")
            self.plan.cast(given)
            self.plan.all_gather()
            return
        if fault == "forgets":
            self.weights[0].quantized_storage.plans.clear()
        zerocast.quantize_master_weights(self.weights, given, self.starts, self.comm)
        for weight in self.weights:
            self.comm.all_gather_(weight.rowwise_data.view(-1))
        zerocast.post_all_gather_processing(self.weights)

    def settle(self) -> None:
        """Nothing is under way."""


class OptimizerSteps:
    """Steps of AdamW on quantized and plain weights."""

    def __init__(self, comm: Communicator, recipe: str, shapes: Any, extents: Extents, *,
                 scaler: bool = False, **options: Any) -> None:  # fmt: skip
        self.training = Training(comm, RECIPES[recipe], **options)
        self.training.rank = 0  # whose gradients all have
        self.late = "overlap_all_gather" in options
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if scaler else None
        params = self.training.params
        self.weights = [p for p in params if isinstance(p, zerocast.QuantizedTensor)]
        self.settle = self.training.optimizer.wait_for_all_gather

    def step(self, step: int, fault: str) -> None:
        """Make a step, with or without a fault."""
        if self.scaler is not None:
            self.training.scaled_backward(self.scaler, step, overflows=fault == "overflow")
            self.scaler.step(self.training.optimizer)
            self.scaler.update()
            if self.training.optimizer._progress.steps == step - 1:
                raise InputError("all ranks have left the step out")
            return
        self.training.feed(step)

        def closure() -> None:
            if fault == "raises":
                raise InputError("planted")

        number = step + (fault == "skips") - (fault == "repeats")
        self.training.optimizer.step(closure, number=number)


@dataclass(frozen=True)
class Scenario:
    """What is run.

    Attributes:
        size: the number of ranks.
        kind: what makes steps.
        recipe: its name among those of tests.
        options: those of the plan or the optimizer.
        fault: what goes wrong.
        shapes, extents: of the weights, and who has which part of them.
        announces: whether the transport tells others of an error.
        steps: how many are made.
    """

    size: int
    kind: Any
    recipe: str
    options: dict[str, Any]
    fault: Fault
    shapes: tuple[tuple[int, int], ...]
    extents: Extents
    announces: bool
    steps: int = 3

    @classmethod
    def drawn(cls, draw: random.Random) -> Scenario:
        """One of all that there are."""
        size, kind = draw.randint(2, 4), draw.choice((PlanSteps,) * 3 + (OptimizerSteps,))
        options: dict[str, Any] = {"verify": draw.choice(("off", "off", "hash", "full"))}
        what, at = draw.choice(FAULTS)
        if kind is PlanSteps:
            options |= {"exchange": draw.choice(("full", "boundary"))}
            options |= {"check_finite": what == "not finite" or draw.random() < 0.3}
        else:
            options |= {"overlap_cast": draw.random() < 0.5}
            what = "skips" if at == "step" else what
        fault = Fault(draw.randrange(size), draw.randint(1, 20), what, at)
        extents = [draw_partition(rows * cols, size, draw) for rows, cols in SHAPES]
        return cls(size, kind, draw.choice(list(RECIPES)), options, fault, SHAPES, extents,
                   draw.random() < 0.5)  # fmt: skip


@dataclass
class Ended:
    """How a rank came out.

    Attributes:
        end: in one word.
        made: how many steps it has made.
        heard: what it raised and went on after.
        error: what it ended with.
        held: what its quantized weights hold; None of one that cannot be read.
        steps: what made them, kept because nobody waits for the gathers of what is collected.
    """

    end: str = ""
    made: int = 0
    heard: list[type[Exception]] = field(default_factory=list)
    error: Exception | None = None
    held: list[Any] = field(default_factory=list)
    steps: Any = None


def read(weight: zerocast.QuantizedTensor) -> Any:
    """Copies of all buffers of a weight that can be read."""
    weight.dequantize()
    storage = weight.quantized_storage
    stale = storage.derived_names if storage.is_stale else ()
    return {name: buffer.clone() for name, buffer in storage.buffers.items() if name not in stale}


def read_if_whole(weight: zerocast.QuantizedTensor) -> Any:
    """The same, or None of one that refuses it."""
    try:
        return read(weight)
    except ZerocastError:
        return None


@cache
def expected(kind: Any, recipe: str, shapes: Any, steps: int) -> list[list[Any]]:
    """What the weights hold on one rank, before the first step and after each."""
    extents = [[Extent(0, rows * cols)] for rows, cols in shapes]
    one = kind(SingleRank(), recipe, shapes, extents)
    held = [[read_if_whole(weight) for weight in one.weights]]
    for step in range(1, steps + 1):
        one.step(step, "")
        held.append([read(weight) for weight in one.weights])
    return held


def play(scenario: Scenario, draw: random.Random) -> tuple[World, list[Any]]:
    """Run a scenario in an order that is drawn; what happened, and by rank :class:`Ended` or
    :class:`Killed`.

    Raises:
        AssertionError: where a weight can be read whose bytes are not those that one rank has.
    """
    world = World(scenario.size, draw, scenario.fault, announces=scenario.announces)
    whole = expected(scenario.kind, scenario.recipe, scenario.shapes, scenario.steps)

    def is_compared() -> bool:
        """Where a digest is wrong, so are bytes; and a step that was made before is made twice."""
        return not any(fault and name == "digests" for _, name, fault in world.events)

    def make(comm: Communicator, ended: Ended) -> None:
        steps = ended.steps = ended.steps or scenario.kind(
            comm, scenario.recipe, scenario.shapes, scenario.extents, **scenario.options
        )

        def use(step: int) -> None:
            assert not any(weight.quantized_storage.is_stale for weight in steps.weights)
            held = [read(weight) for weight in steps.weights]
            check(held, [whole[step]] if is_compared() else [], f"step {step}")
            world.note(comm.rank, "use")

        while ended.made < scenario.steps:
            step = ended.made + 1
            steps.step(step, world.note(comm.rank, "step"))
            if not steps.late or (comm.rank + step) % 2:
                use(step)
            world.note(comm.rank, "next")
            ended.made = step
        steps.settle()
        use(ended.made)

    def body(comm: Communicator) -> Ended:
        ended = Ended()
        while not ended.end:
            try:
                make(comm, ended)
                ended.end = "done"
            except (ZerocastError, OSError) as error:
                ended.end = next((end for kind, end in ENDS if isinstance(error, kind)), "")
                casts = (comm.rank, "partial_amax") in {event[:2] for event in world.events}
                if not ended.end and isinstance(error.__cause__, OSError):
                    ended.end = "raised"
                elif not ended.end:
                    ended.heard.append(type(error))
                    world.note(comm.rank, "again")
                    refused = (casts and not ended.steps) or len(ended.heard) > scenario.steps
                    ended.end = "refused" if refused else ""
                    continue
                ended.error = error
            if ended.end != "raised":
                world.note(comm.rank, ended.end)
        ended.held = [read_if_whole(weight) for weight in getattr(ended.steps, "weights", [])]
        if is_compared() and "calls" not in scenario.options:  # whose caller knows what is torn
            check(ended.held, whole[ended.made : ended.made + 2], f"rank {comm.rank} at last")
        return ended

    outcomes = world.run(body)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Killed):
            raise outcome
    return world, outcomes


def check(held: Sequence[Any], whole: Sequence[Sequence[Any]], said: str) -> None:
    """What can be read of each weight is, whole, that of one of the steps."""
    for i, buffers in enumerate(held):
        wrong = []
        for step in whole if buffers else ():
            try:
                assert_same_tensors(buffers, {name: step[i][name] for name in buffers}, said)
                break
            except AssertionError as error:
                wrong.append(f"weight {i}: {error}")
        else:
            assert not wrong, wrong[0]


def judge(scenario: Scenario, events: Sequence[tuple[int, str, str]], outcomes: list[Any]) -> None:
    """What must hold of a run in which a rank ends at a collective, or all hear of a fault."""
    faulty, at, fault = next((event for event in events if event[2]), (-1, "", ""))
    ends = {rank: end for rank, end in enumerate(outcomes) if isinstance(end, Ended)}
    for rank, end in ends.items():
        said = f"rank {rank} of {len(outcomes)}: {end.made} steps, heard {end.heard}, {end.error!r}"
        if at in ("", "step"):
            assert (end.error, end.made) == (None, scenario.steps), said
        elif rank == faulty:
            assert type(end.error) is OSError, said
        else:
            assert isinstance(end.error, PeerFailedError), said
            named = rf"of a group of {len(outcomes)}, .*\branks? (\d, )*{faulty}(, \d)* "
            why = "(raised OSError: planted|neither came nor answered)"
            assert re.search(named + why, str(end.error)), said
        is_empty = not any(by_rank[faulty] for by_rank in scenario.extents)
        if not (fault == "not finite" and is_empty):
            assert end.heard == ([HEARD[fault]] if at == "step" else []), said
    made = [end.made for end in ends.values()]
    assert max(made) - min(made) <= 1


def failure(seed: int) -> tuple[str, str]:
    """What a seed stands for, and what did not hold in it; nothing where all did."""
    draw = random.Random(seed)
    scenario = Scenario.drawn(draw)
    try:
        world, outcomes = play(scenario, draw)
        judge(scenario, world.events, outcomes)
    except Exception as error:
        return "failed", f"seed {seed}, {scenario}: {error!r}"
    came = [f"{kind} at a {name.split()[-1]}" for _, name, kind in world.events if kind]
    return f"{scenario.kind.__name__}: {came[0] if came else 'no fault'}", ""
