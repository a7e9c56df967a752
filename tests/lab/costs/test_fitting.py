"""Costs that are fitted to a machine, and the errors that are printed of them."""

from pathlib import Path

import pytest

from zerocast.cli import main
from zerocast.errors import InputError
from zerocast.lab import costs
from zerocast.lab.costs import fitting
from zerocast.lab.costs.estimation import PHASE_OF
from zerocast.lab.costs.machine import Cost, messages


def test_points_on_a_line_give_its_cost() -> None:
    """Messages of 3 us and bytes at 2 GB/s; without one of the two, the other alone; and 0 seconds
    rather than fewer.
    """
    line = Cost(3e-6, 2e9)
    points = [(m, n, line.of(n, m)) for m, n in ((1, 0), (3, 1000), (1, 10**6), (7, 10**9))]
    found = fitting.cost_of(points)
    assert (found.seconds, found.rate) == (pytest.approx(3e-6), pytest.approx(2e9))
    assert fitting.cost_of([(1, 0, 5e-6)] * 3).seconds == pytest.approx(5e-6)
    rising = fitting.cost_of([(1, 100, 1e-6), (1, 1000, 2e-5)])
    assert rising.seconds == 0
    assert rising.rate > 0


def test_messages_that_follow_each_other() -> None:
    """A tree for reductions and gathers, a message to every peer of an all-to-all."""
    assert [messages("all_gather", size) for size in (1, 2, 3, 8, 9)] == [0, 1, 2, 3, 4]
    assert [messages("all_reduce", size) for size in (1, 2, 1024)] == [0, 2, 20]
    assert [messages("all_to_all", size) for size in (1, 2, 1024)] == [0, 1, 1023]


def test_fit_prints_its_error_and_estimate_reads_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every phase of a step is measured and estimated, and all together; the file gives estimates
    their seconds.
    """
    monkeypatch.setattr(fitting, "FITTED", [[(32, 32)], [(64, 64)] * 2])
    monkeypatch.setattr(fitting, "CHECKED", [(48, 48)])
    monkeypatch.setattr(fitting, "SIZES", [256, 4096])
    path = tmp_path / "machine.json"
    assert main(["fit", str(path), "--recipe", "nvfp4"]) == 0
    printed = capsys.readouterr().out
    for phase in (*PHASE_OF.values(), "partial_cast", "post_all_gather_processing"):
        assert f"| {phase} " in printed or phase == "reduce_candidates"
    assert "**together**" in printed
    machine = costs.Machine.load(path)
    assert machine.collectives.keys() == {"all_reduce", "all_gather", "all_to_all"}
    assert all(seconds >= 0 for seconds in _small_step().seconds(machine).values())
    with pytest.raises(InputError, match="a machine must be one of h100"):
        costs.Machine.load(tmp_path)


def _small_step() -> costs.Estimate:
    model = costs.model_of("llama-8b")
    return costs.estimate(costs.params_of(model)[:3], dp=4)
