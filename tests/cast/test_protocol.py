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

from tests.support.protocol import DONE, PHASES, PROGRAMS, gather, noted, program, run
from tests.support.simulated_steps import OptimizerSteps
from tests.support.simulation import Fault
from tests.support.state_space import Mistake, Program
from zerocast.cast.exchange import Exchange

NIGHTLY = ("4 over 6, finite", "codes early", "optimizer, hash", "overlapped cast",
           "both overlapped", "scaler")  # fmt: skip
MOST = [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in PROGRAMS]
NONE = Fault(-1, 0, "none")


@pytest.mark.parametrize("name", MOST)
def test_all_states_of_two_ranks(name: str) -> None:
    """Nobody waits for ever, all ranks raise or none, and nobody accepts weights of two steps."""
    assert len(program(name).search(2, 1)) > 1000


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "faults"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_states_of_more(name: str, size: int, faults: int) -> None:
    """Nor where there are more ranks, or two faults."""
    assert len(program(name).search(size, faults)) > 4000


@pytest.fixture(autouse=True)
def _noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Phases are noted; files of faults are left elsewhere."""
    monkeypatch.chdir(tmp_path)
    for phase in PHASES:
        noted(monkeypatch, *phase)


def faults_of(name: str) -> list[Fault]:
    """All faults of rank 1, in the order in which it comes to them."""
    ways = {"held": ("raises", "raises after"), "alone": ("raises", "raises after")}
    ops = {op.name: op for op in program(name).ops if op.kind in (*ways, "given", "begin")}
    own = [what for rank, what, _ in run(name, 2, NONE, 0) if rank == 1]
    return [
        Fault(1, place, kind)
        for place, op in enumerate(map(ops.get, own))
        if op
        for kind in ("dies", *ways.get(op.kind, ()), *op.faults)
    ]


OF_ONE_STEP = ("skips", "not finite", "forgets", "flips", "overflow")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code(name: str) -> None:
    """The code does what the program does: without a fault, and with the last of some kinds."""
    run(name, 3, NONE, 1)
    kinds = OF_ONE_STEP if PROGRAMS[name][0] is OptimizerSteps else (*OF_ONE_STEP, "raises", "dies")
    last = {fault.kind: fault for fault in faults_of(name)}
    for fault in (last[kind] for kind in kinds if kind in last):
        run(name, 2, fault, fault.place)


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code_with_every_fault(name: str) -> None:
    """It does so with every fault at every place."""
    for seed, fault in enumerate(faults_of(name)):
        run(name, 2, fault, seed)


@pytest.mark.parametrize("what", ["shards.all_gather", "pending_all_gather.begin"])
def test_a_death_amid_late_gathers(what: str) -> None:
    """Weights whose codes no gather has begun for are not read: those whose bucket would come after
    plain weights or another bucket, where that ends the step.
    """
    events = [name for rank, name, _ in run("late gathers, hash", 2, NONE, 0) if rank == 1]
    last = {name: place for place, name in enumerate(events)}
    run("late gathers, hash", 2, Fault(1, last[f"{what}: all_gather_"] - 1, "dies"), 0)


def test_a_collective_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that makes a collective that the program lacks is told by the function's name."""
    reduce_amax = Exchange.reduce_amax

    def twice(self: Exchange, *given: Any) -> None:
        reduce_amax(self, *given)
        reduce_amax(self, *given)

    monkeypatch.setattr(Exchange, "reduce_amax", twice)
    told = r"not in the model, \['compute_scale'\] is(.|\n)*exchange._reduce: all_reduce_max_\n$"
    with pytest.raises(Mistake, match=told):
        run("plan", 2, NONE, 0)


AMAX, CODES = "exchange._reduce: all_reduce_max_", "gather.start: all_gather_"
SCALES, LATE = "scale_gather.start: all_gather_", "pending_all_gather.begin: all_gather_"
MISTAKES = [
    ("plan", "begin", CODES, {"only": "rank 0"}, "rank 1 uses weights"),
    ("boundary, hash", "begin", SCALES, {"only": "rank 1"}, "rank . calls"),
    ("plan", "begin", AMAX, {"on": ()}, "an error that nobody hears of"),
    ("plan", "begin", AMAX, {"on": (("error", ()),)}, "uses weights of the steps"),
    ("plan", "begin", AMAX, {"unless": "error"}, "rank . calls gather.start"),
    ("plan", "alone", "transpose", {"kind": "held"}, "an error that nobody hears of"),
    ("plan", "set", "tick", {"sets": ("due",)}, "accepts weights of the steps"),
    ("late gathers, hash", "alone", "store_plain", {"clears": ("stale",)}, "accepts weights of"),
    ("late gathers, hash", "wait", LATE, {"kind": "set"}, "steps"),
]
"""A program, a kind and name of operations, what is wrong there, and what comes of it."""


@pytest.mark.parametrize(("name", "kind", "at", "wrong", "message"), MISTAKES)
def test_mistakes_are_found(
    name: str, kind: str, at: str, wrong: dict[str, Any], message: str
) -> None:
    """A program with a mistake comes to a state that must not be, and the shortest way is told."""
    wronged = copy.copy(program(name))
    is_wrong = [(op.kind, op.name) == (kind, at) for op in wronged.ops]
    wronged.ops = [
        replace(op, **wrong) if is_it else op
        for op, is_it in zip(wronged.ops, is_wrong, strict=True)
    ]
    with pytest.raises(Mistake, match=message) as found:
        any(wronged.search(2, faults) is None for faults in (0, 1))
    assert "\n  rank 0: " in str(found.value)


def test_a_deadlock_is_found() -> None:
    """A rank that makes one collective more than the others waits for ever."""
    last = [replace(op, only="rank 1") for op in gather("gather.start")]
    with pytest.raises(Mistake, match="wait for each other for ever:\n  rank 0: done\n  rank 1: g"):
        Program([*last, DONE], parts=1).search(2, 0)
