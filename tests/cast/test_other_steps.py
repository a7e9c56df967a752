"""Ranks that cast in another step than the others are noticed with the amaxes, by ``plan.step``."""

from typing import Any

import pytest
import torch

import zerocast
from tests.support.claims import message_of
from tests.support.ranks import PROCESSES, on_ranks, run_ranks
from zerocast.cast import CastPlan
from zerocast.cast.verified import Verification
from zerocast.comm import Communicator, RecordingCommunicator
from zerocast.errors import PeerFailedError, RankMismatchError

NUMEL = 24 * 32


def planned(groups: list[Communicator], exchange: str = "full") -> CastPlan:
    """NVFP4 and FP8 weights [24, 32] in turn, one a group, of which ranks own equal parts."""
    recipes = ("nvfp4", "block")
    weights = [zerocast.empty((24, 32), recipes[i % 2]) for i in range(len(groups))]
    parts = [NUMEL // group.size for group in groups]
    masters = [torch.full((part,), 0.5 + i) for i, part in enumerate(parts)]
    starts = [part * group.rank for part, group in zip(parts, groups, strict=True)]
    return CastPlan(weights, masters, starts, groups, exchange=exchange)


def left_out(comm: Communicator, exchange: str) -> tuple[str, int]:
    """What a rank hears in a run of five steps, of which rank 1 leaves out the third; and of how
    many collectives a step's cast is.
    """
    recording, steps = RecordingCommunicator(comm), [0, 1, 2, 3, 4]
    plan, calls = planned([recording, recording], exchange), 0
    if comm.rank == 1:
        steps.remove(2)
    for plan.step in steps[:2]:
        recording.reset()
        plan.cast()
        calls = recording.total().calls
        plan.all_gather()
    plan.step = steps[2]
    return message_of(RankMismatchError, plan.cast), calls


@pytest.mark.parametrize("exchange", ["full", "boundary"])
@pytest.mark.parametrize(
    "kind", ["in_process", *(pytest.param(p, marks=pytest.mark.mpi(min_size=4)) for p in PROCESSES)]
)
def test_a_step_that_one_rank_leaves_out(kind: str, exchange: str) -> None:
    """All ranks name both steps in the next cast, which costs no collective more."""
    by_rank = run_ranks(kind, 3, lambda comm: left_out(comm, exchange))
    assert len(set(by_rank)) == 1
    message, calls = by_rank[0]
    assert "the same step, got steps {0: 2, 1: 3, 2: 2} by rank: a rank has skipped" in message
    assert calls == 1


@pytest.mark.parametrize("behind", [0, 3])
@on_ranks("in_process", 4)
def test_ranks_of_other_groups_hear_of_it(comm: Communicator, behind: int) -> None:
    """Ranks 0 and 1, 2 and 3, and all share a weight: whoever is behind, all raise, and cast once
    they are at one step.
    """
    plan = planned([comm.split(comm.rank // 2), comm])
    plan.step = 7 - (comm.rank == behind)
    message = message_of(RankMismatchError, plan.cast)
    assert f"{behind % 2}: 6" in message
    plan.step = 7
    plan.cast()
    plan.all_gather()
    assert plan.step == 8


@on_ranks("in_process", 2)
def test_functional_calls_have_no_step(comm: Communicator) -> None:
    """Ranks may have cast the same weights in other calls."""
    weight, master = zerocast.empty((24, 32), "nvfp4"), torch.ones(NUMEL // 2)
    arguments = [weight], [master], [NUMEL // 2 * comm.rank]
    for _ in range(comm.rank):
        zerocast.quantize_master_weights(
            [weight], [torch.ones(NUMEL)], [0], zerocast.comm.SingleRank()
        )
    for _ in range(2):
        zerocast.quantize_master_weights(*arguments, comm)


def test_what_is_raised_while_ranks_compare_reaches_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They hear who raised what, and in which collective they waited for it."""
    numbers = Verification._numbers

    def fail(self: Verification, comm: Communicator, *gathers: Any) -> list[int]:
        if comm.rank == 1:
            raise KeyboardInterrupt
        return numbers(self, comm, *gathers)

    monkeypatch.setattr(Verification, "_numbers", fail)

    @on_ranks("in_process", 3)
    def body(comm: Communicator) -> None:
        part = NUMEL // 3
        plan = CastPlan([zerocast.empty((24, 32), "nvfp4")], [torch.ones(part)],
                        [part * comm.rank], comm, verify="hash")  # fmt: skip
        plan.cast()
        if comm.rank != 1:
            text = message_of(PeerFailedError, plan.all_gather)
            assert "all_reduce" in text, text
            assert "KeyboardInterrupt" in text, text
        plan.all_gather()

    with pytest.raises((KeyboardInterrupt, PeerFailedError)):
        body()
