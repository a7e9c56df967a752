"""What all ranks do together: the code itself, gone through every way that there is.

tests/support/simulation.py says how: nobody waits for ever, all ranks raise or none, an error is
heard, and nobody can read or use weights of two steps. Of its seeds, which draw the rest, 40 are
played by day, 10,000 nightly. What a rank comes to without a fault is recorded in operations.json:
a change that adds, moves or leaves out a collective or a phase fails :func:`test_the_operations`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import simulation
from tests.support.nightly import nightly
from tests.support.simulation import Mistake, OptimizerSteps, PlanSteps, Scenario, every_way, play
from zerocast.cast.exchange import Exchange
from zerocast.tensors.staleness import CastVersion

LATER, EARLIER = {"overlap_all_gather": True}, {"overlap_cast": True}
HASH, BOUNDARY, BUCKETS = {"verify": "hash"}, {"exchange": "boundary"}, {"bucket_size": 1500}
PROGRAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plan": (PlanSteps, {}),
    "boundary, hash": (PlanSteps, BOUNDARY | HASH),
    "4 over 6, finite": (PlanSteps, {"recipe": "nvfp4-4over6", "check_finite": True}),
    "codes early": (PlanSteps, BOUNDARY | {"recipe": "mxfp8", "columnwise": False}),
    "calls": (PlanSteps, {"calls": True}),
    "optimizer, hash": (OptimizerSteps, HASH),
    "late gathers, hash": (OptimizerSteps, LATER | BUCKETS | HASH),
    "overlapped cast": (OptimizerSteps, EARLIER | BUCKETS),
    "both overlapped": (OptimizerSteps, EARLIER | LATER | BUCKETS),
    "scaler": (OptimizerSteps, {"scaler": True}),
}
"""By name what makes a program's steps, and with which options."""

BY_DAY = ("plan", "boundary, hash", "calls", "late gathers, hash")
MOST = [name if name in BY_DAY else nightly(name) for name in PROGRAMS]
SIZES = [(2, 1), nightly(3, 1), nightly(2, 2)]
"""Of ranks, and of faults."""
CALLERS = ("skips", "repeats", "not finite", "forgets", "flips", "overflow")
"""Faults of callers, and bytes that differ."""
OPERATIONS = Path(__file__).with_name("operations.json")


@pytest.mark.parametrize(("size", "faults"), SIZES)
@pytest.mark.parametrize("name", MOST)
def test_every_way(name: str, size: int, faults: int) -> None:
    """With every fault at every place, before, amid and after what is done there."""
    assert every_way(Scenario(*PROGRAMS[name], size), faults) > 200


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in BY_DAY])
def test_some_ways(name: str) -> None:
    """With the faults of callers."""
    assert every_way(Scenario(*PROGRAMS[name]), 1, CALLERS) > 2


def test_the_operations() -> None:
    """Each program comes to those that are recorded."""
    found = {}
    for name, program in PROGRAMS.items():
        events = play(Scenario(*program, 3), simulation.Way([], 3))
        found[name] = [at for rank, at, _ in events if rank == 1]
    text = json.dumps(found, indent=1) + "\n"
    assert text == OPERATIONS.read_text(), f"if that is meant, {OPERATIONS.name} has to be:\n{text}"


SEEDS = [range(first, first + 10) for first in range(0, 40, 10)]
SEEDS += [nightly(range(first, first + 100)) for first in range(0, 10_000, 100)]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_simulation(seeds: range, subtests: pytest.Subtests) -> None:
    """In any order, with a fault or none; what can be read is whole."""
    for seed in seeds:
        with subtests.test(seed=seed):
            draw = simulation.Drawn(seed)
            play(draw.scenario(), draw)


REDUCE_AMAX, REDUCE = Exchange.reduce_amax, Exchange._reduce
Ranks, BEGIN = simulation.Simulated, simulation.Simulated.begin
SCALES, LATE = "scale_gather.start: gather", "pending_all_gather.begin: gather"


def raise_alone(self: Exchange, step: int = 0, error: Any = None) -> None:
    """Raise before the collective that the other ranks make."""
    if error is not None:
        raise error
    REDUCE_AMAX(self, step)


def lacking(collective: str, rank: int, *, is_begun: bool = False) -> Callable[..., Any]:
    """A rank does not make a collective, or does not wait for it."""

    def begin(self: Any, *given: Any) -> Any:
        lacks = f"{simulation.caller()}: gather" == collective and self.rank == rank
        wait = BEGIN(self, *given) if is_begun or not lacks else None
        return (lambda: None) if lacks else wait

    return begin


WRONG: list[tuple[str, Any, str, Any, str, str]] = [
    ("plan", Ranks, "begin", lacking("gather.start: gather", 1), "", "bytes differ"),
    ("boundary, hash", Ranks, "begin", lacking(SCALES, 0), "", "different collectives"),
    ("late gathers, hash", Ranks, "begin", lacking(LATE, 1, is_begun=True), "", "bytes differ"),
    ("plan", PlanSteps, "settle", lambda me: me.comm.rank and me.comm.all_gather_object(""), "",
     "wait for each other for ever, rank 1"),
    ("plan", Exchange, "reduce_amax", raise_alone, "raises", "raised, and others did not"),
    # It reduces amaxes as if nothing had gone wrong; it says that the step is 0.
    ("plan", Exchange, "_reduce", lambda *me: REDUCE(*me[:-1], False), "raises", "different coll"),
    ("plan", Exchange, "reduce_amax", lambda me, step=0, error=None: REDUCE_AMAX(me, 0, error),
     "skips", "an error that nobody hears of"),
    # It lets weights that are written by half be read.
    ("plan", CastVersion, "tick", lambda *me: None, "dies", "bytes differ"),
    ("late gathers, hash", CastVersion, "tick", lambda *me: None, "dies", "bytes differ"),
    # Errors after the last collective that tells of them are held.
    ("plan", simulation, "HELD", (*simulation.HELD, "transpose"), "raises", "for each other for"),
]  # fmt: skip
"""A program, what of the code is another thing, and which; with which fault that shows, and how."""


@pytest.mark.parametrize(("name", "owner", "of", "mistake", "fault", "message"), WRONG)
def test_mistakes_are_found(
    name: str, owner: Any, of: str, mistake: Any, fault: str, message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Code with a mistake comes to what must not be, and the way to it is told."""
    monkeypatch.setattr(owner, of, mistake)
    with pytest.raises(Mistake, match=message) as found:
        every_way(Scenario(*PROGRAMS[name]), len(fault[:1]), [fault])
    assert "\n  rank 0: " in str(found.value)


def test_a_collective_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks."""
    monkeypatch.setattr(Exchange, "reduce_amax", lambda *me: [REDUCE_AMAX(*me) for _ in range(2)])
    with pytest.raises(AssertionError, match="operations.json has to be"):
        test_the_operations()
