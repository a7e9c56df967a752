"""Whatever is done to plans, weights and masters, in whatever order: a gathered cast has the bytes
of ``quantize``, or every rank is told why not, and nothing has been changed that can be read.

A machine does to weights on some ranks what programs do: new values, casts, gathers, memory that
moves or is lost, plans made anew of other shards, weights saved and loaded. Beside it the reference
casts whole masters into whole weights.
"""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import zerocast
from tests.support.claims import assert_same_tensors, one_message, stored
from tests.support.living_ranks import LivingRanks
from tests.support.nightly import nightly
from tests.support.partitions import draw_partition
from tests.support.recipes import RECIPES
from tests.support.values import KINDS, draw_values
from tests.support.weights import through_a_file
from zerocast.cast.addresses import Addresses
from zerocast.cast.amax_buffers import AmaxBuffers
from zerocast.comm import Communicator
from zerocast.errors import InputError, RankMismatchError, ZerocastError
from zerocast.tensors import quantize_into

SHAPES = ((33, 64), (5, 96))
NAMES = ("w.0", "w.1")
SEEDS = st.integers(0, 2**16)


def empty(recipe: zerocast.Recipe) -> list[Any]:
    """Weights that hold nothing yet."""
    return [
        zerocast.empty(shape, recipe, dtype=torch.bfloat16, name=name)
        for shape, name in zip(SHAPES, NAMES, strict=True)
    ]


class CastLife(RuleBasedStateMachine):
    """Weights on ranks, and the same ones whole."""

    @initialize(name=st.sampled_from(list(RECIPES)), size=st.integers(1, 3), seed=SEEDS)
    def begin(self, name: str, size: int, seed: int) -> None:
        self.recipe, self.ranks = RECIPES[name], LivingRanks(size)
        self.expected = empty(self.recipe)
        self.weights = self.ranks.all(lambda comm: empty(self.recipe))
        self.is_cast = self.is_whole = False
        self.whole = [torch.zeros(math.prod(shape)) for shape in SHAPES]
        self.plan_anew(seed=seed, exchange="full", verify="off")

    @rule(
        seed=SEEDS,
        exchange=st.sampled_from(("full", "boundary")),
        verify=st.sampled_from(("off", "hash", "full")),
    )
    def plan_anew(self, seed: int, exchange: Any, verify: Any) -> None:
        draw = random.Random(seed)
        self.how = {"exchange": exchange, "verify": verify}
        self.extents = [
            draw_partition(whole.numel(), self.ranks.size, draw) for whole in self.whole
        ]
        self.masters = [
            [
                whole[extent[rank].start : extent[rank].end].clone()
                for whole, extent in zip(self.whole, self.extents, strict=True)
            ]
            for rank in range(self.ranks.size)
        ]
        self.plans = self.ranks.all(self._plan)
        self.is_cast = self.has_moved = self.is_broken = False

    def _plan(self, comm: Communicator) -> zerocast.CastPlan:
        starts = [extents[comm.rank].start for extents in self.extents]
        weights, masters = self.weights[comm.rank], self.masters[comm.rank]
        return zerocast.CastPlan(weights, masters, starts, comm, names=NAMES, **self.how)

    def masters_are_free(self) -> bool:
        """Not where a comparison is to come that reads them as they were cast."""
        return not (self.is_cast and self.how["verify"] == "full")

    @precondition(masters_are_free)
    @rule(seed=SEEDS, kind=st.sampled_from(KINDS))
    def update(self, seed: int, kind: str) -> None:
        """Another step of an optimizer."""
        for i, whole in enumerate(self.whole):
            whole.copy_(draw_values(kind, whole.numel(), seed + i))
            for rank, masters in enumerate(self.masters):
                extent = self.extents[i][rank]
                if masters[i].untyped_storage().nbytes() >= masters[i].nbytes:
                    masters[i].copy_(whole[extent.start : extent.end])

    @rule()
    def cast(self) -> None:
        before = [stored(dict(zip(NAMES, weights, strict=True))) for weights in self.weights]
        errors = self.ranks.errors(lambda comm: self.plans[comm.rank].cast())
        if any(errors):
            assert self.has_moved or self.is_broken, errors
            assert all(isinstance(error, ZerocastError) for error in errors), errors
            for rank, weights in enumerate(self.weights):
                now = stored(dict(zip(NAMES, weights, strict=True)))
                if self.is_unfinished(rank):
                    self.is_whole = False
                else:
                    assert_same_tensors(now, before[rank], f"on rank {rank} after {errors[rank]}")
            self.plan_anew(seed=0, **self.how)
            return
        assert not self.is_broken, "a master without memory was cast"
        for weight, whole in zip(self.expected, self.whole, strict=True):
            with zerocast.use_backend("reference"):
                quantize_into(weight.quantized_storage, whole.view(weight.shape))
        self.is_cast, self.is_whole = True, False

    def is_unfinished(self, rank: int) -> bool:
        """Whether a rank wrote codes, which wait for nothing, before it heard of another's error:
        then nobody reads the weights.
        """
        writes = [weight.quantized_storage.writes for weight in self.weights[rank]]
        if not any(each.unfinished for each in writes):
            return False
        assert self.plans[rank]._prepared.steps.writes_early
        for weight in self.weights[rank]:
            with pytest.raises(zerocast.UnfinishedStepError, match="holds parts of two casts"):
                weight.dequantize()
        return True

    @precondition(lambda self: self.is_cast)
    @rule()
    def gather(self) -> None:
        def gather(comm: Communicator) -> None:
            plan = self.plans[comm.rank]
            plan.all_gather()
            zerocast.post_all_gather_processing(self.weights[comm.rank])

        self.ranks.all(gather)
        self.is_cast, self.is_whole = False, True
        self.compare("gathered")

    def compare(self, when: str) -> None:
        """Every rank has every byte."""
        expected = stored(dict(zip(NAMES, self.expected, strict=True)))
        for rank, weights in enumerate(self.weights):
            given = stored(dict(zip(NAMES, weights, strict=True)))
            assert_same_tensors(given, expected, f"on rank {rank}, {when}, {self.recipe}")

    # --- what programs do beside ---

    @precondition(lambda self: not self.is_cast)
    @rule(seed=SEEDS)
    def move_codes(self, seed: int) -> None:
        """Let the codes of one rank lie anywhere in other memory."""
        draw = random.Random(seed)
        weight = draw.choice(draw.choice(self.weights))
        slices = []
        for codes in weight.quantized_storage.codes:
            at = draw.randrange(5)
            buffer = torch.zeros(at + codes.numel() + 3, dtype=torch.uint8)
            slices.append(buffer[at : at + codes.numel()])
        zerocast.replace_raw_data(weight, *slices)
        self.has_moved = True

    @precondition(masters_are_free)
    @rule(seed=SEEDS, is_lost=st.booleans())
    def move_a_master(self, seed: int, is_lost: bool) -> None:
        """One rank's, or give its memory back."""
        masters = random.Random(seed).choice(self.masters)
        for master in masters:
            if is_lost and master.numel():
                master.untyped_storage().resize_(0)
                self.is_broken = True
            elif not self.is_broken:
                master.data = master.clone()
        self.has_moved = True

    @precondition(lambda self: self.is_whole)
    @rule()
    def save_and_load(self) -> None:
        self.weights = [[through_a_file(weight) for weight in own] for own in self.weights]
        self.compare("loaded")
        self.plan_anew(seed=1, **self.how)

    @precondition(lambda self: self.ranks.size > 1)
    @rule(seed=SEEDS)
    def disagree(self, seed: int) -> None:
        """One rank plans other shards, weights or ways than the others: all are told."""
        odd, what = random.Random(seed).randrange(self.ranks.size), seed % 3

        def plan(comm: Communicator) -> None:
            weights, how = self.weights[comm.rank], dict(self.how)
            starts = [extents[comm.rank].start for extents in self.extents]
            masters = [torch.zeros_like(master) for master in self.masters[comm.rank]]
            if comm.rank == odd and what == 0:
                weights, masters, starts = weights[:1], masters[:1], starts[:1]
            elif comm.rank == odd and what == 1 and masters[0].numel():
                starts[0] += 1
            elif comm.rank == odd:
                how["verify"] = "hash" if how["verify"] == "off" else "off"
            names = NAMES[: len(weights)]
            zerocast.CastPlan(weights, masters, starts, comm, names=names, **how)

        errors = self.ranks.errors(plan)
        assert all(isinstance(error, InputError | RankMismatchError) for error in errors), errors
        one_message([str(error) for error in errors])

    def teardown(self) -> None:
        self.ranks.end()


@pytest.mark.parametrize(("lives", "steps"), [(12, 15), nightly(1000, 50)])
def test_any_life_of_a_cast(lives: int, steps: int) -> None:
    """What is drawn, and what must hold after each step, :class:`CastLife` says."""
    drawn = settings(max_examples=lives, stateful_step_count=steps)
    run_state_machine_as_test(CastLife, settings=drawn)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (AmaxBuffers, "clear", lambda self: None),
        (Addresses, "have_moved", lambda self: False),
    ],
    ids=["amaxes of the cast before", "memory that has moved"],
)
def test_a_wrong_line_is_found(
    owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where amaxes are not cleared before a cast, or moved codes are not looked for."""
    monkeypatch.setattr(owner, name, wrong)
    drawn = settings(max_examples=1000, stateful_step_count=50, phases=[Phase.generate])
    with pytest.raises(AssertionError, match="expected"):
        run_state_machine_as_test(CastLife, settings=drawn)
