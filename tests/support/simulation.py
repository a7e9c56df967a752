"""The code of plans, functional calls and optimizers on ranks of which one goes on at a time, and
some have faults.

Each rank is a thread, which comes to one operation after the other: a collective, the wait for it,
a phase, or a step of its caller. :func:`play` lets one thing happen after the other: a rank's
operation comes out, with or without a fault, or a collective is carried out. Which of those that
may happen does is either drawn, so that a seed stands for one schedule with one fault, or every way
is gone that there is (:func:`every_way`).

The transport does what it promises: a collective that all have begun is carried out, at any moment
before a wait for it ends, and ranks that wait for one that failed do not come to give up.
"""

from __future__ import annotations

import functools
import pkgutil
import queue
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch

import zerocast
from tests.optim.training import Training
from tests.support.claims import assert_same_tensors
from tests.support.partitions import draw_partition
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes
from tests.support.values import draw_values
from zerocast import errors
from zerocast.cast.verified import _compared
from zerocast.comm import Communicator, InProcessCommunicator, SingleRank, buffers
from zerocast.comm.communicator import Parts, Wait
from zerocast.layout import Extent, chunk

SHAPES = ((18, 64), (1, 96), (36, 96))
HELPERS = ("raise_in_all", "agree_in_all")
"""Functions outside of zerocast.comm that make collectives for their callers."""

LOCAL = threading.local()
"""By thread the rank that it runs."""

PHASES = {
    "cast.plan.check_specs": "check_specs",
    "cast.calls.check_specs": "check_specs",
    "cast.plan.ShardedCast": "_plan",
    "optim.zero.check_shardable": "check_shardable",
    "tensors.cast_steps.CastSteps.run": "{}",
    "tensors.cast_steps.CastSteps.run_stage": "stage {}",
    "cast.verified.Verification._numbers": "digests",
    "optim.inner.InnerOptimizer.step": "inner step",
    "optim.shards.ShardedWeights.store_plain": "store_plain",
}
"""The functions that are phases, and their names, of which some have an argument."""
HELD = ("check_specs", "_plan", "check_shardable", "partial_amax", "digests", "inner step", "step")
"""What errors all ranks hear of."""
WAYS = tuple(what + when for what in ("raises", "dies") for when in ("", " inside", " after"))
WRITING = ("partial", "select", "compute", "expand", "stage", "store", "transpose")
"""How the names of phases begin that write to weights."""
LOST = {"raises": "raised", "dies": "dead", "gave": "gave up"}
"""By how an operation comes out the end of its rank: it raised an error that it alone knows; it
died; it waited for one that did."""
NUMBERS = {"skips"}, {"repeats"}
"""What is no fault where all ranks do it."""
HEARD = {"raises": "error", "overflow": "error", "skips": "number", "repeats": "number"}
"""By a fault what all ranks hear of; of others the fault."""


class Mistake(AssertionError):
    """Ranks do what they must not."""


class Killed(BaseException):
    """Ends a rank, which says nothing to the others."""


CAME_OF: Any = (
    (Killed, "dead"),
    (OSError, "raised"),
    (errors.PeerFailedError, "gave up"),
    ((errors.UnfinishedStepError, errors.VerificationError), "refused"),
    (errors.RankMismatchError, "again: number"),
    (errors.NonFiniteError, "again: not finite"),
    (errors.ZerocastError, "again: error"),
)
"""By an error what comes of it: the end of a rank, or that all raise and make the step again."""


# --- what is run ---


class PlanSteps:
    """Casts by a plan, or by functional calls, of masters that are other ones in each step."""

    def __init__(self, comm: Communicator, extents: Any, recipe: str = "nvfp4", *,
                 calls: bool = False, columnwise: bool = True, **options: Any) -> None:  # fmt: skip
        self.comm, self.extents = comm, [by_rank[comm.rank] for by_rank in extents]
        self.weights = [
            zerocast.empty(shape, RECIPES[recipe], columnwise=columnwise) for shape in SHAPES
        ]
        self.starts = [extent.start for extent in self.extents]
        self.masters = [torch.ones(extent.size) for extent in self.extents]
        if not calls:
            self.plan = zerocast.CastPlan(self.weights, self.masters, self.starts, comm, **options)

    def step(self, step: int, fault: str) -> None:
        """Make a step, with or without a fault."""
        for master, (rows, cols), e in zip(self.masters, SHAPES, self.extents, strict=True):
            master.copy_(draw_values("wide", rows * cols, step)[e.start : e.end])
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

    def __init__(self, comm: Communicator, extents: Any, recipe: str = "nvfp4", *,
                 scaler: bool = False, **options: Any) -> None:  # fmt: skip
        self.training = Training(comm, RECIPES[recipe], **options)
        self.training.rank = 0  # whose gradients all have
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
                raise errors.InputError("all ranks have left the step out")
            return
        self.training.feed(step)

        def closure() -> None:
            if fault == "raises":
                raise errors.InputError("planted")

        number = step + (fault == "skips") - (fault == "repeats")
        self.training.optimizer.step(closure, number=number)


class Scenario(NamedTuple):
    """What is run.

    Attributes:
        kind: what makes steps.
        options: those of the plan or optimizer, the recipe by its name among those of tests.
        size: the number of ranks.
        extents: by weight and rank who has which part.
        steps: how many are made.
    """

    kind: Any
    options: dict[str, Any]
    size: int = 2
    extents: Any = None
    steps: int = 2

    def faults(self, rank: int, kind: str, name: str) -> tuple[str, ...]:
        """How an operation of a rank may come out that is one fault."""
        if kind == "phase":
            ways = WAYS if name.startswith(WRITING) else [w for w in WAYS if "inside" not in w]
            return *ways, *["flips"] * (name == "digests")
        if kind == "begin":
            return "raises", "dies"
        if name != "step" or "scaler" in self.options:
            return ("dies", "overflow") * (name == "step")
        others = ("forgets",) if "calls" in self.options else ("skips", "repeats")
        is_told = self.options.get("check_finite") and any(of[rank].size for of in self.extents)
        return "dies", "raises", *others, *["not finite"] * bool(is_told)


class Move(NamedTuple):
    """What may happen: to a rank, or to a collective (-1); whether that is "carried" out, what a
    rank does "itself", or a "wait" that it gives up; in which operation; how that may come out, and
    how else, with a fault.
    """

    rank: int
    kind: str
    name: str
    answers: tuple[str, ...] = ("",)
    faults: tuple[str, ...] = ()


Event: TypeAlias = tuple[int, str, str]
"""What happened: to which rank, or to a collective (-1); in which operation; how that came out."""


class Drawn(random.Random):
    """An order of all, a scenario and a fault or none, as a seed says."""

    def scenario(self) -> Scenario:
        """One of all that there are."""
        size, kind = self.randint(2, 4), self.choice((PlanSteps,) * 3 + (OptimizerSteps,))
        self.faulty, self.place = self.randrange(size), self.randrange(60)
        options: dict[str, Any] = {"recipe": self.choice(list(RECIPES))}
        options["verify"] = self.choice(("off", "off", "hash", "full"))
        if kind is PlanSteps:
            options["exchange"] = self.choice(("full", "boundary"))
            options["check_finite"] = self.random() < 0.3
        else:
            overlaps = ("overlap_cast", "overlap_all_gather")
            options |= {each: True for each in overlaps if self.random() < 0.5}
        extents = [draw_partition(rows * cols, size, self) for rows, cols in SHAPES]
        return Scenario(kind, options, size, extents, 3)

    def pick(self, moves: Sequence[Move]) -> Event:
        """What happens of all that may."""
        move = self.choice(moves)
        self.place -= move.rank == self.faulty
        planted = move.faults if move.rank == self.faulty and self.place == -1 else ()
        return move.rank, move.name, self.choice(planted or move.answers)


class Way:
    """One of all ways to go on, by the first choices that it makes.

    Ranks share nothing but collectives, so in which order their own operations are done is of no
    matter: of the ways that differ in nothing else one is gone. In it a rank that is going to be
    lost is ahead of all others, which so may hear of that wherever they could. A collective is
    carried out when somebody has to wait for it: nobody writes until then what it moves, and who
    reads too early finds old bytes. Where weights may be read before the next step, all ranks read
    them, or none.

    Args:
        given: the first choices.
        size: the number of ranks.
        faults: how many there may be, and of which kinds; of all, where these are none.

    Attributes:
        others: the first choices of ways that part from this one, in what this one chose itself.
    """

    def __init__(self, given: list[Any], size: int, faults: int = 0, kinds: Any = ()) -> None:
        self.others, self._given, self._made = list[Any](), given, 0
        self._size, self._faults, self._kinds = size, faults, kinds
        self._first = self.choice(range(size)) if faults else 0
        self._is_lost, self._reads = False, list[str]()

    def choice(self, options: Sequence[Any]) -> Any:
        """One of these."""
        if self._made == len(self._given):
            self.others += [[*self._given, other] for other in options[1:]]
            self._given = [*self._given, options[0]]
        self._made += 1
        return self._given[self._made - 1]

    def pick(self, moves: Sequence[Move]) -> Event:
        """What happens of all that may."""

        def turn(move: Move) -> Any:
            waits = 0 if len(move.answers) > 1 else 3  # to be asked once, or to give up at last
            kinds = {"wait": waits, "itself": 1, "carried": 2}
            return kinds[move.kind], (move.rank - self._first) % self._size

        rank, _, name, answers, faults = min(moves, key=turn)
        is_any = rank == self._first or self._is_lost
        planted = [each for each in faults if self._faults > (not is_any)
                   and (is_any or not lost_by(name, each))
                   and (not self._kinds or each in self._kinds)]  # fmt: skip
        if name == "may":
            self._reads = answers = self._reads or [self.choice(answers)]
        answer = self.choice((*answers, *planted))
        self._faults -= answer in planted
        self._is_lost |= bool(lost_by(name, answer))
        return rank, name, answer


def lost_by(name: str, answer: str) -> str:
    """How a rank ends one of whose operations came out so; nothing where it goes on."""
    is_held = name in HELD and answer.startswith("raises")
    return "" if is_held else LOST.get(answer.partition(" ")[0], "")


def every_way(scenario: Scenario, faults: int, kinds: Sequence[str] = ()) -> int:
    """Go every way with so many faults at most; return how many there are."""
    left, gone = [[]], 0
    while left:
        way = Way(left.pop(), scenario.size, faults, kinds)
        play(scenario, way)
        left += way.others
        gone += 1
    return gone


def read(weight: zerocast.QuantizedTensor) -> Any:
    """Copies of all buffers of a weight that can be read; None of one that refuses it."""
    try:
        weight.dequantize()
    except (errors.ZerocastError, OSError):
        return None
    storage = weight.quantized_storage
    stale = storage.derived_names if storage.is_stale else ()
    return {name: buffer.clone() for name, buffer in storage.buffers.items() if name not in stale}


@functools.cache
def expected(kind: Any, recipe: str, steps: int) -> list[list[Any]]:
    """What the weights hold on one rank, before the first step and after each."""
    one = kind(SingleRank(), [[Extent(0, rows * cols)] for rows, cols in SHAPES], recipe)
    held = [[read(weight) for weight in one.weights]]
    for step in range(1, steps + 1):
        one.step(step, "")
        held.append([read(weight) for weight in one.weights])
    return held


def same(tensors: Any, expected: Any) -> str:
    """How tensors differ from those of the same names that are expected."""
    try:
        assert_same_tensors(tensors, {name: expected[name] for name in tensors})
    except AssertionError as error:
        return str(error)
    return ""


# --- ranks ---


class Simulated(InProcessCommunicator):
    """One rank: its communicator, and the thread that runs ``body`` from one operation to the next.

    Attributes:
        calls: the collectives of all ranks, in the order in which they are begun: what ranks bring,
            what makes of that what all read, and whether it was done; and how many have copied it.
        op: the kind of the operation that it has come to, and its name or call; or how it ended.
        names: those of all operations.
        begun: how many collectives it has begun.
        lost: how it has to end, because of a fault that the others do not hear of.
        stays: whether it goes on to wait for a rank that may not come any more.
        steps: what makes steps, kept because nobody waits for the gathers of what is collected.
    """

    def __init__(self, rank: int, size: int, calls: list[Any], said: dict[int, Any],
                 body: Callable[[Simulated], Any]) -> None:  # fmt: skip
        world = SimpleNamespace(timeout=1.0, announce=said.__setitem__)
        group: Any = SimpleNamespace(members=range(size), world=world, rendezvous=self._meet)
        super().__init__(group, rank)
        self.calls, self.names, self.steps = calls, list[str](), None
        self.begun, self.lost, self.stays = 0, "", False
        self._ops, self._answers = queue.SimpleQueue[Any](), queue.SimpleQueue[str]()
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()
        self.op = self._ops.get()

    def _run(self, body: Callable[[Simulated], Any]) -> None:
        LOCAL.rank = self
        try:
            end = body(self)
        except BaseException as error:
            end = error
        self._ops.put(("end", end))

    def come_to(self, kind: str, name: Any) -> str:
        """Come to an operation; return how it comes out."""
        self.names += [name] if isinstance(name, str) else []
        self._ops.put((kind, name))
        answer = self._answers.get()
        if answer == "dies":
            raise Killed
        if answer == "gave up":
            raise errors.PeerFailedError(f"{name} did not end")
        return answer

    def go_on(self, answer: str) -> None:
        """Let the operation come out so, and the rank come to the next one."""
        before = self.op
        self._answers.put(answer)
        self.op = self._ops.get()
        self.stays = before[1] is self.op[1]

    def begin(self, what: str, brings: Any, begin: Callable[[list[Any]], Any]) -> Wait:
        """Begin a collective, of which ``begin`` makes of what all bring what all read."""
        name = f"{caller()}: {what.removeprefix('all_').removeprefix('reduce_').removesuffix('_')}"
        if self.come_to("begin", name):
            raise OSError("planted")
        if self.begun == len(self.calls):
            copied = SimpleNamespace(done=False, count=0)
            call = SimpleNamespace(begin=begin, brought={}, names={}, done=False, copied=copied)
            self.calls.append(call)
        call = self.calls[self.begun]
        call.brought[self.rank], call.names[self.rank] = brings, name
        self.begun += 1

        def wait() -> Any:  # in another thread where an optimizer is collected, which nobody has
            while not call.done and threading.current_thread() is self._thread:
                self.come_to("wait", call)
            return vars(call).get("outcome")

        return wait

    def _meet(self, rank: int, what: Any, brings: Any, begin: Callable[[list[Any]], Any]) -> Any:
        """A rendezvous of threads: a collective, or its end, to which nothing is brought."""
        if brings is not None:
            return self.begin(what.signature[0], brings, begin)()
        copied = self.calls[self.begun - 1].copied
        copied.count += 1
        copied.done = copied.count == self.size
        return None if copied.done else self.come_to("wait", copied)

    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        self.start_all_gather_(buffer, counts)()

    def start_all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> Wait:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)

        def begin(brought: list[Any]) -> None:
            whole = torch.cat([each.split(chunks)[r] for r, (each, _) in enumerate(brought)])
            for each, then in brought:
                assert_same_bytes(each, then, "what was written while it was gathered")
                each.copy_(whole)

        return self.begin("all_gather_", (flat, flat.clone()), begin)


def caller() -> str:
    """The function of zerocast that makes the collective which is begun just now."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module, name = frame.f_globals["__name__"].split("."), frame.f_code.co_name
        if module[0] == "zerocast" and module[1] != "comm" and name not in HELPERS:
            return f"{module[-1]}.{name}"
        frame = frame.f_back
    return "the caller"


def noted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of zerocast as a phase that ranks come to."""

    def run(*args: Any, **options: Any) -> Any:
        its_caller = Path(sys._getframe(1).f_code.co_filename)
        is_alone = its_caller.parent.name == "tensors" and name != "store_plain"  # no plan's
        if is_alone or not hasattr(LOCAL, "rank"):
            return original(*args, **options)
        called = name.format(*args[1:])
        error = errors.InputError("planted") if called in HELD else OSError("planted")
        fault = LOCAL.rank.come_to("phase", called)
        if fault == "raises":
            raise error
        if fault == "flips":
            verification, comm = args
            last = _compared(verification._weights[comm][-1])[-1]
            last.view(torch.uint8).view(-1)[:1] ^= 1
        weights = getattr(LOCAL.rank.steps, "weights", []) if fault.endswith("inside") else []
        buffers = [b for w in weights for b in w.quantized_storage._buffers.values()]  # no wait
        before = [buffer.clone() for buffer in buffers]
        try:
            return original(*args, **options)
        finally:
            for now, then in zip(buffers, before, strict=True):  # of what it wrote, half is lacking
                now.view(-1).view(torch.uint8)[::2] = then.view(-1).view(torch.uint8)[::2]
            if fault.endswith(("inside", "after")):
                raise error if fault.startswith("raises") else Killed

    return run


def live(scenario: Scenario, whole: Any, events: Sequence[Event], comm: Simulated) -> Any:
    """Make all steps; return how that ended, and what can be read then.

    Raises:
        AssertionError: where what can be read of a weight is not ``whole`` that of one step.
    """
    made, end = 0, ""

    def check(held: list[Any], *steps: int) -> list[Any]:
        """What can be read of each weight is that of one of these steps. Not where a digest was
        wrong: then bytes are, or a step is made twice.
        """
        spoilt = any(name == "digests" and answer for _, name, answer in events)
        for i, tensors in enumerate([] if spoilt else held):
            found = [same(tensors, whole[step][i]) for step in steps if tensors]
            assert not all(found) or not found, f"rank {comm.rank}, weight {i}: {found[0]}"
        return held

    def use(step: int) -> None:
        assert not any(weight.quantized_storage.is_stale for weight in comm.steps.weights)
        check([read(weight) for weight in comm.steps.weights], step)
        comm.come_to("do", "use")

    while not end:
        try:
            comm.steps = comm.steps or scenario.kind(comm, scenario.extents, **scenario.options)
            while made < scenario.steps:
                comm.steps.step(made + 1, comm.come_to("do", "step"))
                if "overlap_all_gather" not in scenario.options or comm.come_to("do", "may"):
                    use(made + 1)
                made += 1
            comm.steps.settle()
            use(made)
            end = "done"
        except (errors.ZerocastError, OSError, Killed) as error:  # noqa: PERF203
            first = error.__cause__ or error.__context__  # of which this one came
            shown = (error, first) if isinstance(first, OSError | Killed) else (error,)
            end = next(end for kind, end in CAME_OF for e in shown if isinstance(e, kind))
            if end.startswith("again"):
                comm.come_to("do", end)
                end = "" if comm.steps or "partial_amax" not in comm.names else "refused"
    held = [read(weight) for weight in getattr(comm.steps, "weights", [])]
    if "calls" in scenario.options or end == "dead":  # callers of functions know what is torn
        held = []
    return end, check(held, *range(made, len(whole))[:2])


def may_happen(scenario: Scenario, ranks: Sequence[Simulated]) -> Iterator[Move]:
    """All that may."""
    due = next((call for call in ranks[0].calls if not call.done), None)
    if due is not None and len(due.brought) == len(ranks):  # they are carried out in order
        yield Move(-1, "carried", min(due.names.values()))
    is_lost = any(rank.lost for rank in ranks)
    for r, rank in enumerate(ranks):
        kind, at = rank.op
        if kind == "wait" and is_lost and (missing := {*range(len(ranks))} - set(at.brought)):
            may_come = not rank.stays and any(ranks[each].op[0] != "end" for each in missing)
            yield Move(r, kind, at.names[r], (*[""] * may_come, "gave up"))
        elif kind not in ("wait", "end"):
            answers = "", *["reads"] * (at == "may"), *["gave up"] * (is_lost and kind == "begin")
            yield Move(r, "itself", at, answers, scenario.faults(r, kind, at))


def judge(scenario: Scenario, ranks: Sequence[Simulated], events: Sequence[Event]) -> None:
    """Raise :class:`Mistake` where it is no proper end that nothing can happen any more."""
    for rank in ranks:
        kind, came = rank.op
        if kind != "end":
            raise Mistake(f"ranks wait for each other for ever, rank {rank.rank} for {came.names}")
        check_reading(scenario, rank, *came)
    ends = {rank.op[1][0] for rank in ranks}
    if len({rank.begun for rank in ranks}) > 1 and ends & {"done", "refused"}:
        raise Mistake("a rank lacks a collective, and another one has not raised")
    if ends & set(LOST.values()):
        return
    told = {tuple(each for each in rank.names if each.startswith("again")) for rank in ranks}
    if len(ends) > 1 or len(told) > 1:
        raise Mistake("some ranks raised, and others did not")
    (heard,), (end,) = told, ends
    answers = [answer for *_, answer in events if answer not in ("", "reads", "forgets")]
    faults, alike = set(answers), len(answers) == len(ranks) and {*answers} in NUMBERS
    if not set(heard) <= {f"again: {HEARD.get(each.split()[0], each)}" for each in faults}:
        raise Mistake(f"ranks hear of what is not: {heard}")
    if faults and not heard and end != "refused" and not alike:
        raise Mistake("a rank has an error that nobody hears of")
    reasons = faults & {"flips"} if scenario.kind is PlanSteps else faults
    if end == "refused" and not reasons:
        raise Mistake("ranks refuse to go on without a reason")


def check_reading(scenario: Scenario, rank: Simulated, end: str, held: list[Any]) -> None:
    """Raise :class:`Mistake` where a rank ended otherwise than it had to; or can read weights that
    it has begun to write and not ended, or none though it has not.
    """
    if end != rank.lost and (rank.lost or end in LOST.values()):
        raise Mistake(f"rank {rank.rank} ends as {end}")
    last = {name: at for at, name in enumerate(rank.names)}

    def latest(*names: str) -> int:
        return max(last.get(name, -1) for name in names)

    is_nvfp4 = "nvfp4" in scenario.options.get("recipe", "nvfp4")
    writing = "compute_scale", "partial_select", *["partial_amax"] * (not is_nvfp4)
    waits = not all(call.done for call in rank.calls[: rank.begun])
    if None in held and latest(*writing) <= latest("use") and not waits:
        raise Mistake(f"rank {rank.rank} ends as {end}, and can not be read")
    is_torn = latest("compute_scale") > latest("transpose")
    if held and None not in held and is_torn and "overlap_all_gather" not in scenario.options:
        raise Mistake(f"rank {rank.rank} ends as {end}, and can be read")


def play(scenario: Scenario, way: Any) -> list[Event]:
    """Run a scenario in the way that is picked; return what happened.

    Raises:
        Mistake: where ranks do what they must not, or bytes that one rank alone does not have can
            be read.
    """
    kind, options, size, extents, steps = scenario
    cuts = [[chunk(rows * cols, rank, size) for rank in range(size)] for rows, cols in SHAPES]
    scenario = scenario._replace(extents=extents or cuts)
    whole = expected(kind, options.get("recipe", "nvfp4"), steps)
    events, calls, said = list[Event](), list[Any](), dict[int, Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerocast.optim.zero.check_shardable", lambda *given: None)  # takes long
        for path, name in PHASES.items():
            function = pkgutil.resolve_name(f"zerocast.{path}")
            patch.setattr(f"zerocast.{path}", noted(function, name))
        patch.setattr("zerocast.cast.verified.write_fault", lambda *given: None)
        body = functools.partial(live, scenario, whole, events)
        ranks = [Simulated(rank, size, calls, said, body) for rank in range(size)]
        try:
            while moves := list(may_happen(scenario, ranks)):
                at, name, answer = event = way.pick(moves)
                events.append(event)
                if at < 0:
                    call = next(call for call in calls if not call.done)
                    call.outcome = call.begin([call.brought[rank] for rank in range(size)])
                    call.done = True
                else:
                    ranks[at].go_on(answer)
                    ranks[at].lost = ranks[at].lost or lost_by(name, answer)
                while ready := [each for each in ranks if each.op[0] == "wait" and each.op[1].done]:
                    ready[0].go_on("")
                for rank in ranks:
                    if isinstance(rank.op[1], BaseException):
                        raise rank.op[1]
                    if rank.lost and rank.op[0] not in ("wait", "end"):
                        raise Mistake(f"rank {rank.rank} is lost, and comes to {rank.op[1]}")
                if different := [each.names for each in calls if len({*each.names.values()}) > 1]:
                    raise Mistake(f"ranks call different collectives: {different[0]}")
            judge(scenario, ranks, events)
            for r, error in said.items():
                assert isinstance(error, Killed) or ranks[r].op[1][0] == "raised", f"rank {r} did"
        except AssertionError as error:
            story = "".join(f"  rank {rank}: {name} {answer}\n" for rank, name, answer in events)
            raise Mistake(f"{scenario}: {error}, after:\n{story}") from error
        finally:
            for rank in ranks:
                while rank.op[0] != "end":
                    rank.go_on("dies")
    return events
