"""The training check judges what it should, and goes on where an earlier call ended."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import train_check

Change = Callable[[Any, Any], Any]


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """``check(change, *options)`` -> exit code and output of the script, which trains nothing, on a
    record of all runs: sound ones with a loss of 2.3, planted ones with 2.5 and wrong bytes; each
    passed through ``change``, and left out where that gives None.
    """

    def checked(change: Change | None = None, *options: str) -> tuple[int, str]:
        results = {}
        for job in train_check.all_jobs(train_check.RECIPES, train_check.MODES, [0, 1, 2]):
            result = train_check.Result(2.5 if job.planted else 2.3, not job.planted)
            result = change(job, result) if change else result
            results |= {job: result} if result else {}
        path = Path(tmp_path / "record.json")
        train_check.write_record(path, {"steps": 200, "ranks": 2}, results)
        before = path.read_text()
        arguments = ["--record", str(path), "--seconds", "-1", *options]
        monkeypatch.setattr("sys.argv", ["train_check.py", *arguments])
        code = train_check.main()
        assert path.read_text() == before
        return code, capsys.readouterr().out

    return checked


def test_a_complete_record_is_judged_without_training(check):
    """Every recipe in both modes has its claim, and all hold."""
    code, said = check()
    assert code == 0, said
    assert "nvfp4, autocast: within 6% of bf16" in said
    assert "NO" not in said
    for recipe in train_check.RECIPES:
        assert f"yes  {recipe}, weights: within 4% of bf16" in said
        assert f"yes  {recipe}, autocast: within" in said


@pytest.mark.parametrize(
    ("job", "result", "broken"),
    [
        (("mxfp8", "autocast", 1), (2.7, True), "mxfp8, autocast: within 4% of bf16"),
        (("mxfp8", "weights", 1), (1.9, True), "mxfp8, weights: within 4% of bf16"),
        (("nvfp4-4over6", "autocast", 0), (2.8, True), "nvfp4-4over6, autocast: within 6% of"),
        (("block", "weights", 2), (2.3, False), "every byte of every weight"),
        (("delayed", "weights", 0, True), (2.31, False), "every recipe's loss leaves its bounds"),
        (("delayed", "weights", 0, True), (2.5, True), "every comparison of bytes fails"),
    ],
)
def test_one_run_that_is_off_breaks_its_claim_and_no_other(check, job, result, broken):
    """A mean that is too large or too small, wrong bytes, a planted fault that is not noticed."""
    off, wrong = train_check.Job(*job), train_check.Result(*result)
    code, said = check(lambda each, sound: wrong if each == off else sound)
    (line,) = [line for line in said.splitlines() if line.startswith("NO")]
    assert (code, broken in line) == (1, True), said


def test_missing_runs_are_counted_and_others_are_kept(check):
    """Without two of its runs the check is no verdict: exit code 2, and it says how many."""

    def some(job, sound):
        return None if job.seed == 2 and job.recipe == "block" else sound

    code, said = check(some)
    assert (code, "2 of 59 runs are missing" in said) == (2, True), said
    assert check(some, "--seeds", "0,1")[0] == 0


def test_a_record_of_other_settings_is_refused(check):
    """Losses after other numbers of steps are not to be compared."""
    with pytest.raises(SystemExit, match=r"(?s)holds runs of.*delete it"):
        check(None, "--steps", "100")


def test_a_launch_holds_runs_that_differ_in_the_recipe_only():
    """And no more than a few, so that a call ends in time."""
    jobs = list(train_check.all_jobs(train_check.RECIPES, train_check.MODES, [0, 1]))
    together = list(train_check.launches(jobs))
    assert [job for launch in together for job in launch] == jobs
    for launch in together:
        assert len(launch) <= train_check.TOGETHER
        assert len({(job.mode, job.seed, job.planted) for job in launch}) == 1
