"""What is to run on a GPU, in which order, and for how long: the stages of scripts/gpu_check.sh.

    gpu_queue.py plan DIRECTORY [--again] STAGE...      what is left to do, and how long it takes
    gpu_queue.py do STAGE DIRECTORY [--rehearse]        the rows of a stage of ROWS, by processes
    gpu_queue.py ended STAGE DIRECTORY RESULT SECONDS   notes how a stage of gpu_check.sh has ended

A GPU is had for a quarter of an hour at a time. So every row has an estimate, and the stages are in
the order of what is least known. Each row of ROWS runs in a process that is killed where it
hangs (bench_rows.py); gpu_rows.py says what a row is. This file imports no torch: a plan is there
at once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench_rows import Result, Rows, supervise

RUN = 900
"""Seconds for which a GPU is had at a time."""

START = 15.0
"""Seconds until a process that does rows has imported torch and begun its first."""

ROWS: dict[str, dict[str, float]] = {
    "train": {
        "train nvfp4 weights eager": 25, "train bf16 weights eager": 15,
        "train fp8 products eager": 20, "train mxfp8 weights eager": 25,
        "train nvfp4 products eager": 25, "train fp8 products compiled": 50,
        "train bf16 weights compiled": 45, "train nvfp4 weights compiled": 50,
        "train mxfp8 products compiled": 55, "train torchao products compiled": 50,
    },
    "zero": {
        "zero nccl 1 nvfp4": 15, "zero nccl 1 mxfp8": 15, "zero fused 1 nvfp4": 15,
        "zero graph 1 nvfp4": 15, "zero gloo 2 nvfp4": 30, "zero mpi 2 nvfp4": 30,
        "zero gloo 4 fp8": 35, "zero mpi 4 mxfp8": 40, "zero checkpoint 1 nvfp4": 15,
        "zero export 1 nvfp4": 15,
    },
    "qat": {
        "qat start": 35, "qat BF16": 15,
        **{f"qat {method} {recipe}": seconds for recipe in ("nvfp4", "mxfp4")
           for method, seconds in (("PTC", 5), ("QAT", 20), ("QAD", 25), ("PTC of BF16", 5))},
    },
    "kernels": {
        f"kernels {weights} {recipe}": 5.0
        for weights in ("llama", "narrow") for recipe in ("nvfp4_stochastic", "nvfp4_4over6",
                                                          "nvfp4", "mxfp8")
    },
}  # fmt: skip
"""By stage its rows, and the seconds that each is expected to take on an H200: guesses, until a
GPU has run them. Offload, which the queue is to have a stage for, does not exist.
"""

OTHERS: dict[str, float] = {
    "compile": 20, "peers": 60, "smoke": 35, "speed": 85, "tests": 130, "sanitizers": 200,
    "counters": 100,
}  # fmt: skip
"""The seconds of the other stages: a little more than an H200 took."""

ORDER = (
    "compile", "train", "zero", "qat", "peers", "kernels", "smoke", "tests", "speed",
    "sanitizers", "counters",
)  # fmt: skip
"""The first minute answers the largest question: whether FSDP2 trains NVFP4 over NCCL."""

KINDS = {"speed": ("speed", "host"), "peers": ("peers", "others", "transformer_engine")}
"""By stage what the names of its rows begin with, where that is not the stage's name."""

ROWS_OF = "rows.jsonl", "bench_cuda.jsonl"
"""The files of a directory that have rows."""


def limit(stage: str) -> float:
    """Return the seconds after which a row of ``stage`` counts as hung."""
    return 30 + 2 * max(ROWS[stage].values())


def estimate(stage: str, done: Collection[str] = ()) -> float:
    """Return the seconds that ``stage`` takes beside the rows and stages that are ``done``."""
    if f"stage {stage}" in done:
        return 0.0
    left = [seconds for row, seconds in ROWS.get(stage, {}).items() if row not in done]
    return OTHERS[stage] if stage not in ROWS else START * bool(left) + sum(left)


def runs(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return by stage the number of the run in which it ends, if one goes on in the next."""
    spent, found = 0.0, {}
    for stage, own in seconds.items():
        spent += own
        found[stage] = 1 + int(spent // RUN)
    return found


def ended(directory: Path) -> set[str]:
    """Return the rows that are not done again, and the stages that ended well."""
    rows = [Rows(directory / name) for name in ROWS_OF]
    again = {row for each in rows for row, found in each.results().items()
             if found.get("ended", "ok") != "ok"}  # fmt: skip
    return {row for each in rows for row in each.ended()} - again


def plan(directory: Path, stages: Sequence[str]) -> str:
    """Return what is left to do of ``stages``, a line each, and the sum."""
    done = ended(directory)
    seconds = {stage: estimate(stage, done) for stage in stages}
    lines = []
    for stage, run in runs(seconds).items():
        left = sum(row not in done for row in ROWS.get(stage, ()))
        rows = f", {left} of {len(ROWS[stage])} rows" if stage in ROWS else ""
        when = f"run {run}{rows}" if seconds[stage] else "done"
        lines.append(f"{stage:<12}{seconds[stage]:4.0f} s   {when}")
    return "\n".join([*lines, f"in all      {sum(seconds.values()):4.0f} s, of {RUN} s a run"])


def forget(directory: Path, stages: Sequence[str]) -> None:
    """Drop the rows of ``stages``, so that they are done again."""
    kinds = {kind for stage in stages for kind in KINDS.get(stage, (stage,))}
    for name in ROWS_OF:
        Rows(directory / name).forget(
            lambda row: row.split()[0] in kinds or row in {f"stage {stage}" for stage in stages}
        )


def seen(command: str, *, rehearsed: bool = False) -> Result:
    """Return when and on what a row was found, and by which command."""
    gpu = "no GPU: a rehearsal on an emulation"
    if not rehearsed and (tool := shutil.which("nvidia-smi")) is not None:
        asked = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
        gpu = done.stdout.split("\n")[0] or gpu
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    at = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    return {"at": at, "on": gpu, "torch": torch, "command": command}


def do(stage: str, directory: Path, command: Sequence[str]) -> int:
    """Let processes do the rows of a stage; say which failed."""
    rows = Rows(directory / "rows.jsonl")
    done = supervise(rows, command, limit(stage))
    results, failed = rows.results(), rows.failures()
    own = list(ROWS[stage])
    for row in own:
        if row in failed:
            print(f"FAILED {row}: {failed[row]}")
        elif "skipped" in results.get(row, {}):
            print(f"left out {row}: {results[row]['skipped']}")
    count = {"passed": results, "failed": failed}
    print(", ".join(f"{sum(row in of for row in own)} {name}" for name, of in count.items()))
    return 0 if done and not any(row in failed for row in own) else 1


def main(arguments: Sequence[str]) -> int:
    """Plan, do or note."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    planned, done, noted = (parts.add_parser(name) for name in ("plan", "do", "ended"))
    planned.add_argument("directory", type=Path)
    planned.add_argument("stages", nargs="+", choices=ORDER)
    planned.add_argument("--again", action="store_true", help="forget their rows")
    done.add_argument("stage", choices=ROWS)
    noted.add_argument("stage", choices=ORDER)
    for each in (done, noted):
        each.add_argument("directory", type=Path)
        each.add_argument("--rehearse", action="store_true", help="small, without a GPU")
    noted.add_argument("result")
    noted.add_argument("seconds", type=float)
    noted.add_argument("summary")
    options = parser.parse_args(arguments)
    if options.part == "plan":
        if options.again:
            forget(options.directory, options.stages)
        print(plan(options.directory, options.stages))
        return 0
    where = seen(f"scripts/gpu_check.sh DIRECTORY {options.stage}", rehearsed=options.rehearse)
    if options.part == "ended":
        where |= {"ended": options.result, "summary": options.summary}
        Rows(options.directory / "rows.jsonl").note(
            f"stage {options.stage}", options.seconds, where
        )
        return 0
    worker = [sys.executable, str(Path(__file__).with_name("gpu_rows.py")), options.stage]
    worker += [str(options.directory), "--seen", json.dumps(where)]
    return do(options.stage, options.directory, worker + ["--rehearse"] * options.rehearse)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
