"""The queue of scripts/gpu_check.sh, rehearsed on the CPU: what is planted in one row, or killed at
whatever moment, spoils no other; and what pages say of it.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import bench_cuda
import cuda_report
import gpu_queue
import gpu_rows
import pytest
import torch
from bench_rows import Rows, supervise, told
from gpu_model import ByteLlama

from tests.cuda_emulation.emulator import needs_emulation

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{SCRIPTS}", "PYTHON": sys.executable}
LONG = 500.0
"""Seconds after which a test has hung."""


def begin(stage: str, folder: Path) -> subprocess.Popen[bytes]:
    """A rehearsal of a stage, begun in a session of its own."""
    command = [sys.executable, str(SCRIPTS / "gpu_queue.py"), "do", str(folder), stage]
    command += ["--rehearse"]
    return subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, start_new_session=True)


def leave_out(folder: Path, *kinds: str) -> Rows:
    """Rows of which those of so many ranks, or of these kinds, are done."""
    rows = Rows(folder / "rows.jsonl")
    for row in gpu_queue.ROWS["zero"]:
        if any(f" {kind} " in row for kind in kinds):
            rows.note(row, 0.0, {"done": "before"})
    return rows


def assert_all_passed(rows: Rows, stage: str) -> None:
    """Every row of the stage has a result, and says when and on what it was found."""
    assert rows.failures() == {}
    results = rows.results()
    assert set(gpu_queue.ROWS[stage]) <= set(results)
    assert all({"seen", "done"} & result.keys() for result in results.values())


@needs_emulation
@pytest.mark.parametrize("stage", ["train", "qat"])
def test_a_rehearsal_of_every_stage(tmp_path: Path, stage: str) -> None:
    """Each row is trained and compared to its last line; those of the other stages below."""
    assert begin(stage, tmp_path).wait(LONG) == 0
    rows = Rows(tmp_path / "rows.jsonl")
    assert_all_passed(rows, stage)
    for row, result in rows.results().items():
        if (stage == "train" and "losses" in result) or row == "qat start":
            assert result["losses"][-1] < result["losses"][0], row
        if any(recipe in row for recipe in ("nvfp4", "mxfp", "fp8")):
            assert result["bytes_compared"] > 100_000, row


PLANTED = """
import sys, time
import gpu_rows, torch
def wrong(work):
    found = gpu_rows.equal
    def flipped(name, weight, master):
        weight.quantized_storage.buffers["rowwise_data"].view(-1)[5] ^= 16
        return found(name, weight, master)
    gpu_rows.equal = flipped
    return work()
def hang(work):
    time.sleep(600)
def exhausted(work):
    raise torch.OutOfMemoryError("Tried to allocate 80.00 GiB")
planted = {"zero nccl 1 nvfp4": wrong, "zero fused 1 nvfp4": hang, "zero graph 1 nvfp4": exhausted}
do = gpu_rows.do
def faulty(place, row, seen):
    work = lambda: do(place, row, seen)
    return planted[row](work) if row in planted else work()
gpu_rows.do = faulty
sys.exit(gpu_rows.main(sys.argv[1:]))
"""


@needs_emulation
def test_planted_faults_spoil_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A byte that differs, a row that hangs and an exhausted memory are told, and all other rows
    pass; done again, these three pass, and on two ranks, and nothing else is done.
    """
    rows = leave_out(tmp_path, "2", "4")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    worker = [sys.executable, "-c", PLANTED, "zero", str(tmp_path), "--rehearse"]
    assert supervise(rows, worker, 45.0)
    assert not told(rows, gpu_queue.ROWS["zero"].__contains__)
    failures, results = rows.failures(), rows.results()
    assert failures["zero nccl 1 nvfp4"].startswith(
        "AssertionError: WRONG beside this device: blocks.0.q.weight.rowwise_data[0, 5] is"
    ), failures
    assert failures["zero fused 1 nvfp4"] == "it did not end within 45 s"
    assert failures["zero graph 1 nvfp4"] == "OutOfMemoryError: Tried to allocate 80.00 GiB"
    assert len(failures) == 3
    assert set(failures) | set(results) == set(gpu_queue.ROWS["zero"])
    assert "7 passed, 3 failed" in capsys.readouterr().out
    rows.forget(lambda row: row in {*failures, "zero mpi 2 nvfp4"})
    before = rows.path.read_bytes()
    assert begin("zero", tmp_path).wait(LONG) == 0
    assert_all_passed(rows, "zero")
    assert rows.path.read_bytes().startswith(before)


@needs_emulation
def test_killed_at_random_moments_it_goes_on(tmp_path: Path) -> None:
    """Killed after a drawn number of bytes, a stage leaves whole rows, and goes on after them."""
    rows, draw = Rows(tmp_path / "rows.jsonl"), random.Random()
    process, until = begin("kernels", tmp_path), draw.randrange(1, 2000)
    end = time.monotonic() + LONG
    while rows.size < until and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    whole = [json.loads(line) for line in rows.path.read_text().split("\n")[:-1]]
    assert {line["row"] for line in whole} <= set(gpu_queue.ROWS["kernels"])
    found = rows.results()
    assert begin("kernels", tmp_path).wait(LONG) == 0
    assert_all_passed(rows, "kernels")
    assert found.items() <= rows.results().items()
    for row, result in rows.results().items():
        assert result["bytes"] == "equal"
        steps = result["steps"].values()
        assert steps, row
        assert all(step["seconds"] > 0 and step["of_copy"] >= 0 for step in steps), row


@needs_emulation
def test_a_variant_that_writes_other_bytes_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that leaves scales unwritten, say; its row names both hashes."""
    monkeypatch.setattr(gpu_rows, "writing_scales", lambda work, _: replace(work, steps={}))
    place = gpu_rows.Place(bench_cuda.emulation(), tmp_path, gpu_rows.SMALL, 4, 6)
    with pytest.raises(AssertionError, match=r"WRONG: the bytes have the hash \w+, not \w+;"):
        gpu_rows.kernels(place, "narrow", "mxfp8", "scales")


@pytest.mark.nightly
@needs_emulation
def test_ranks_that_share_the_device(tmp_path: Path) -> None:
    """Two and four ranks over gloo and MPI."""
    rows = leave_out(tmp_path, "1")
    assert begin("zero", tmp_path).wait(LONG) == 0
    assert_all_passed(rows, "zero")


# --- the plan ---


def test_the_queue_takes_two_runs() -> None:
    """By its own estimate, which holds for all stages that are recorded; the first minute trains
    NVFP4; every estimate is within the stage's limit.
    """
    seconds = {stage: gpu_queue.estimate(stage) for stage in gpu_queue.ORDER}
    assert max(gpu_queue.runs(seconds).values()) <= 2
    first = next(iter(gpu_queue.ROWS["train"].items()))
    assert "nvfp4" in first[0]
    assert seconds["compile"] + gpu_queue.START + first[1] <= 60
    recorded = {}
    for row in map(json.loads, (SCRIPTS / "results" / "rows_h200.jsonl").read_text().splitlines()):
        if "seconds" in row:
            recorded[row["row"].split()[1]] = row["seconds"]
    assert len(recorded) == 6
    for stage, took in recorded.items():
        assert took <= seconds[stage] <= 2.5 * took, stage
    text = (SCRIPTS / "gpu_check.sh").read_text()
    limits = {
        stage: int(s) for stage, s in re.findall(r"^#   (\w+) .* (\d+) s$", text, re.MULTILINE)
    }
    assert list(limits) == list(gpu_queue.ORDER)
    assert f"STAGES=({' '.join(gpu_queue.ORDER)})" in text
    assert all(seconds[stage] <= limits[stage] for stage in limits)


def test_the_model_is_as_large_as_is_said() -> None:
    """187 million parameters."""
    with torch.device("meta"):
        model = ByteLlama(**gpu_rows.SIZES)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 187


def test_the_plan_leaves_out_what_is_done(tmp_path: Path) -> None:
    """Rows that passed, and stages that ended well; --again does theirs anew."""
    rows = leave_out(tmp_path, "1", "2")
    for stage, result in (("smoke", "ok"), ("tests", "FAILED")):
        ended = ["--ended", result, "3", "5 passed"]
        gpu_queue.main(["note", str(tmp_path), stage, "--rehearse", *ended])
    lines = gpu_queue.plan(tmp_path, ["zero", "smoke", "tests"]).splitlines()
    assert lines == [
        "zero          85 s   run 1, 2 of 10 rows",
        "smoke          0 s   done",
        "tests        130 s   run 1",
        "in all       215 s, of 900 s a run",
    ]
    assert gpu_queue.main(["plan", str(tmp_path), "zero", "--again"]) == 0
    assert list(rows.results()) == ["stage smoke", "stage tests"]


# --- pages ---


def test_pages_say_what_is_recorded() -> None:
    """docs/cuda.md and README.md are those that scripts/results gives."""
    for page, text in cuda_report.pages(cuda_report.RECORDS).items():
        assert page.read_text() == text, "python scripts/cuda_report.py"


def test_a_row_of_a_gpu_changes_the_pages(tmp_path: Path) -> None:
    """One that passed is in the table and out of README's line of what was never tried; one of a
    rehearsal, or that failed, is not.
    """
    rows = Rows(tmp_path / "rows.jsonl")
    seen = gpu_queue.seen("a command", rehearsed=True)
    rows.note("train nvfp4 weights eager", 9.0, {"validation": 1.5, "seen": seen})
    assert rows.do({"zero nccl 1 nvfp4": lambda: 1 / 0}) is False
    line = cuda_report.never_tried(tmp_path)
    assert "FSDP2" in line
    assert "ZeroOptimizer" in line
    assert "| stage train | - | - | - | never tried |" in cuda_report.ran(tmp_path)
    assert "| zero nccl 1 nvfp4 | - | - | - | ZeroDivisionError" in cuda_report.ran(tmp_path)
    seen |= {"on": "NVIDIA H200, 580", "at": "2026-12-01 10:00", "torch": "2.13"}
    rows.note("train nvfp4 weights eager", 9.0, {"validation": 1.5, "seen": seen})
    row = "2026-12-01 10:00 | NVIDIA H200, 580, torch 2.13 | `a command` | validation 1.5 |"
    assert f"| train nvfp4 weights eager | {row}" in cuda_report.ran(tmp_path)
    assert "FSDP2" not in cuda_report.never_tried(tmp_path)
