"""What all ranks do together, as a model all of whose states are visited, and the code held to it.

tests/support/state_space.py says what a model is, and tests/support/protocol.py has the programs.
A change that adds, moves or leaves out a collective or a phase fails :func:`test_the_code`, which
names the first place where the code does something else.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.protocol import (
    DONE,
    PHASES,
    PROGRAMS,
    OptimizerSteps,
    Recorded,
    gather,
    noted,
    record,
)
from tests.support.state_space import Mistake, Op, Program
from zerocast.cast.exchange import Exchange

NIGHTLY = ("4 over 6, finite", "codes early", "optimizer, hash", "overlapped cast",
           "both overlapped", "scaler")  # fmt: skip
MOST = [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in PROGRAMS]


@pytest.mark.parametrize("name", MOST)
def test_all_states_of_two_ranks(name: str) -> None:
    """Nobody waits for ever, all ranks raise or none, and nobody accepts weights of two steps."""
    assert len(PROGRAMS[name][0].search(2, 1)) > 1000


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "faults"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_states_of_more(name: str, size: int, faults: int) -> None:
    """Nor where there are more ranks, or two faults."""
    assert len(PROGRAMS[name][0].search(size, faults)) > 4000


@pytest.fixture(autouse=True)
def _noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Phases are noted; files of faults are left elsewhere."""
    monkeypatch.chdir(tmp_path)
    for phase in PHASES:
        noted(monkeypatch, *phase)


def run(name: str, size: int, fault: tuple[int, int, str] | None, seed: int) -> Recorded:
    """Run the code of a program, and hold it to it.

    Raises:
        Mistake: where it does or comes to something else.
    """
    program = PROGRAMS[name][0]
    kinds = {op.name: op.kind for op in program.ops if op.kind in ("held", "alone")}
    world = Recorded(size, seed, kinds, fault)
    ends = record(world, name)
    worlds = program.follow(size, world.events)
    if not any(are_those(ends, model.ranks) for model in worlds if name != "calls"):
        came = [[rank.at for rank in model.ranks] for model in worlds]
        if name != "calls" or [end for end, _ in ends] not in came:
            raise Mistake(f"ranks ended as {ends}, and in the model as {came}, after {fault}")
    return world


def are_those(ends: list[tuple[str, list[bool]]], ranks: Any) -> bool:
    """Whether ranks ended as those of a state, and can read their weights where those can."""
    return all(
        end == rank.at
        and (not read or bool(rank.waits) or all(read) == ("stale" not in rank.known))
        for (end, read), rank in zip(ends, ranks, strict=True)
    )


def faults_of(name: str) -> list[tuple[int, int, str]]:
    """All faults of rank 1, in the order in which it comes to them."""
    ops = {op.name: op for op in PROGRAMS[name][0].ops if op.kind in ("held", "alone", "begin")}
    found = []
    own = [event for event in run(name, 2, None, 0).events if event[0] == 1]
    for place, (_, what, _) in enumerate(own):
        if what in ops:
            fails = ["raises", "raises after"] * (ops[what].kind != "begin")
            if what == "step":
                fails = ["raises"] * (name not in ("scaler", "calls"))
            found += [(1, place, fault) for fault in ("dies", *fails, *ops[what].faults)]
    return found


OF_ONE_STEP = ("skips", "not finite", "forgets", "flips", "overflow")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code(name: str) -> None:
    """The code does what the program does: without a fault, and with the last of some kinds."""
    run(name, 3, None, 1)
    kinds = OF_ONE_STEP if PROGRAMS[name][1] is OptimizerSteps else (*OF_ONE_STEP, "raises", "dies")
    last = {fault: (rank, place, fault) for rank, place, fault in faults_of(name)}
    for fault in (last[kind] for kind in kinds if kind in last):
        run(name, 2, fault, fault[1])


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code_with_every_fault(name: str) -> None:
    """It does so with every fault at every place."""
    for seed, fault in enumerate(faults_of(name)):
        run(name, 2, fault, seed)


def test_a_death_amid_late_gathers() -> None:
    """Weights whose codes no gather has begun for are not read: those whose bucket would come after
    plain weights or another bucket, where that ends the step.
    """
    name = "late gathers, hash"
    events = [event for event in run(name, 2, None, 0).events if event[0] == 1]
    last = {what: place for place, (_, what, _) in enumerate(events)}
    for what in ("shards.all_gather: all_gather_", "pending_all_gather.begin: all_gather_"):
        run(name, 2, (1, last[what] - 1, "dies"), 0)


def test_a_collective_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that makes a collective that the program lacks is told by the function's name."""
    reduce_amax = Exchange.reduce_amax

    def twice(self: Exchange, *given: Any) -> None:
        reduce_amax(self, *given)
        reduce_amax(self, *given)

    monkeypatch.setattr(Exchange, "reduce_amax", twice)
    told = r"not in the model, \['compute_scale'\] is(.|\n)*exchange._reduce: all_reduce_max_\n$"
    with pytest.raises(Mistake, match=told):
        run("plan", 2, None, 0)


AMAX, CODES = "exchange._reduce: all_reduce_max_", "gather.start: all_gather_"
MISTAKES = [
    ("plan", CODES, {"ranks": (0,)}, "rank 1 uses weights"),
    ("boundary, hash", "scale_gather.start: all_gather_", {"ranks": (1,)}, "rank . calls"),
    ("plan", AMAX, {"on": ()}, "an error that nobody hears of"),
    ("plan", AMAX, {"on": (("error", ()),)}, "uses weights of the steps"),
    ("plan", AMAX, {"unless": "error"}, "rank . calls gather.start"),
    ("plan", "transpose", {"kind": "held"}, "an error that nobody hears of"),
    ("plan", "tick", {"sets": ("due",)}, "accepts weights of the steps"),
    ("late gathers, hash", "store_plain", {"clears": ("stale",)}, "accepts weights of the steps"),
    ("late gathers, hash", "pending_all_gather.begin: all_gather_", {}, "steps"),
]
"""A program, an operation of it, what is wrong there, and what comes of it; where nothing is said,
nobody waits for it.
"""


@pytest.mark.parametrize(("name", "at", "wrong", "message"), MISTAKES)
def test_mistakes_are_found(name: str, at: str, wrong: dict[str, Any], message: str) -> None:
    """A program with a mistake comes to a state that must not be, and the shortest way is told."""
    program = copy.copy(PROGRAMS[name][0])
    program.ops = [wronged(op, wrong) if op.name == at else op for op in program.ops]
    with pytest.raises(Mistake, match=message) as found:
        any(program.search(2, faults) is None for faults in (0, 1))
    assert "\n  rank 0: " in str(found.value)


def wronged(op: Op, wrong: dict[str, Any]) -> Op:
    """The operation with what is wrong, or where nothing is said, without the wait."""
    if not wrong:
        return replace(op, kind="set") if op.kind == "wait" else op
    return op if op.kind == "wait" and "on" in wrong else replace(op, **wrong)


def test_a_deadlock_is_found() -> None:
    """A rank that makes one collective more than the others waits for ever."""
    last = [replace(op, ranks=(1,)) for op in gather("gather.start")]
    with pytest.raises(Mistake, match="wait for each other for ever:\n  rank 0: done\n  rank 1: g"):
        Program([*last, DONE], parts=1).search(2, 0)
