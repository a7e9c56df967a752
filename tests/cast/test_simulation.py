"""Plans and optimizers on simulated ranks: in any order, with a fault or none, all ranks make the
same collectives or all raise, and what can be read is whole. scripts/simulate.py plays more seeds.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.simulated_steps import Scenario, failure, play
from zerocast.cast.exchange import Exchange
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


PLAN = Scenario(3, "nvfp4", "plan", (("exchange", "boundary"),), "wrong master", 1, 1, 14, False)
FULL = Scenario(4, "rowwise", "plan", (("exchange", "full"),), "raises", 0, 1, 12, False)
MISTAKES = [
    (Exchange, "reduce_amax", raise_alone, PLAN, "heard {}"),
    (Exchange, "_reduce", tell_nobody, PLAN, "rank . calls"),
    (Exchange, "reduce_amax", compare_no_steps, replace(PLAN, fault="other step"), "heard {}"),
    (CastVersion, "tick", note_nothing, FULL, "differ in all"),
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
            play(replace(scenario, collective=scenario.collective + seed), random.Random(seed))

    with pytest.raises(AssertionError, match=message):
        play_all()
