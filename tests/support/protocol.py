"""What ranks do in plans, functional calls and optimizers: programs of tests.support.state_space,
and the code that they are of, run with its phases and collectives noted.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast.cast.calls
import zerocast.cast.plan
import zerocast.optim.zero
from tests.support.simulated_steps import OptimizerSteps, PlanSteps, Scenario, play
from tests.support.simulation import LOCAL, Fault, Killed
from tests.support.state_space import STEPS, Mistake, Op, Program, Rank
from zerocast.cast.copied_digests import HeldDigests
from zerocast.errors import InputError
from zerocast.layout import chunk
from zerocast.optim.inner import InnerOptimizer
from zerocast.optim.shards import ShardedWeights
from zerocast.tensors.cast_steps import CastSteps

Ops = Sequence[Op]

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
"""The functions that are phases of programs, with their names there, or none where an argument is
the name."""

HELD = ("check_specs", "_plan", "check_shardable", "partial_amax", "digests", "inner step")
"""Those whose errors all ranks hear of."""

AGAIN, NEXT, USE = Op("again"), Op("next"), Op("use")
START, NO_START = Op("start", "step"), Op("start")
DONE, REFUSED = Op("end", "done"), Op("end", "refused")
READABLE, RAISES = Op("set", clears=("stale",)), Op("set", sets=("error",), only="raises")


def phase(name: str, **options: Any) -> Op:
    """What a rank does by itself."""
    return Op("held" if name in HELD else "alone", name, **options)


def call(at: str, kind: str, part: int = -1, only: str = "", **on: Ops) -> list[Op]:
    """A collective that the function ``at`` makes, and the wait for it."""
    then = tuple((result.replace("_", " "), tuple(ops)) for result, ops in on.items())
    begin = Op("begin", f"{at}: {kind}", moves=part, on=then, only=only)
    return [begin, Op("wait", begin.name, on=then)]


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
    exchanged = gather("consistency._exchange")
    return [
        phase("check_specs"), *vote("descriptions.check_descriptions"), *exchanged, *exchanged,
        phase("_plan"), *vote("plan.__init__"), Op("set", clears=("forgets",)),
    ]  # fmt: skip


def cast(codes: Ops, scales: int = 1, *, boundary: bool = False, finite: bool = False,
         chooses: bool = False, early: bool = False) -> list[Op]:  # fmt: skip
    """A cast: ``codes`` write the codes; where they are ``early``, part 0 is written at once."""
    reduce = "exchange.reduce_amax"
    error = [*largest(reduce), *told(reduce)]
    on = {"error": error, "number": told("exchange._other_steps", *error)}
    if finite:
        on["not_finite"] = [*largest("finite._worst"), AGAIN]
    choice = [
        phase("partial_select"), *call("exchange.reduce_candidates", "all_reduce_sum_"),
        phase("select"),
    ]  # fmt: skip
    return [
        *[Op("set", sets=("stale",), unless="error")] * early,
        phase("partial_amax", writes=(0,) * early, unless="error"),
        *largest("exchange._reduce", **on),
        *choice * chooses,
        Op("set", "tick", sets=("stale", "due")),
        phase("compute_scale", **{"writes" if boundary else "of_all": (scales,)}),
        *codes,
    ]


def gathered_scales(part: int) -> list[Op]:
    """Scales travel, and are stored."""
    return [*gather("scale_gather.start", part), phase("expand_scales")]


def compared() -> list[Op]:
    """Digests are compared, of what was not; where they differ, a weight is cast whole."""
    done = Op("set", clears=("due",))  # also where it failed: a cast is compared once
    judged = [
        *told("verified._explain", *largest("verified._explain")),
        *gather("whole_cast.gather_master"), *largest("verified._judge"),
        *told("verified._judge", *largest("verified._explain")),
        *told("verified._explain", REFUSED),
    ]  # fmt: skip
    return [
        phase("digests", faults=("flips",), only="due"),
        *largest("verified.check", "due", error=told("verified.check", done, AGAIN), flips=judged),
        done,
    ]


def plan_program(
    *, recipe: str = "", exchange: str = "", verify: str = "", check_finite: bool = False,
    calls: bool = False, columnwise: bool = True,
) -> Program:  # fmt: skip
    """Casts and gathers of a plan; or functional ``calls``, and gathers of the caller's. Without
    ``columnwise`` copies, MXFP8 is cast where it is measured.
    """
    boundary, opening = exchange == "boundary", "calls.quantize_master_weights"
    made = [START, *making(), START]
    faults = ("raises", "skips", "repeats", *["not finite"] * check_finite)
    at, found = "gather.start", []
    if calls:
        made, faults, at = [START], ("forgets",), "the caller"
        found = [
            phase("check_specs"), *largest(opening, error=told(opening), forgets=making())
        ]  # fmt: skip
    return Program([
        *made, Op("given", "step", faults=faults), RAISES, *found,
        *cast([phase("partial_cast", writes=(0,))], boundary=boundary, finite=check_finite,
              chooses="4over6" in recipe, early=recipe == "mxfp8" and not columnwise),
        *gather(at, 0), *gathered_scales(1) * boundary, READABLE,
        *[phase("transpose")] * (not calls), *compared() * bool(verify), USE, NEXT, USE, DONE,
    ], parts=2)  # fmt: skip


def optimizer_program(
    *, verify: str = "", overlap_all_gather: bool = False, overlap_cast: bool = False,
    scaler: bool = False, bucket_size: int = 0,
) -> Program:  # fmt: skip
    """Steps of an optimizer, whose quantized weights lie in one bucket or three."""
    late, codes = "pending_all_gather.begin", 3 if bucket_size else 1
    at = "publication._cast_and_all_gather" if overlap_cast else "shards.all_gather"
    write = [phase("partial_cast", writes=tuple(range(codes)))] * (not overlap_cast)
    published = [
        *cast(write, codes, boundary=True), phase("store_plain"), *gathered_scales(codes)
    ]  # fmt: skip
    for bucket in (-1, -1, *range(codes)):
        is_late = overlap_all_gather and bucket >= 0
        begin, wait = gather(late if is_late else at, bucket)
        if overlap_cast and bucket >= 0:
            published.append(phase(f"stage {bucket}", writes=(bucket,)))
        published += [begin] if overlap_cast or is_late else [begin, wait]
    if overlap_cast:
        published.append(Op("wait", f"{at}: all_gather_"))
    published += [READABLE, *[phase("transpose")] * (not overlap_all_gather)]
    waits = [Op("wait", f"{late}: all_gather_", sets=("stale",))]  # uses raise from then on
    settled = [*waits * overlap_all_gather, *compared() * bool(verify)]
    stepped = largest("found_inf.agree", overflow=[AGAIN]) if scaler else []
    reduced = largest("progress.reduce")
    reduced = call("gradient_rounds.begin", "all_to_all", number=[AGAIN],
                   unfinished=[*reduced, *told("progress.reduce", REFUSED)],
                   error=[*reduced, *told("progress.reduce")])  # fmt: skip
    return Program([
        START, phase("check_shardable"), *vote("zero.__init__"),
        *largest("weights.check_same_optimizer"), *making(), NO_START,
        *published, *settled, START,
        Op("given", "step", faults=("overflow",) if scaler else ("raises", "skips", "repeats")),
        *stepped, *settled * overlap_all_gather, RAISES, *reduced,
        Op("set", sets=("unfinished",)), phase("inner step"),
        *published, Op("set", clears=("unfinished",)),
        *compared() * (bool(verify) and not overlap_all_gather),
        *[Op("may"), *waits] * overlap_all_gather, USE, NEXT, START, *settled, USE, DONE,
    ], parts=codes + 1)  # fmt: skip


LATE, EARLY = {"overlap_all_gather": True}, {"overlap_cast": True}
HASH, BOUNDARY, BUCKETS = {"verify": "hash"}, {"exchange": "boundary"}, {"bucket_size": 1500}
PROGRAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plan": (PlanSteps, {}),
    "boundary, hash": (PlanSteps, BOUNDARY | HASH),
    "4 over 6, finite": (PlanSteps, {"recipe": "nvfp4-4over6", "check_finite": True}),
    "codes early": (PlanSteps, BOUNDARY | {"recipe": "mxfp8", "columnwise": False}),
    "calls": (PlanSteps, {"calls": True}),
    "optimizer, hash": (OptimizerSteps, HASH),
    "late gathers, hash": (OptimizerSteps, LATE | BUCKETS | HASH),
    "overlapped cast": (OptimizerSteps, EARLY | BUCKETS),
    "both overlapped": (OptimizerSteps, EARLY | LATE | BUCKETS),
    "scaler": (OptimizerSteps, {"scaler": True}),
}
"""By name what makes a program's steps, and with which options."""


@cache
def program(name: str) -> Program:
    """The program of that name."""
    kind, options = PROGRAMS[name]
    return plan_program(**options) if kind is PlanSteps else optimizer_program(**options)


# --- the code ---


def noted(patch: pytest.MonkeyPatch, owner: Any, attribute: str, name: str) -> None:
    """Let a function of zerocast be a phase that is noted."""
    original = getattr(owner, attribute)

    def run(*args: Any, **options: Any) -> Any:
        its_caller = Path(sys._getframe(1).f_code.co_filename)
        if its_caller.parent.name == "tensors" or not hasattr(LOCAL, "rank"):  # no plan's
            return original(*args, **options)
        world, rank = LOCAL.rank
        called = name or (f"stage {args[1]}" if attribute == "run_stage" else args[1])
        error = InputError("planted") if called in HELD else OSError("planted")
        fault = world.note(rank, called)
        if fault == "raises":
            raise error
        if fault == "flips":
            args[1][-1].view(torch.uint8).view(-1)[:1] ^= 1
        result = original(*args, **options)
        if fault == "raises after":
            raise error
        return result

    patch.setattr(owner, attribute, run)


def run(name: str, size: int, fault: Fault, seed: int) -> list[tuple[int, str, str]]:
    """Run the code of a program, and hold it to it; return what happened.

    Raises:
        Mistake: where it does or comes to something else.
    """
    kind, options = PROGRAMS[name]
    options = {"recipe": "nvfp4", **options}
    extents = [[chunk(48 * 64, rank, size) for rank in range(size)]]
    scenario = Scenario(size, kind, options.pop("recipe"), options, fault, ((48, 64),), extents,
                        announces=seed % 2 == 0, steps=STEPS)  # fmt: skip
    world, ends = play(scenario, random.Random(seed))
    worlds = program(name).follow(size, world.events)
    reads = name != "calls"  # which leave weights that are torn readable
    if not any(all(map(_is, ends, model.ranks, [reads] * size)) for model in worlds):
        came = [[rank.at for rank in model.ranks] for model in worlds]
        raise Mistake(f"ranks ended as {ends}, and in the model as {came}, after {fault}")
    return world.events


def _is(end: Any, rank: Rank, reads: bool) -> bool:
    """Whether a rank ended as one of a state, and can read its weights where that can."""
    if isinstance(end, Killed):
        return rank.at == "dead"
    read = None not in end.held
    compared = reads and end.held and not rank.waits
    return end.end == rank.at and (not compared or read == ("stale" not in rank.known))
