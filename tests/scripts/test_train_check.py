"""The training check judges what it should, and goes on where an earlier call ended."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_check.py"

_spec = importlib.util.spec_from_file_location("train_check", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
train_check = importlib.util.module_from_spec(_spec)
sys.modules["train_check"] = train_check  # dataclasses look their module up
_spec.loader.exec_module(train_check)

Change = Callable[[Any, Any], Any]


def record_of_all(path: Path, change: Change | None = None) -> None:
    """As if all runs had been made: sound ones with a loss of 2.3, planted ones with 2.5 and wrong
    bytes; each passed through ``change``.
    """
    results = {}
    for job in train_check.all_jobs(train_check.RECIPES, train_check.MODES, [0, 1, 2]):
        result = train_check.Result(2.5 if job.planted else 2.3, not job.planted)
        results[job] = change(job, result) if change else result
    results = {job: result for job, result in results.items() if result is not None}
    train_check.write_record(path, {"steps": 200, "ranks": 2}, results)


def check(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a record, and let it train nothing."""
    return subprocess.run(
        [sys.executable, SCRIPT, "--record", path, "--seconds", "-1", *options],
        capture_output=True, text=True, timeout=60, check=False, cwd=path.parent,
    )  # fmt: skip


def test_a_complete_record_is_judged_without_training(tmp_path):
    """Every recipe in both modes has its claim, and all hold."""
    record_of_all(tmp_path / "record.json")
    finished = check(tmp_path / "record.json")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "nvfp4, autocast: within 6% of bf16" in finished.stdout
    assert "NO" not in finished.stdout
    for recipe in train_check.RECIPES:
        assert f"yes  {recipe}, weights: within 4% of bf16" in finished.stdout
        assert f"yes  {recipe}, autocast: within" in finished.stdout


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
def test_one_run_that_is_off_breaks_its_claim_and_no_other(tmp_path, job, result, broken):
    """A mean that is too large or too small, wrong bytes, a planted fault that is not noticed."""
    off = train_check.Job(*job)
    record_of_all(
        tmp_path / "record.json",
        lambda each, sound: train_check.Result(*result) if each == off else sound,
    )
    finished = check(tmp_path / "record.json")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("NO")]
    assert broken in line


def test_missing_runs_are_counted_and_others_are_kept(tmp_path):
    """Without two of its runs the check is no verdict: exit code 2, and it says how many."""
    path = tmp_path / "record.json"
    record_of_all(
        path, lambda job, sound: None if job.seed == 2 and job.recipe == "block" else sound
    )
    before = path.read_text()
    finished = check(path)
    assert finished.returncode == 2, finished.stdout + finished.stderr
    assert "2 of 59 runs are missing" in finished.stdout
    assert path.read_text() == before
    assert check(path, "--seeds", "0,1").returncode == 0


def test_a_record_of_other_settings_is_refused(tmp_path):
    """Losses after other numbers of steps are not to be compared."""
    record_of_all(tmp_path / "record.json")
    finished = check(tmp_path / "record.json", "--steps", "100")
    assert finished.returncode == 1
    assert "holds runs of" in finished.stderr
    assert "delete it" in finished.stderr


def test_a_launch_holds_runs_that_differ_in_the_recipe_only():
    """And no more than a few, so that a call ends in time."""
    jobs = list(train_check.all_jobs(train_check.RECIPES, train_check.MODES, [0, 1]))
    together = list(train_check.launches(jobs))
    assert [job for launch in together for job in launch] == jobs
    for launch in together:
        assert len(launch) <= train_check.TOGETHER
        assert len({(job.mode, job.seed, job.planted) for job in launch}) == 1
