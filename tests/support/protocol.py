"""What a rank does in plans, functional calls and optimizers, as programs of
tests.support.state_space: phases, by the functions of zerocast that are done, and collectives, by
those that make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.recipes import CAST_COLUMNWISE, RECIPES
from tests.support.state_space import Mistake, Op, Ops

HELD = ("check_specs", "_plan", "check_shardable", "partial_amax", "digests", "inner step", "step")
"""What errors all ranks hear of."""

WAYS = tuple(what + when for what in ("raises", "dies") for when in ("", " inside", " after"))
JUDGE = "whole_cast.gather_master: gather", "verified._judge: max", "verified._judge: gather_object"
EXPLAIN = "verified._explain: gather_object", "verified._explain: max"
LATE = "pending_all_gather.begin: gather"
QUANTIZED = 3
"""The weights."""


class Heard(Exception):
    """All ranks have heard of an error, or that their steps' numbers differ, or of NaN."""


class Protocol:
    """What one rank knows: its options, and what has come of its steps; and does: casts and gathers
    of a plan, or functional calls and gathers of the caller's.

    Attributes:
        copies: those of a weight's codes that are gathered.
        codes: the parts of the weights that are codes; one more has scales.
        cuts_blocks: whether a boundary between shards cuts a block.
    """

    recipe, exchange, verify, fault = "nvfp4", "full", "off", ""
    steps, bucket_size, made, number, step, heard = 2, 0, 0, 0, 0, 0
    check_finite = calls = scaler = overlap_all_gather = overlap_cast = False
    error = stale = due = flips = unfinished = False
    columnwise = forgets = cuts_blocks = True

    def __init__(self, rank: int, **options: Any) -> None:
        vars(self).update(options, rank=rank)
        self.copies = 1 + (self.columnwise and self.recipe in CAST_COLUMNWISE)
        self.codes = self.copies * (QUANTIZED if self.bucket_size or self.calls else 1)
        in_parts = self.exchange == "boundary" and self.recipe not in ("current", "delayed")
        self.own_scales = (self.codes,) * in_parts

    def run(self) -> Ops:
        """All that it does."""
        yield from self.make()
        while self.made < self.steps:
            yield from self.until_done(self.make_step)
            if self.error:
                raise Mistake("a rank has an error that nobody hears of")
            self.made, self.number, self.fault = self.made + 1, self.step, ""
        yield from self.until_done(self.settle)
        yield from self.come_to("do", "use")
        yield from self.do("done")

    def make(self) -> Ops:
        """What comes before the steps."""
        yield from self.until_done(*[self.make_plan] * (not self.calls))

    def make_step(self) -> Ops:
        """One step."""
        faults = ["forgets"] if self.calls else ["skips", "repeats"]
        yield from self.given("raises", *faults, *["not finite"] * self.check_finite)
        self.error = self.fault == "raises"
        if self.calls:
            opening = "calls.quantize_master_weights: "
            self.forgets |= self.fault == "forgets"
            yield from self.phase("check_specs")
            error = self.error, f"{opening}gather_object"
            cases = {"error": error, "forgets": (self.forgets,)}
            if (yield from self.agree(f"{opening}max", cases)):
                yield from self.make_plan()
        yield from self.cast()
        for part in range(self.codes):
            yield from self.call(f"{'the caller' if self.calls else 'gather.start'}: gather", part)
        yield from self.gather_scales()
        self.stale = False
        yield from self.do(*["transpose"] * (not self.calls))
        yield from self.compare()
        yield from self.come_to("do", "use")

    def settle(self) -> Ops:
        """The latest step ends."""
        yield from ()

    # --- operations ---

    def come_to(self, kind: str, name: str, *faults: str, **options: Any) -> Ops:
        """An operation; return how it came out, where the rank goes on."""
        answer = yield Op(kind, name, faults, options.pop("answers", ("",)), self.step, **options)
        self.stale |= (kind, name, answer) == ("wait", LATE, "gave up")  # and uses raise
        if answer == "gave up" or answer.startswith("dies"):
            yield Op("end", "dead" if answer != "gave up" else answer)
        if answer.startswith("raises") and name not in HELD:
            yield Op("end", "raised")
        return answer

    def phase(self, name: str, *faults: str, **options: Any) -> Ops:
        """What a rank does by itself."""
        answer = yield from self.come_to("do", name, *WAYS, *faults, **options)
        self.error |= answer.startswith("raises")
        return answer

    def begin(self, name: str, part: int = -1, **says: Any) -> Ops:
        """Begin a collective, of a part of the weights, or of what ranks say."""
        told = tuple(says.items())
        yield from self.come_to("begin", name, "raises", "dies", part=part, says=told)

    def call(self, name: str, part: int = -1, **says: Any) -> Ops:
        """A collective, and the wait for it."""
        yield from self.begin(name, part, **says)
        return (yield from self.come_to("wait", name, answers=()))

    def do(self, *names: str) -> Ops:
        """Phases and collectives; whether any rank has an error, by "?"; or an end."""
        for _i, name in enumerate(names):  # by it a place is another one than that before it
            if name in ("done", "refused"):
                yield Op("end", name)
            elif name.endswith("?"):
                error = self.error, f"{name[:-1]}: gather_object"
                yield from self.agree(f"{name[:-1]}: max", {"error": error})
            else:
                yield from (self.call(name) if ":" in name else self.phase(name))

    def agree(self, name: str, cases: Mapping[str, tuple[Any, ...]]) -> Ops:
        """A collective: by what ranks may read, what this one says, and what is done before all
        raise. Return what they have read where that is nothing.
        """
        found = yield from self.call(name, **{case: says for case, (says, *_) in cases.items()})
        if found and cases[found][1:]:
            yield from self.do(*cases[found][1:])
            raise Heard(found)
        return found

    def until_done(self, *parts: Any) -> Ops:
        """Do all of ``parts``; again from the first, after an error."""
        while parts:
            try:
                for part in parts:
                    yield from part()
                break
            except Heard as heard:
                yield from self.again(heard)

    def again(self, heard: Heard) -> Ops:
        """Go on after an error that all have heard of."""
        self.heard += 1
        self.error, self.fault = False, ""
        yield from self.come_to("do", f"again: {heard}")

    # --- what plans and optimizers share ---

    def make_plan(self) -> Ops:
        """A plan is made."""
        yield from self.do("check_specs", "descriptions.check_descriptions?")
        yield from self.do(*["consistency._exchange: gather"] * 2, "_plan", "plan._agree?")
        self.forgets = False

    def given(self, *faults: str) -> Ops:
        """What the caller gives for a step."""
        self.fault = yield from self.come_to("do", "step", "dies", *faults)
        self.step = self.number + 1 + (self.fault == "skips") - (self.fault == "repeats")

    def cast(self) -> Ops:
        """A cast, up to scales; part 0 is written at once by MXFP8 without columnwise copies."""
        early = self.recipe == "mxfp8" and not self.columnwise and not self.error
        self.stale |= early
        if not self.error:
            yield from self.phase("partial_amax", writes=(0,) * early)
        raised = "exchange.reduce_amax: max", "exchange.reduce_amax: gather_object"
        cases = {"error": (self.error, *raised)}
        cases["number"] = self.step, "exchange._other_steps: gather_object", *raised
        if self.check_finite:
            cases["not finite"] = self.fault == "not finite", "finite._worst: max"
        yield from self.agree("exchange._reduce: max", cases)
        if "4over6" in self.recipe:
            travel = self.cuts_blocks or self.exchange == "full"
            reduction = ["exchange.reduce_candidates: sum"] * travel
            yield from self.do("partial_select", *reduction, "select")
        self.stale = self.due = True
        of_all = () if self.own_scales else (self.codes,)
        yield from self.phase("compute_scale", writes=self.own_scales, of_all=of_all)
        if not self.overlap_cast:
            yield from self.phase("partial_cast", writes=tuple(range(self.codes)))

    def gather_scales(self) -> Ops:
        """Scales travel, and are stored."""
        if self.own_scales:
            yield from self.call("scale_gather.start: gather", self.codes)
            yield from self.phase("expand_scales")

    def compare(self) -> Ops:
        """Digests are compared, where they were not; where they differ, a weight is judged."""
        if self.verify == "off" or not self.due:
            return
        self.flips |= (yield from self.phase("digests", "flips")) == "flips"
        judged = *EXPLAIN, *JUDGE, *EXPLAIN[::-1], "refused"
        error = self.error, "verified.check: gather_object"
        yield from self.agree(
            "verified.check: max", {"error": error, "flips": (self.flips, *judged)}
        )
        if self.verify == "full":
            yield from self.do(*JUDGE, "verified._compare_sample: max")
        self.due = False


class OptimizerProtocol(Protocol):
    """Steps of an optimizer, whose quantized weights lie in one bucket or several."""

    exchange = "boundary"

    def make(self) -> Ops:
        """What comes before the steps, of which only a cast is not made again."""
        yield from self.until_done(self.check, self.make_plan)
        try:
            yield from self.publish()
            yield from self.settle()
        except Heard as heard:
            yield from self.again(heard)
            yield from self.do("refused")

    def check(self) -> Ops:
        """What comes before the plan."""
        states = QUANTIZED * len(RECIPES[self.recipe].state)
        yield from self.do("check_shardable", "zero.__init__?", "weights.check_same_optimizer: max",
                           *["shards.share_recipe_states: broadcast"] * states)  # fmt: skip

    def publish(self) -> Ops:
        """Weights are cast and gathered, plain ones of two dtypes before the others."""
        yield from self.cast()
        yield from self.do("store_plain")
        yield from self.gather_scales()
        early, alone = "publication._cast_and_all_gather: gather", "shards.all_gather: gather"
        for part in (-2, -1, *range(self.codes)):
            stage, copy = divmod(part, self.copies)
            if self.overlap_cast and part >= 0 and not copy:
                own = tuple(range(part, part + self.copies))
                yield from self.phase(f"stage {stage}", writes=own)
            at = early if self.overlap_cast else alone
            at = LATE if self.overlap_all_gather and part >= 0 else at
            yield from (self.call(at, part) if at == alone else self.begin(at, part))
        if self.overlap_cast:
            yield from self.come_to("wait", early, answers=())
        self.stale = False
        yield from self.do(*["transpose"] * (not self.overlap_all_gather))

    def wait_late(self) -> Ops:
        """Wait for gathers that are under way."""
        if self.overlap_all_gather:
            yield from self.come_to("wait", LATE, answers=())

    def settle(self) -> Ops:
        """The latest step ends."""
        yield from self.wait_late()
        yield from self.compare()

    def make_step(self) -> Ops:
        """One step."""
        yield from self.given(*["overflow"] if self.scaler else ["raises", "skips", "repeats"])
        overflow = self.fault == "overflow"
        if self.scaler and (yield from self.call("found_inf.agree: max", overflow=overflow)):
            raise Heard("error")
        yield from self.settle()
        self.error = self.fault == "raises"
        told = "progress.reduce: max", "progress.reduce: gather_object"
        if (yield from self.agree("gradient_rounds.begin: to_all", {
            "number": (self.step,), "unfinished": (self.unfinished, *told, "refused"),
            "error": (self.error, *told),
        })):  # fmt: skip
            raise Heard("number")
        self.unfinished = True
        yield from self.phase("inner step")
        yield from self.publish()
        self.unfinished = False
        late = self.overlap_all_gather
        if not late:
            yield from self.compare()
        if not late or (yield from self.come_to("do", "may", answers=("", "reads"))):
            yield from self.wait_late()
            yield from self.come_to("do", "use")
