"""Steps that cast bucket by bucket, and gather each bucket while the next are cast."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import pytest

from tests.optim.overlapping import (
    EACH_ITS_OWN,
    SOME_TOGETHER,
    Model,
    backward,
    optimizer_of,
    trained,
    trained_alone,
)
from tests.support.claims import assert_same_tensors
from tests.support.late_gathers import GathersLate, GathersShuffled, GathersSlowly
from tests.support.recipes import RECIPES
from zerocast.comm import RecordingCommunicator, SingleRank, run_in_process
from zerocast.tensors.cast_steps import CastSteps


@pytest.mark.parametrize(
    ("recipe", "size", "bucket_size", "overlap_all_gather"),
    [*zip(RECIPES, cycle((3, 2, 5)), cycle((EACH_ITS_OWN, SOME_TOGETHER)), cycle((True, False)))],
)
def test_the_bytes_are_those_of_one_cast(recipe, size, bucket_size, overlap_all_gather):
    """After three steps every byte of every weight is that of one rank that casts all at once,
    where a gather takes what has arrived before its wait to be spoilt, and where it is written.
    """
    options = {"bucket_size": bucket_size, "overlap_all_gather": overlap_all_gather}
    expected = trained_alone(recipe)
    for found in run_in_process(
        size, lambda comm: trained(GathersLate(comm), recipe, overlap_cast=True, **options)
    ):
        assert_same_tensors(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_gathers_may_arrive_in_any_order(seed):
    """Buckets that arrive in another order than they were cast in give the same bytes."""
    expected = trained_alone("nvfp4")
    options = {"overlap_cast": True, "overlap_all_gather": False, "bucket_size": EACH_ITS_OWN}
    for found in run_in_process(
        3, lambda comm: trained(GathersShuffled(comm, seed), "nvfp4", **options)
    ):
        assert_same_tensors(found, expected)


def traffic(overlap_cast: bool) -> dict[tuple[str, str], int]:
    """The collectives of one step, by phase and kind."""
    spy = RecordingCommunicator(SingleRank())
    model = Model("nvfp4")
    optimizer = optimizer_of(model, spy, overlap_all_gather=False, overlap_cast=overlap_cast)
    backward(model, 0)
    spy.traffic.clear()
    optimizer.step()
    return {kind: counted.calls for (_, kind), counted in spy.traffic.items()}


def test_the_collectives_are_the_same():
    """One exchange of amaxes and one of scales for all weights, and a gather for each bucket."""
    assert traffic(overlap_cast=True) == traffic(overlap_cast=False)


def test_most_of_what_can_be_hidden_is(monkeypatch):
    """Where casting a bucket takes as long as sending one, a step hides at least 70 % of its casts:
    the first while plain weights travel, and each other one while the bucket before it does.
    """
    seconds, real = 0.05, CastSteps.run_stage

    def slow(self: CastSteps, stage: int) -> None:
        time.sleep(seconds)
        real(self, stage)

    monkeypatch.setattr(CastSteps, "run_stage", slow)
    model, took = Model("nvfp4"), list[float]()
    optimizer = optimizer_of(
        model, GathersSlowly(SingleRank(), seconds), overlap_all_gather=False, overlap_cast=True
    )
    buckets = [bucket.kind.is_codes for bucket in optimizer._shards.buckets]

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if name == "cast_and_all_gather":
            took.append(time.perf_counter() - start)

    optimizer.on_phase = timed
    for step in range(4):
        backward(model, step)
        optimizer.step()
    apart = seconds * (sum(buckets) + len(buckets))  # casts, then gathers
    assert apart - min(took) >= 0.7 * seconds * sum(buckets)
