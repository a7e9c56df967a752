"""scripts/bench_planning.py: its simulated group answers what planning asks."""

from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with weights so small that they take no time."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_planning

    monkeypatch.setattr(bench_planning, "SIDE", 16)
    return bench_planning


@pytest.mark.parametrize("exchange", ["boundary", "full"])
def test_one_rank_of_many_makes_its_plan(bench: ModuleType, exchange: str) -> None:
    """A plan is made where other ranks are simulated, fewer or more of them than weights."""
    for weights, ranks in ((5, 2), (3, 64)):
        seconds, held, peak = bench.plan(weights, ranks, exchange)
        assert seconds > 0 <= peak, held


def test_one_rank_of_many_makes_its_optimizer(bench: ModuleType) -> None:
    """The same of an optimizer, whose weights are moved."""
    assert bench.optimizer(3, 4) > 0
