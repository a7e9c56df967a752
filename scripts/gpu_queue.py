"""What is to run on a GPU, in which order, and for how long: the stages of scripts/gpu_check.sh.

    gpu_queue.py plan DIRECTORY STAGE... [--again]      what is left to do, and how long it takes
    gpu_queue.py do DIRECTORY STAGE [--rehearse]        the rows of a stage of ROWS, by processes
    gpu_queue.py note DIRECTORY STAGE --ended RESULT SECONDS SUMMARY

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
from importlib.metadata import version
from itertools import accumulate, product
from pathlib import Path

from bench_rows import Result, Rows, supervise, told

RUN = 900
"""Seconds for which a GPU is had at a time."""

START = 15.0
"""Seconds until a process that does rows has imported torch and begun its first."""

TRAINED = (
    "nvfp4 weights eager", "bf16 weights eager", "fp8 products eager", "mxfp8 weights eager",
    "nvfp4 products eager", "fp8 products compiled", "bf16 weights compiled",
    "nvfp4 weights compiled", "mxfp8 products compiled", "torchao products compiled",
)  # fmt: skip
ALONE = ("nccl 1 nvfp4", "nccl 1 mxfp8", "fused 1 nvfp4", "graph 1 nvfp4", "checkpoint 1 nvfp4",
         "export 1 nvfp4")  # fmt: skip
ON_RANKS = ("gloo 2 nvfp4", "mpi 2 nvfp4", "gloo 4 fp8", "mpi 4 mxfp8")
METHODS = {"PTC": 5.0, "QAT": 20.0, "QAD": 25.0, "PTC-of-BF16": 5.0}
VARIANTS = dict.fromkeys(
    ("nvfp4_stochastic", "nvfp4_4over6", "nvfp4"), ("present", "staying", "ahead")
) | {"mxfp8": ("present", "staying", "scales")}
"""By recipe how its steps run: as they are; by thread blocks that stay; by those that fetch their
next tile, too; or as one pass that writes scales in place of amaxes.
"""

ROWS: dict[str, dict[str, float]] = {
    "train": {f"train {row}": 50.0 if "compiled" in row else 25.0 for row in TRAINED},
    "zero": {f"zero {row}": 15.0 for row in ALONE} | {f"zero {row}": 35.0 for row in ON_RANKS},
    "qat": {"qat start": 35.0, "qat BF16": 15.0}
    | {f"qat {way} {recipe}": METHODS[way] for recipe, way in product(("nvfp4", "mxfp4"), METHODS)},
    "kernels": {
        f"kernels {weights} {recipe} {variant}": 4.0
        for weights, (recipe, variants) in product(("llama", "narrow"), VARIANTS.items())
        for variant in variants
    },
}
"""By stage its rows, and the seconds that each is expected to take on an H200: guesses, until a
GPU has run them. Offload, which the queue is to have a stage for, does not exist.
"""

ORDER = {
    "compile": 20.0, "train": 0.0, "zero": 0.0, "qat": 0.0, "peers": 60.0, "kernels": 0.0,
    "smoke": 35.0, "tests": 130.0, "speed": 85.0, "sanitizers": 200.0, "counters": 100.0,
}  # fmt: skip
"""All stages, and the seconds of those without ROWS: a little more than an H200 took; of peers
without compiling TransformerEngine. The first minute answers the largest question: whether FSDP2
trains NVFP4 over NCCL.
"""

KINDS = {"speed": ("speed", "host"), "peers": ("peers", "others", "transformer_engine")}
"""By stage what the names of its rows begin with, where that is not the stage's name."""


def files(directory: Path) -> list[Rows]:
    """Return the rows of a directory."""
    return [Rows(directory / name) for name in ("rows.jsonl", "bench_cuda.jsonl")]


def limit(stage: str) -> float:
    """Return the seconds after which a row of ``stage`` counts as hung."""
    return 30 + 2 * max(ROWS[stage].values())


def estimate(stage: str, done: Collection[str] = ()) -> float:
    """Return the seconds that ``stage`` takes beside the rows and stages that are ``done``."""
    if f"stage {stage}" in done:
        return 0.0
    left = [seconds for row, seconds in ROWS.get(stage, {}).items() if row not in done]
    return ORDER[stage] + START * bool(left) + sum(left)


def runs(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return by stage the number of the run in which it ends, where one goes on in the next."""
    ends = accumulate(seconds.values())
    return {stage: 1 + int(end // RUN) for stage, end in zip(seconds, ends, strict=True)}


def plan(directory: Path, stages: Sequence[str]) -> str:
    """Return what is left to do of ``stages``, a line each, and the sum."""
    failed = {"ended": "FAILED"}.items()  # such a stage is run again
    done = {row for rows in files(directory) for row in rows.ended()
            if not failed <= rows.results().get(row, {}).items()}  # fmt: skip
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
    own = {f"stage {stage}" for stage in stages}
    for rows in files(directory):
        rows.forget(lambda row: row in own or row.split()[0] in kinds)


def seen(command: str, *, rehearsed: bool) -> Result:
    """Return when and on what a row was found, and by which command."""
    gpu = "no GPU: a rehearsal on an emulation"
    if not rehearsed and (tool := shutil.which("nvidia-smi")) is not None:
        asked = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
        gpu = done.stdout.split("\n")[0] or gpu
    at = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    return {"at": at, "on": gpu, "torch": version("torch"), "command": command}


def main(arguments: Sequence[str]) -> int:
    """Plan, do or note."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("plan", "do", "note"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("stages", nargs="+", choices=ORDER)
    parser.add_argument("--again", action="store_true", help="forget their rows")
    parser.add_argument("--rehearse", action="store_true", help="small, without a GPU")
    parser.add_argument("--ended", nargs=3, metavar=("RESULT", "SECONDS", "SUMMARY"))
    options = parser.parse_args(arguments)
    directory, stage = options.directory, options.stages[0]
    if options.part == "plan":
        if options.again:
            forget(directory, options.stages)
        print(plan(directory, options.stages))
        return 0
    where = seen(f"scripts/gpu_check.sh DIRECTORY {stage}", rehearsed=options.rehearse)
    if options.part == "note":
        result, seconds, summary = options.ended
        where |= {"ended": result, "summary": summary}
        files(directory)[0].note(f"stage {stage}", float(seconds), where)
        return 0
    worker = [sys.executable, str(Path(__file__).with_name("gpu_rows.py")), stage, str(directory)]
    worker += ["--seen", json.dumps(where), *(["--rehearse"] * options.rehearse)]
    rows = files(directory)[0]
    done = supervise(rows, worker, limit(stage))
    return 0 if told(rows, ROWS[stage].__contains__) and done else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
