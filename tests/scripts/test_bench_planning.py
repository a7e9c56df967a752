"""scripts/bench_planning.py: its simulated group answers what planning asks."""

import bench_planning
import pytest


@pytest.mark.parametrize("exchange", ["boundary", "full"])
def test_one_rank_of_many_makes_its_plan(monkeypatch: pytest.MonkeyPatch, exchange: str) -> None:
    """A plan is made where other ranks are simulated, fewer or more of them than weights; and an
    optimizer, whose weights are moved. Weights are so small that they take no time.
    """
    monkeypatch.setattr(bench_planning, "SIDE", 16)
    for weights, ranks in ((5, 2), (3, 64)):
        seconds, held, peak = bench_planning.plan(weights, ranks, exchange)
        assert seconds > 0 <= peak, held
    assert bench_planning.optimizer(3, 4) > 0
