"""What all ranks do together, as a model all of whose states are visited, and the code beside it.

tests/support/state_space.py says what a model is, and tests/support/protocol.py has the programs.
tests/support/simulation.py holds the code to them: of its seeds 40 by day, 10,000 nightly.
A change that adds, moves or leaves out a collective or a phase fails :func:`test_the_code`, which
names the first place where the code does something else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import protocol
from tests.support.nightly import nightly
from tests.support.protocol import HELD, LATE, Protocol
from tests.support.simulation import OptimizerSteps, PlanSteps, Scenario, model_of, play
from tests.support.state_space import Mistake, Model, Op, Ops
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
NONE = (-1, 0, "")
Fault = tuple[int, int, str]


def model(name: str, mistake: Any = lambda known, op: op) -> Model:
    """All that ranks may do."""
    kind, options = PROGRAMS[name]
    return Model(lambda rank: kind.protocol(rank, **options), mistake)


def run(name: str, size: int, fault: Fault, seed: int) -> list[str]:
    """Hold the code to a program; return what rank 1 does."""
    events = play(Scenario(size, *PROGRAMS[name], fault), random.Random(seed))
    return [event.name for event in events if event.rank == 1]


@pytest.mark.parametrize(("size", "faults"), SIZES)
@pytest.mark.parametrize("name", MOST)
def test_all_states(name: str, size: int, faults: int) -> None:
    """Nobody waits for ever, all ranks raise or none, and nobody accepts weights of two steps. A
    third rank, or a second fault, makes at least four times as many states.
    """
    assert model(name).search(size, faults) > 1000 * 4 ** (size + faults - 3)


def faults_of(name: str) -> list[Fault]:
    """All faults of rank 1 that code can have, in the order in which it comes to them."""
    own, (kind, options) = run(name, 2, NONE, 0), PROGRAMS[name]
    played = model_of(kind, 2, *options.items(), ("cuts_blocks", True))
    faults = {op.name: op.faults for op in played.ops if op.faults}
    each = [(1, place, fault) for place, at in enumerate(own) for fault in faults.get(at, ())]
    assert each, "the program that was played has operations, and these have faults"
    return [fault for fault in each if not fault[2].endswith("inside")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code(name: str) -> None:
    """The code does what the program does: without a fault, and with the last of some kinds."""
    run(name, 3, NONE, 1)
    kinds = {"skips", "not finite", "forgets", "flips", "overflow"}
    kinds |= set() if PROGRAMS[name][0] is OptimizerSteps else {"raises", "dies"}
    for fault in {fault[2]: fault for fault in faults_of(name) if fault[2] in kinds}.values():
        run(name, 2, fault, fault[1])


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code_with_every_fault(name: str) -> None:
    """It does so with every fault at every place."""
    for seed, fault in enumerate(faults_of(name)):
        run(name, 2, fault, seed)


@pytest.mark.parametrize("what", ["shards.all_gather: gather", LATE])
def test_a_death_amid_late_gathers(what: str) -> None:
    """Weights whose codes no gather has begun for are not read: those whose bucket would come after
    plain weights or another bucket, where that ends the step.
    """
    last = {at: place for place, at in enumerate(run("late gathers, hash", 2, NONE, 0))}
    run("late gathers, hash", 2, (1, last[what] - 1, "dies"), 0)


SEEDS = [range(first, first + 10) for first in range(0, 40, 10)]
SEEDS += [nightly(range(first, first + 100)) for first in range(0, 10_000, 100)]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_simulation(seeds: range, subtests: pytest.Subtests) -> None:
    """In any order, with a fault or none, the code does what a program does; what can be read is
    whole.
    """
    for seed in seeds:
        with subtests.test(seed=seed):
            draw = random.Random(seed)
            play(Scenario.drawn(draw), draw)


AMAX, SCALES = "exchange._reduce: max", "scale_gather.start: gather"
MISTAKES: list[tuple[str, str, Callable[[Any, Op], Any], str]] = [
    ("plan", "gather.start: gather", lambda me, op: None if me.rank else op, "rank 1 uses weights"),
    ("boundary, hash", SCALES, lambda me, op: op if me.rank else None, "rank . calls"),
    ("plan", AMAX, lambda me, op: op._replace(says=()), "an error that nobody hears of"),
    ("plan", AMAX, lambda me, op: op._replace(says=op.says[:1]), "uses weights of the steps"),
    ("plan", AMAX, lambda me, op: None if me.error else op, "rank . calls gather.start"),
    ("plan", "partial_cast", lambda me, op: vars(me).update(stale=False) or op, "accepts weights"),
    ("late gathers, hash", SCALES, lambda me, op: vars(me).update(stale=False) or op, "accepts we"),
    ("late gathers, hash", LATE, lambda me, op: None if op.kind == "wait" else op, "steps"),
]
"""A program, the name of an operation, what is done instead, and what comes of that."""


@pytest.mark.parametrize(("name", "at", "mistake", "message"), MISTAKES)
def test_mistakes_of_programs_are_found(name: str, at: str, mistake: Any, message: str) -> None:
    """A program with a mistake comes to a state that must not be, and the shortest way is told."""
    mistaken = model(name, lambda known, op: mistake(known, op) if op.name == at else op)
    with pytest.raises(Mistake, match=message) as found:
        any(mistaken.search(2, faults) < 0 for faults in (0, 1))
    assert "\n  rank 0: " in str(found.value)


def test_a_phase_that_is_held_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No collective that tells of errors comes after it."""
    monkeypatch.setattr(protocol, "HELD", (*HELD, "transpose"))
    with pytest.raises(Mistake, match="an error that nobody hears of"):
        model("plan").search(2, 1)


def test_a_deadlock_is_found() -> None:
    """A rank that makes one collective more than the others waits for ever."""

    class More(Protocol):
        def run(self) -> Ops:
            yield from self.do(*["a: gather"] * self.rank, "done")

    with pytest.raises(Mistake, match="wait for each other for ever:\n  rank 1: a: gather\n$"):
        Model(More).search(2, 0)


REDUCE_AMAX, REDUCE = Exchange.reduce_amax, Exchange._reduce


def raise_alone(self: Exchange, step: int = 0, error: Any = None) -> None:
    """Raise before the collective that the other ranks make."""
    if error is not None:
        raise error
    REDUCE_AMAX(self, step)


WRONG_CODE: list[tuple[Any, str, Callable[..., Any], Fault, str]] = [
    # It makes a collective more.
    (Exchange, "reduce_amax", lambda *me: [REDUCE_AMAX(*me) for _ in range(2)], NONE,
     r"to exchange._reduce: max, .* compute_scale"),
    (Exchange, "reduce_amax", raise_alone, (1, 6, "raises"), "again: error, .* exchange._reduce"),
    # It reduces amaxes as if nothing had gone wrong; it says that the step is 0.
    (Exchange, "_reduce", lambda *me: REDUCE(*me[:-1], False), (1, 6, "raises"), "rank . comes to"),
    (Exchange, "reduce_amax", lambda me, step=0, error=None: REDUCE_AMAX(me, 0, error),
     (1, 6, "skips"), "model to exchange._other_steps"),
    # It lets weights that are written by half be read.
    (CastVersion, "tick", lambda *me: None, (0, 11, "raises"), "differ in all"),
]  # fmt: skip
"""A function of the code, what it does instead, with which fault that shows, and how."""


@pytest.mark.parametrize(("owner", "name", "mistake", "fault", "message"), WRONG_CODE)
def test_simulation_of_mistakes(
    owner: Any, name: str, mistake: Any, fault: Fault, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code with a mistake comes to something else than the program, which is named."""
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(Mistake, match=message):
        play(Scenario(3, PlanSteps, BOUNDARY, fault), random.Random(0))
