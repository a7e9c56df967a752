"""Plans and optimizers on simulated ranks: in any order, with a fault or none, all ranks make the
same collectives or all raise, and what can be read is whole. scripts/simulate.py plays more seeds.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.simulated_steps import SHAPES, PlanSteps, Scenario, failure, judge, play
from tests.support.simulation import Fault
from zerocast.cast.exchange import Exchange
from zerocast.layout import chunk
from zerocast.tensors.staleness import CastVersion


@pytest.mark.parametrize("part", range(4))
def test_seeds(part: int) -> None:
    """Whatever is drawn."""
    wrong = [failure(seed)[1] for seed in range(10 * part, 10 * part + 10)]
    assert not any(wrong), "\n".join(wrong)


REDUCE_AMAX, REDUCE = Exchange.reduce_amax, Exchange._reduce


def raise_alone(self: Exchange, step: int = 0, error: Any = None) -> None:
    """Raise before the collective that the other ranks make."""
    if error is not None:
        raise error
    REDUCE_AMAX(self, step)


def tell_nobody(self: Exchange, comm: Any, entries: Any, heard: bool) -> None:
    """Reduce amaxes as if nothing had gone wrong here."""
    REDUCE(self, comm, entries, False)


def compare_no_steps(self: Exchange, step: int = 0, error: Any = None) -> None:
    """Say that the step is 0."""
    REDUCE_AMAX(self, 0, error)


def note_nothing(self: CastVersion, written: Any = ()) -> None:
    """Let weights that are written by half be read."""


PLAN = Scenario(3, PlanSteps, "nvfp4", {"exchange": "boundary"}, Fault(1, 10, "raises", "step"),
                SHAPES, [[chunk(rows * cols, rank, 3) for rank in range(3)]
                         for rows, cols in SHAPES], announces=False)  # fmt: skip
OTHER_STEP = replace(PLAN, fault=replace(PLAN.fault, kind="skips"))
ENDS = replace(PLAN, recipe="rowwise", options={}, fault=Fault(0, 10, "raises", ".*: .*"))
MISTAKES = [
    (Exchange, "reduce_amax", raise_alone, PLAN, r"heard \[\]"),
    (Exchange, "_reduce", tell_nobody, PLAN, "rank . calls"),
    (Exchange, "reduce_amax", compare_no_steps, OTHER_STEP, r"heard \[\]"),
    (CastVersion, "tick", note_nothing, ENDS, "differ in all"),
]


@pytest.mark.parametrize(("owner", "name", "mistake", "scenario", "message"), MISTAKES)
def test_mistakes_are_found(
    owner: Any,
    name: str,
    mistake: Callable[..., Any],
    scenario: Scenario,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A protocol with a mistake fails in one of a few schedules."""
    monkeypatch.setattr(owner, name, mistake)

    def play_all() -> None:
        for seed in range(12):
            fault = replace(scenario.fault, place=scenario.fault.place + seed)
            world, outcomes = play(replace(scenario, fault=fault), random.Random(seed))
            judge(scenario, world.events, outcomes)

    with pytest.raises(AssertionError, match=message):
        play_all()
