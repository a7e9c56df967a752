"""The code of plans, functional calls and optimizers on ranks of which one goes on at a time, in
an order that a seed draws, beside a model of what they do.

Each rank is a thread, which comes to one operation after the other: a collective, the wait for it,
a phase, or a step of its caller. What happens next is drawn among what may happen in the model
(:mod:`tests.support.state_space`), and happens in both: a rank's operation comes out, with or
without a fault, or a collective is carried out. Then each rank must have come to the operation to
which the model has come. So a seed stands for one schedule with one fault, and gives the same run
again.
"""

from __future__ import annotations

import functools
import pkgutil
import queue
import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import zerocast
from tests.optim.training import Training
from tests.support.claims import assert_same_tensors
from tests.support.partitions import draw_partition
from tests.support.protocol import HELD, OptimizerProtocol, Protocol
from tests.support.recipes import RECIPES
from tests.support.state_space import Mistake, Model, Move, World
from tests.support.values import draw_values
from zerocast import errors
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
    "cast.plan.CastPlan._plan": "_plan",
    "optim.zero.check_shardable": "check_shardable",
    "tensors.cast_steps.CastSteps.run": "{}",
    "tensors.cast_steps.CastSteps.run_stage": "stage {}",
    "cast.copied_digests.HeldDigests.of": "digests",
    "optim.inner.InnerOptimizer.step": "inner step",
    "optim.shards.ShardedWeights.store_plain": "store_plain",
}
"""The functions that are phases, and their names in the model, of which some have an argument."""


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

    protocol: Any = Protocol

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

    protocol: Any = OptimizerProtocol

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
        size: the number of ranks.
        kind: what makes steps.
        options: those of the plan or optimizer, the recipe by its name among those of tests.
        fault: the rank that has one, at which of its operations, and what; "" for any.
        extents: by weight and rank who has which part.
        steps: how many are made.
    """

    size: int
    kind: Any
    options: dict[str, Any]
    fault: tuple[int, int, str]
    extents: Any = None
    steps: int = 2

    @classmethod
    def drawn(cls, draw: random.Random) -> Scenario:
        """One of all that there are."""
        size, kind = draw.randint(2, 4), draw.choice((PlanSteps,) * 3 + (OptimizerSteps,))
        options: dict[str, Any] = {"recipe": draw.choice(list(RECIPES))}
        options["verify"] = draw.choice(("off", "off", "hash", "full"))
        if kind is PlanSteps:
            options["exchange"] = draw.choice(("full", "boundary"))
            options["check_finite"] = draw.random() < 0.3
        else:
            options["overlap_cast"] = draw.random() < 0.5
        extents = [draw_partition(rows * cols, size, draw) for rows, cols in SHAPES]
        return cls(size, kind, options, (draw.randrange(size), draw.randrange(60), ""), extents, 3)


@functools.cache
def model_of(kind: Any, steps: int, *options: tuple[str, Any]) -> Model:
    """What ranks do."""
    return Model(lambda rank: kind.protocol(rank, steps=steps, **dict(options)))


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
        steps: what makes steps, kept because nobody waits for the gathers of what is collected.
    """

    def __init__(self, rank: int, size: int, calls: list[Any], said: dict[int, Any],
                 body: Callable[[Simulated], Any]) -> None:  # fmt: skip
        world = SimpleNamespace(timeout=1.0, announce=said.__setitem__)
        group: Any = SimpleNamespace(members=range(size), world=world, rendezvous=self._meet)
        super().__init__(group, rank)
        self.calls, self.names, self.steps, self._begun = calls, list[str](), None, 0
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
        self.names.append(name)
        self._ops.put((kind, name))
        answer = self._answers.get()
        if answer == "dies":
            raise Killed
        if answer == "gave up":
            raise errors.PeerFailedError(f"{name} did not end")
        return answer

    def go_on(self, answer: str) -> None:
        """Let the operation come out so, and the rank come to the next one."""
        self._answers.put(answer)
        self.op = self._ops.get()

    def _begin(self, what: str, brings: Any, begin: Callable[[list[Any]], Any]) -> Wait:
        kind = what.removeprefix("all_").removeprefix("reduce_").removesuffix("_")
        if self.come_to("begin", f"{_caller()}: {kind}"):
            raise OSError("planted")
        if self._begun == len(self.calls):
            copied = SimpleNamespace(done=False, count=0)
            self.calls.append(SimpleNamespace(begin=begin, brought={}, done=False, copied=copied))
        call = self.calls[self._begun]
        call.brought[self.rank] = brings
        self._begun += 1

        def wait() -> Any:  # in another thread where an optimizer is collected, which nobody has
            while not call.done and threading.current_thread() is self._thread:
                self.come_to("wait", call)
            return vars(call).get("outcome")

        return wait

    def _meet(self, rank: int, what: Any, brings: Any, begin: Callable[[list[Any]], Any]) -> Any:
        """A rendezvous of threads: a collective, or its end, to which nothing is brought."""
        if brings is not None:
            return self._begin(what.signature[0], brings, begin)()
        copied = self.calls[self._begun - 1].copied
        copied.count += 1
        copied.done = copied.count == self.size
        return None if copied.done else self.come_to("wait", copied)

    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        self.start_all_gather_(buffer, counts)()

    def start_all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> Wait:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)

        def begin(brought: list[torch.Tensor]) -> None:
            whole = torch.cat([each.split(chunks)[r] for r, each in enumerate(brought)])
            for each in brought:
                each.copy_(whole)

        return self._begin("all_gather_", flat, begin)

    def start_all_gather_by(self, buffer: torch.Tensor, counts: Parts, copies: Any) -> Wait:
        return self.start_all_gather_(buffer, counts)


def _caller() -> str:
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
        if its_caller.parent.name == "tensors" or not hasattr(LOCAL, "rank"):  # no plan's
            return original(*args, **options)
        called = name.format(*args[1:])
        error = errors.InputError("planted") if called in HELD else OSError("planted")
        fault = LOCAL.rank.come_to("do", called)
        if fault == "raises":
            raise error
        if fault == "flips":
            args[1][-1].view(torch.uint8).view(-1)[:1] ^= 1
        result = original(*args, **options)
        if fault.endswith("after"):
            raise error if fault.startswith("raises") else Killed
        return result

    return run


def live(scenario: Scenario, whole: Any, events: Sequence[Move], comm: Simulated) -> Any:
    """Make all steps; return how that ended, and what can be read then.

    Raises:
        AssertionError: where what can be read of a weight is not ``whole`` that of one step.
    """
    made, end = 0, ""

    def check(held: list[Any], *steps: int) -> list[Any]:
        """What can be read of each weight is that of one of these steps. Not where a digest was
        wrong: then bytes are, or a step is made twice.
        """
        spoilt = any(event.name == "digests" and event.answer for event in events)
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


def compare(model: Model, world: World, ranks: Sequence[Simulated]) -> None:
    """Raise :class:`Mistake` where a rank is not where the model is; or, at its end, can read what
    it must not, or refuses more where the model knows which codes are written early.
    """
    for rank, (at, waits, _, _) in zip(ranks, world.ranks, strict=True):
        op, known, (kind, came) = model.ops[at], model.known[at], rank.op
        if isinstance(came, BaseException):
            raise came
        if kind == "wait" and op.kind in ("wait", "end"):  # where it ends, for what it has begun
            continue
        end, held = came if kind == "end" else (came, [])
        if (kind, end) != (op.kind, op.name):
            raise Mistake(f"rank {rank.rank} comes to {end}, and in the model to {op.name}")
        refuses, knows_early = None in held, "nvfp4" in known.recipe or not known.columnwise
        if held and not waits and refuses != known.stale and (knows_early or known.stale):
            raise Mistake(f"rank {rank.rank} ends as {end}, and can{'not' * refuses} be read")


def play(scenario: Scenario, draw: random.Random) -> list[Move]:
    """Run a scenario in an order that is drawn; return what happened.

    Raises:
        AssertionError: where the code does or comes to something else than the model, or bytes
            that one rank alone does not have can be read.
    """
    size, kind, options, (faulty, place, fault), extents, steps = scenario
    cuts = [[chunk(rows * cols, rank, size) for rank in range(size)] for rows, cols in SHAPES]
    # Who owns nothing can give no NaN.
    cannot = () if any(owned[faulty].size for owned in extents or cuts) else ("not finite",)
    whole = expected(kind, options.get("recipe", "nvfp4"), steps)
    # Of 16x16 elements, those of 4-over-6.
    cuts_blocks = kind is OptimizerSteps or any(
        part.start % (16 * cols)
        for (_, cols), owned in zip(SHAPES, extents or cuts, strict=True)
        for part in owned
    )
    model = model_of(kind, steps, *options.items(), ("cuts_blocks", cuts_blocks))
    events = list[Move]()
    calls, said, world = list[Any](), dict[int, Any](), model.start(size, 0)
    with pytest.MonkeyPatch.context() as patch:
        for path, name in PHASES.items():
            function = pkgutil.resolve_name(f"zerocast.{path}")
            patch.setattr(f"zerocast.{path}", noted(function, name))
        patch.setattr("zerocast.cast.verified.write_fault", lambda *given: None)
        body = functools.partial(live, scenario._replace(extents=extents or cuts), whole, events)
        ranks = [Simulated(rank, size, calls, said, body) for rank in range(size)]
        try:
            while moves := list(model.moves(world)):
                compare(model, world, ranks)
                move = draw.choice(moves)
                if move.rank == faulty:
                    faults = () if place else model.moves(world._replace(faults=1))
                    planted = [each for each in faults if each.rank == faulty
                               and not each.world.faults and fault in ("", each.answer)
                               and not each.answer.endswith(("inside", *cannot))]  # fmt: skip
                    place -= 1
                    move = draw.choice(planted or [move])
                events.append(move)
                world = move.world
                if move.rank < 0:
                    call = next(call for call in calls if not call.done)
                    call.outcome = call.begin([call.brought[rank] for rank in range(size)])
                    call.done = True
                else:
                    ranks[move.rank].go_on(move.answer)
                while ready := [each for each in ranks if each.op[0] == "wait" and each.op[1].done]:
                    ready[0].go_on("")
            for rank in ranks:
                while rank.op[0] == "wait":
                    rank.go_on("gave up")
            compare(model, world, ranks)
            for r, error in said.items():
                assert isinstance(error, Killed) or ranks[r].op[1][0] == "raised", f"rank {r} did"
        except AssertionError as error:
            story = "".join(map(str, events))
            raise Mistake(f"{scenario}: {error}, after:\n{story}") from error
        finally:
            for rank in ranks:
                while rank.op[0] != "end":
                    rank.go_on("dies")
    return events
