"""scripts/gpu_check.sh and its rows, without a GPU: whatever is killed, crashes or hangs, what was
found before stands, and the rest goes on.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import bench_rows
import pytest

from tests.cuda_emulation.emulator import needs_emulation

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"

WORKER = """
import sys, time, os
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from bench_rows import Rows
def crash():
    os._exit(9)
def fail():
    raise RuntimeError("an illegal address")
def hang():
    time.sleep(600)
kinds = {"crash": crash, "fail": fail, "hang": hang}
names = sys.argv[3:]
works = {name: kinds.get(name, lambda: {"value": "x" * 4000}) for name in names}
sys.exit(0 if Rows(Path(sys.argv[2])).do(works) else 1)
"""


def worker(path: Path, *names: str) -> list[str]:
    """The command of a process that does these rows."""
    return [sys.executable, "-c", WORKER, str(SCRIPTS), str(path), *names]


def test_a_row_that_fails_spoils_no_other(tmp_path: Path) -> None:
    """One that raises, one that takes the process down and one that never ends are named with the
    reason, and all others are done, once.
    """
    rows = bench_rows.Rows(tmp_path / "deep" / "rows.jsonl")
    names = ["a", "crash", "b", "fail", "hang", "c"]
    assert bench_rows.supervise(rows, worker(rows.path, *names), limit=1.0)
    assert list(rows.results()) == ["a", "b", "c"]
    assert rows.failures() == {
        "crash": "the process ended in it, twice",
        "fail": "RuntimeError: an illegal address",
        "hang": "it did not end within 1 s",
    }
    size = rows.size
    assert bench_rows.supervise(rows, worker(rows.path, *names), limit=1.0)
    assert rows.size == size


def test_a_command_that_does_no_row_is_not_repeated(tmp_path: Path) -> None:
    """Where it cannot start, it is tried once."""
    rows = bench_rows.Rows(tmp_path / "rows.jsonl")
    assert not bench_rows.supervise(rows, [sys.executable, "-c", "import nowhere"], limit=9.0)


def test_rows_of_a_killed_process_are_whole(tmp_path: Path) -> None:
    """Killed at whatever moment, it leaves lines of JSON, of which the last may be cut, and the
    next one goes on after the whole ones.
    """
    rows = bench_rows.Rows(tmp_path / "rows.jsonl")
    names = [f"row {i}" for i in range(20_000)]
    for written in (1, 10_000, 1_000_000):
        process = subprocess.Popen(worker(rows.path, *names))
        while rows.size < written:
            time.sleep(0.001)
        process.kill()
        process.wait()
        *lines, _ = rows.path.read_text().split("\n")
        assert {json.loads(line)["row"] for line in lines} <= set(names)
    ended = [line["row"] for line in map(json.loads, lines) if "began" not in line]
    assert len(ended) == len(set(ended))
    assert names[: len(ended)] == ended


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    """When rows are read, and when they are done again."""
    rows = bench_rows.Rows(tmp_path / "rows.jsonl")
    assert rows.do({"a": lambda: {"value": 1}})
    whole = rows.path.read_text()
    with rows.path.open("a") as file:
        file.write('{"row": "b", "seconds": 0.0, "result": {"val')
    assert list(rows.results()) == ["a"]
    assert rows.do({"a": lambda: {"value": 2}, "b": lambda: {"value": 3}})
    assert rows.results() == {"a": {"value": 1}, "b": {"value": 3}}
    assert rows.path.read_text().startswith(whole)
    assert not rows.failures()


def rehearse(folder: Path, *stages: str) -> subprocess.Popen[bytes]:
    """The script, begun in a session of its own."""
    return subprocess.Popen(
        ["bash", str(SCRIPTS / "gpu_check.sh"), "--rehearse", str(folder), *stages],
        env={**os.environ, "PYTHON": sys.executable},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )


def kill(script: subprocess.Popen[bytes]) -> None:
    """Kill the script and all that it started; ``timeout`` makes groups of processes of its own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            session = int(stat.read_text().rpartition(")")[2].split()[3])
            if session == script.pid:
                os.kill(int(stat.parent.name), signal.SIGKILL)
    script.wait()


TOOL = """#!/bin/bash
case "$*" in
    --help) echo "  {option} arg   which kernels" ;;
    *initcheck*)
        [[ "$*" != *kns=* ]] || exit 3
        for kernel in {kernels}; do
            printf '========= Uninitialized __global__ memory read of size 8 bytes\n'
            printf '=========     at void %s+0xe0\n' "$kernel"
        done ;;
    *racecheck*{hangs}*) exit 124 ;;
    *) [[ "$*" == *"{option} kns=zerocast"* ]] || exit 3 ;;
esac
"""


@pytest.mark.parametrize(
    ("option", "kernels", "hangs", "result"),
    [
        ("--kernel-name", "'at::copy<float>'", "none", "| sanitizers | ok |"),
        ("--kernel-regex", "'at::copy<float>'", "none", "| sanitizers | ok |"),
        ("--kernel-regex", "'partial_amax<zerocast::scalar::Tile>' 'at::copy<float>'", "none",
         "1 errors of zerocast's kernels"),
        ("--kernel-name", "'at::copy<float>'", "alone\\[device-block",
         "unfinished after 30 s: racecheck of test_sanitized_alone[device-block]"),
    ],
    ids=["clean", "clean by regex", "a read by our kernel", "a hang"],
)  # fmt: skip
def test_what_sanitizers_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, kernels: str, hangs: str,
    result: str,
) -> None:  # fmt: skip
    """With a tool that reports what it is told: other kernels' reads do not count, and what did not
    end is named; the filter has the name that the tool knows.
    """
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(TOOL.format(option=option, kernels=kernels, hangs=hangs))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    failed = rehearse(tmp_path, "sanitizers").wait()
    page, log = (tmp_path / name for name in ("gpu_check.md", "sanitizers.log"))
    assert result in page.read_text() + log.read_text()
    assert bool(failed) == ("ok" not in result)
    assert log.read_text().count("--tool racecheck") == 7


@needs_emulation
def test_a_rehearsal_that_is_killed_goes_on(tmp_path: Path) -> None:
    """Killed in the middle of the table, the script leaves whole rows; run again, it does the
    others and writes the page, and what it had found is not measured again.
    """
    rows = bench_rows.Rows(tmp_path / "bench_cuda.jsonl")
    process = rehearse(tmp_path, "speed")
    while rows.size == 0 and process.poll() is None:
        time.sleep(0.01)
    kill(process)
    before = rows.path.read_bytes()
    assert before.endswith(b"\n")
    rehearse(tmp_path, "speed").wait()
    assert rows.path.read_bytes().startswith(before)
    assert len(rows.results()) + len(rows.failures()) == 4
    assert "| llama | nvfp4 | 64 | cast |" in (tmp_path / "bench_cuda.md").read_text()
    assert "| speed | " in (tmp_path / "gpu_check.md").read_text()


@pytest.mark.nightly
@needs_emulation
def test_a_rehearsal_killed_at_every_second(tmp_path: Path) -> None:
    """Whatever stage it is in, the rows are whole, and calls enough end it."""
    names = ("rows.jsonl", "bench_cuda.jsonl")
    stages = ("compile", "kernels", "smoke", "speed", "counters", "peers")
    for second in range(1, 20):
        process = rehearse(tmp_path, *stages)
        time.sleep(second)
        kill(process)
        for name in names:
            file = tmp_path / name
            lines = file.read_text().splitlines() if file.exists() else []
            assert all("row" in json.loads(line) for line in lines)
    rehearse(tmp_path, *stages).wait()
    ended = sum(len(rows.results()) + len(rows.failures())
                for rows in (bench_rows.Rows(tmp_path / name) for name in names))  # fmt: skip
    own = 1 + 24 + 2 + 4 + 4  # compile, kernels, smoke, speed, peers
    assert ended == own + len(stages)
