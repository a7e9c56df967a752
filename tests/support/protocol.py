"""What ranks do in plans, functional calls and optimizers: programs of tests.support.state_space,
and the code that they are of, run with its phases and collectives recorded.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast
import zerocast.cast.calls
import zerocast.cast.plan
import zerocast.optim.zero
from tests.optim.training import Training
from tests.support.recipes import RECIPES
from tests.support.simulated_steps import is_whole
from tests.support.simulation import Killed, World
from tests.support.state_space import STEPS, Op, Program
from zerocast.cast.stored_digests import HeldDigests
from zerocast.comm import Communicator
from zerocast.errors import (
    InputError,
    PeerFailedError,
    UnfinishedStepError,
    VerificationError,
    ZerocastError,
)
from zerocast.layout import chunk
from zerocast.optim.inner import InnerOptimizer
from zerocast.optim.shards import ShardedWeights
from zerocast.tensors.cast_steps import CastSteps

Ops = Sequence[Op]

AGAIN, NEXT, USE = Op("again"), Op("next"), Op("use")
START, NO_START = Op("start", "step"), Op("start")
DONE, REFUSED = Op("end", "done"), Op("end", "refused")
READABLE = Op("set", clears=("stale",))
TRANSPOSE = Op("alone", "transpose")


def call(at: str, kind: str, part: int = -1, only: str = "", **on: Ops) -> list[Op]:
    """A collective that the function ``at`` makes, and the wait for it."""
    then = tuple((result.replace("_", " "), tuple(ops)) for result, ops in on.items())
    reads = tuple((result, ()) for result, _ in then)
    name = f"{at}: {kind}"
    return [Op("begin", name, moves=part, on=reads, only=only), Op("wait", name, on=then)]


def gather(at: str, part: int = -1) -> list[Op]:
    """An all-gather of a part of the weights, or of nothing that matters here."""
    return call(at, "all_gather_", part)


def largest(at: str, only: str = "", **on: Ops) -> list[Op]:
    """The maximum of what ranks bring."""
    return call(at, "all_reduce_max_", only=only, **on)


def told(at: str, *then: Op) -> list[Op]:
    """What all ranks say, such as of an error that is then raised on all."""
    return [*gather(at), *gather(at), *(then or (AGAIN,))]


def vote(at: str) -> list[Op]:
    """Whether any rank has an error."""
    return largest(at, error=told(at))


def making() -> list[Op]:
    """A plan is made."""
    return [
        Op("held", "check_specs"),
        *vote("descriptions.check_descriptions"),
        *gather("consistency._exchange"),
        *gather("consistency._exchange"),
        Op("held", "_plan"),
        *vote("plan.__init__"),
        Op("set", clears=("forgets",)),
    ]


def cast(codes: Ops, scales: int = 1, *, boundary: bool = False, finite: bool = False,
         chooses: bool = False, early: bool = False) -> list[Op]:  # fmt: skip
    """A cast: ``codes`` write the codes; where they are ``early``, part 0 is written at once."""
    on: dict[str, Ops] = {"error": largest("exchange.reduce_amax")}
    on["error"] = [*on["error"], *told("exchange.reduce_amax")]
    on["number"] = told("exchange._other_steps", *on["error"])
    if finite:
        on["not_finite"] = [*largest("finite._worst"), AGAIN]
    scaled = {"writes" if boundary else "of_all": (scales,)}
    choice = [
        Op("alone", "partial_select"),
        *call("exchange.reduce_candidates", "all_reduce_sum_"),
        Op("alone", "select"),
    ]
    return [
        *[Op("set", sets=("stale",), unless="error")] * early,
        Op("held", "partial_amax", writes=(0,) * early, unless="error"),
        *largest("exchange._reduce", **on),
        *choice * chooses,
        Op("set", "tick", sets=("stale", "due")),
        Op("alone", "compute_scale", **scaled),  # type: ignore[arg-type]
        *codes,
    ]


def gathered_scales(part: int) -> list[Op]:
    """Scales travel, and are stored."""
    return [*gather("scale_gather.start", part), Op("alone", "expand_scales")]


def compared() -> list[Op]:
    """Digests are compared, of what was not; where they differ, a weight is cast whole."""
    done = Op("set", clears=("due",))  # also where it failed: a cast is compared once
    judged = [
        *told("verified._explain", *largest("verified._explain")),
        *gather("whole_cast.gather_master"),
        *largest("verified._judge"),
        *told("verified._judge", *largest("verified._explain")),
        *told("verified._explain", REFUSED),
    ]
    return [
        Op("held", "digests", faults=("flips",), only="due"),
        *largest("verified.check", "due", error=told("verified.check", done, AGAIN), flips=judged),
        done,
    ]


def plan_program(*, boundary: bool = False, verify: bool = False, **options: bool) -> Program:
    """Casts and gathers of a plan."""
    faults = ("skips", "repeats") + ("not finite",) * options.get("finite", False)
    return Program([
        START, *making(), START,
        Op("held", "step", faults=faults),
        *cast([Op("alone", "partial_cast", writes=(0,))], boundary=boundary, **options),
        *gather("gather.start", 0), *gathered_scales(1) * boundary, READABLE, TRANSPOSE,
        *compared() * verify, USE, NEXT, USE, DONE,
    ], parts=2)  # fmt: skip


def call_program() -> Program:
    """Functional calls, and gathers of the caller's."""
    opening = "calls.quantize_master_weights"
    found = largest(opening, error=told(opening), forgets=making())
    return Program([
        START, Op("held", "step", faults=("forgets",)), Op("held", "check_specs"), *found,
        *cast([Op("alone", "partial_cast", writes=(0,))]),
        *gather("the caller", 0), READABLE, USE, NEXT, USE, DONE,
    ], parts=2)  # fmt: skip


def optimizer_program(
    *, verify: bool = False, overlap_all_gather: bool = False, overlap_cast: bool = False,
    scaler: bool = False, codes: int = 1, plain: int = 2,
) -> Program:  # fmt: skip
    """Steps of an optimizer, whose weights lie in so many buckets."""
    late = "pending_all_gather.begin"
    at = "publication._cast_and_all_gather" if overlap_cast else "shards.all_gather"
    ranges, write = range(codes), [Op("alone", "partial_cast", writes=tuple(range(codes)))]
    begun, awaited = [], []
    for bucket in (-1,) * plain + tuple(ranges):
        name = late if overlap_all_gather and bucket >= 0 else at
        begin, wait = gather(name, bucket)
        cut = [Op("alone", f"stage {bucket}", writes=(bucket,))] * (overlap_cast and bucket >= 0)
        begun += [*cut, begin] if overlap_cast or name == late else [begin, wait]
        awaited += [wait] if overlap_cast and name == at else []
    waits = [Op("wait", f"{late}: all_gather_", sets=("stale",))]  # uses raise from then on
    published = [
        *cast([] if overlap_cast else write, codes, boundary=True),
        Op("alone", "store_plain"), *gathered_scales(codes), *begun, *awaited[-1:], READABLE,
        *[TRANSPOSE] * (not overlap_all_gather),
    ]  # fmt: skip
    settled = [*waits * overlap_all_gather, *compared() * verify]
    stepped = largest("found_inf.agree", overflow=[AGAIN]) if scaler else []
    reduced = call("gradient_rounds.begin", "all_to_all",
                   unfinished=[*largest("progress.reduce"), *told("progress.reduce", REFUSED)],
                   error=[*largest("progress.reduce"), *told("progress.reduce")],
                   number=[AGAIN])  # fmt: skip
    use = [Op("may"), *waits, USE] if overlap_all_gather else [USE]
    return Program([
        START, Op("held", "check_shardable"), *vote("zero.__init__"),
        *largest("weights.check_same_optimizer"), *making(), NO_START,
        *published, *settled, START,
        Op("held", "step", faults=("overflow",) if scaler else ("skips", "repeats")),
        *stepped, *settled * overlap_all_gather, *reduced,
        Op("set", sets=("unfinished",)), Op("held", "inner step"),
        *published, Op("set", clears=("unfinished",)),
        *compared() * (verify and not overlap_all_gather),
        *use, NEXT, START, *settled, USE, DONE,
    ], parts=codes + 1)  # fmt: skip


# --- the code ---

LOCAL = threading.local()
"""By thread the world and the rank that it runs."""

HELPERS = ("raise_in_all", "agree_in_all")
"""Functions outside of zerocast.comm that make collectives for their callers."""


def caller() -> str:
    """The function of zerocast that makes the collective which is begun just now."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if "zerocast" in path.parts[-3:-1] and path.parent.name != "comm" and name not in HELPERS:
            return f"{path.stem}.{name}"
        frame = frame.f_back
    return "the caller"


class Recorded(World):
    """Ranks whose phases and collectives are noted, one of which may have a fault.

    Args:
        size, seed: as for its base class, and what it draws by.
        kinds: of the phases by name.
        fault: the rank that has it, at which of its events, and what it is.

    Attributes:
        events: rank, name and fault of each.
    """

    def __init__(
        self, size: int, seed: int, kinds: dict[str, str], fault: tuple[int, int, str] | None = None
    ) -> None:
        super().__init__(size, random.Random(seed), announces=seed % 2 == 0)
        self.events: list[tuple[int, str, str]] = []
        self._kinds, self._planted, self._seen = kinds, fault, [0] * size

    def note(self, rank: int, name: str) -> str:
        """Note what a rank does now; return what goes wrong with it."""
        place = rank, self._seen[rank]
        fault = self._planted[2] if self._planted and self._planted[:2] == place else ""
        self._seen[rank] += 1
        self.events.append((rank, name, fault))
        if fault == "dies":
            raise Killed
        if fault == "raises":
            raise self.error(name)
        return fault

    def error(self, name: str) -> Exception:
        """What a phase fails with."""
        held = self._kinds[name] == "held"
        return InputError("planted") if held else OSError("planted")

    def begin(self, rank: int, call: Any, *tensors: torch.Tensor) -> int:
        self._raise_if_broken(call, self.begun[rank])
        self.note(rank, f"{caller()}: {call.signature[0]}")
        return super().begin(rank, call, *tensors)


def noted(patch: pytest.MonkeyPatch, owner: Any, attribute: str, name: str = "") -> None:
    """Let a function of zerocast be a phase that is noted, by its own argument where it has no
    ``name``.
    """
    original = getattr(owner, attribute)

    def run(*args: Any, **options: Any) -> Any:
        if Path(sys._getframe(1).f_code.co_filename).parent.name == "tensors":  # no plan's
            return original(*args, **options)
        world, rank = LOCAL.world, LOCAL.rank
        called = name or (f"stage {args[1]}" if attribute == "run_stage" else args[1])
        fault = world.note(rank, called)
        if fault == "flips":
            args[1][-1].view(torch.uint8).view(-1)[:1] ^= 1
        result = original(*args, **options)
        if fault == "raises after":
            raise world.error(called)
        if fault == "dies after":
            raise Killed
        return result

    patch.setattr(owner, attribute, run)


PHASES = [
    (zerocast.cast.plan, "check_specs", "check_specs"),
    (zerocast.cast.calls, "check_specs", "check_specs"),
    (zerocast.cast.plan.CastPlan, "_plan", "_plan"),
    (zerocast.optim.zero, "check_shardable", "check_shardable"),
    (CastSteps, "run", ""),
    (CastSteps, "run_stage", ""),
    (HeldDigests, "of", "digests"),
    (InnerOptimizer, "step", "inner step"),
    (ShardedWeights, "store_plain", "store_plain"),
]
"""The functions that are phases of programs, with their names there."""

SHAPE = (48, 64)


class PlanSteps:
    """Steps of a plan, or by functional calls."""

    def __init__(self, comm: Communicator, recipe: str = "nvfp4", *,
                 calls: bool = False, **options: Any) -> None:  # fmt: skip
        self.comm, self.extent = comm, chunk(48 * 64, comm.rank, comm.size)
        self.weights = [zerocast.empty(SHAPE, RECIPES[recipe], columnwise=recipe != "mxfp8")]
        self.number, self.uses_late = 0, False
        self.master = torch.ones(self.extent.size)
        self.plan = None
        if not calls:
            self.plan = zerocast.CastPlan(
                self.weights, [self.master], [self.extent.start], comm, **options
            )

    def step(self, number: int, fault: str) -> None:
        """Make a step."""
        self.master.fill_(torch.nan if fault == "not finite" else 1.0 + number)
        given = [self.master.double() if fault == "raises" else self.master]
        if self.plan is not None:
            self.plan.step = number
            self.plan.cast(given)
            self.plan.all_gather()
            return
        if fault == "forgets":
            self.weights[0].quantized_storage.plans.clear()
        zerocast.quantize_master_weights(self.weights, given, [self.extent.start], self.comm)
        self.comm.all_gather_(self.weights[0].rowwise_data.view(-1))

    def settle(self) -> None:
        """Nothing is under way."""


class OptimizerSteps:
    """Steps of an optimizer."""

    def __init__(self, comm: Communicator, scaler: bool = False, **options: Any) -> None:
        self.training = Training(comm, **options)
        self.number, self.uses_late = 0, "overlap_all_gather" in options
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if scaler else None
        self.weights = [p for p in self.training.params if isinstance(p, zerocast.QuantizedTensor)]

    def step(self, number: int, fault: str) -> None:
        """Make a step."""
        if self.scaler is not None:
            self.training.scaled_backward(self.scaler, number, overflows=fault == "overflow")
            self.scaler.step(self.training.optimizer)
            self.scaler.update()
            if self.training.optimizer._progress.steps == number - 1:
                raise InputError("all ranks have left the step out")
            return
        self.training.feed(number)

        def closure() -> None:
            if fault == "raises":
                raise InputError("planted")

        self.training.optimizer.step(closure, number=number)

    def settle(self) -> None:
        """Wait for what is under way."""
        self.training.optimizer.wait_for_all_gather()


def record(world: Recorded, name: str) -> list[tuple[str, list[bool]]]:
    """Run a program's steps; return by rank how it ended, and which weights can be read."""
    _, kind, options = PROGRAMS[name]

    def body(comm: Communicator) -> tuple[str, list[bool]]:
        LOCAL.world, LOCAL.rank = world, comm.rank
        steps: Any = None
        end = ""
        while not end:
            try:
                if steps is None:
                    steps = kind(comm, **options)
                end = made(world, comm.rank, steps)
            except PeerFailedError:  # noqa: PERF203  (the loop goes on after an error of all)
                world.note(comm.rank, end := "gave up")
            except OSError:  # not one that all ranks raise
                end = "raised"
            except (UnfinishedStepError, VerificationError):
                world.note(comm.rank, end := "refused")
            except ZerocastError as error:
                if isinstance(error.__cause__, OSError):
                    end = "raised"
                else:
                    world.note(comm.rank, "again")
                    casts = (comm.rank, "partial_amax") in {event[:2] for event in world.events}
                    end = "refused" if steps is None and casts else ""
        return end, [is_whole(weight) for weight in (steps.weights if steps else ())]

    return [("dead", []) if isinstance(end, Killed) else end for end in world.run(body)]


def made(world: Recorded, rank: int, steps: Any) -> str:
    """Make the steps that are left."""
    while steps.number < STEPS:
        try:
            fault = world.note(rank, "step")
        except InputError:
            fault = "raises"
        number = steps.number + 1
        steps.step(number + (fault == "skips") - (fault == "repeats"), fault)
        if not steps.uses_late or (rank + number) % 2:
            used(world, rank, steps)
        world.note(rank, "next")
        steps.number += 1
    steps.settle()
    used(world, rank, steps)
    world.note(rank, "done")
    return "done"


def used(world: Recorded, rank: int, steps: Any) -> None:
    """Use the weights."""
    for weight in steps.weights:
        weight.dequantize()
    world.note(rank, "use")


HASH = {"verify": "hash"}

PROGRAMS: dict[str, tuple[Program, Callable[..., Any], dict[str, Any]]] = {
    "plan": (plan_program(), PlanSteps, {}),
    "boundary, hash": (
        plan_program(boundary=True, verify=True), PlanSteps, {"exchange": "boundary", **HASH},
    ),
    "4 over 6, finite": (
        plan_program(chooses=True, finite=True), PlanSteps,
        {"recipe": "nvfp4-4over6", "check_finite": True},
    ),
    "codes early": (
        plan_program(early=True, boundary=True), PlanSteps,
        {"recipe": "mxfp8", "exchange": "boundary"},
    ),
    "calls": (call_program(), PlanSteps, {"calls": True}),
    "optimizer, hash": (optimizer_program(verify=True), OptimizerSteps, HASH),
    "late gathers, hash": (
        optimizer_program(verify=True, overlap_all_gather=True, codes=3), OptimizerSteps,
        {"overlap_all_gather": True, "bucket_size": 1500, **HASH},
    ),
    "overlapped cast": (
        optimizer_program(overlap_cast=True, codes=3), OptimizerSteps,
        {"overlap_cast": True, "bucket_size": 1500},
    ),
    "both overlapped": (
        optimizer_program(overlap_cast=True, overlap_all_gather=True, codes=3), OptimizerSteps,
        {"overlap_cast": True, "overlap_all_gather": True, "bucket_size": 1500},
    ),
    "scaler": (optimizer_program(scaler=True), OptimizerSteps, {"scaler": True}),
}  # fmt: skip
"""By name a program, what makes its steps, and of what."""
