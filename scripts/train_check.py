"""Does training with quantized tensors work, and would this script notice if it did not?

It trains the example (examples/train_gpt.py) on MPI ranks from several seeds: with BF16, and under
every recipe with quantized weights only and with quantized activations and gradients, too
(``--autocast``). It holds the mean validation losses to

    bf16                                           below 2.4 nats a byte
    every recipe                                   within 4 % of bf16
    nvfp4 with quantized activations, gradients    within 6 % of bf16

with every byte of every weight equal to the unsharded cast. Then it trains with a wrong scale
planted (scripts/with_wrong_scale.py): both tests must fail then.

    python scripts/train_check.py                                   # all of it
    python scripts/train_check.py --recipes nvfp4 --modes weights   # a part
    python scripts/train_check.py --seconds 300                     # begins nothing after that

What was run is recorded in ``--record`` and not run again, so the check can be made in pieces of a
few minutes. Exit code 0 where all of that holds, 1 where it does not, 2 where runs are missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "train_gpt.py"
PLANTED = ROOT / "scripts" / "with_wrong_scale.py"

RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8", "mxfp4", "nvfp4", "nvfp4-4over6")
MODES = ("weights", "autocast")
"""Weights only; activations and gradients, too."""

BF16_LIMIT = 2.4
"""Nats a byte."""

TOGETHER = 4
"""Recipes that one launch trains at most: starting the ranks takes long, and so does a launch."""


@dataclass(frozen=True)
class Job:
    """One training: ``mode`` is of :data:`MODES`."""

    recipe: str
    mode: str
    seed: int
    planted: bool = False

    @property
    def tolerance(self) -> float:
        """By how much of bf16's mean loss its own may differ."""
        return 0.06 if self.recipe.startswith("nvfp4") and self.mode == "autocast" else 0.04

    def __str__(self) -> str:
        planted = ", wrong scale" * self.planted
        return f"{self.recipe}, {self.mode}, seed {self.seed}{planted}"


@dataclass(frozen=True)
class Result:
    """What a training gave: a loss in nats a byte, and whether all weights were the unsharded
    cast.
    """

    validation_loss: float
    bytes_equal: bool


Results = dict[Job, Result]


# --- training ---


def all_jobs(recipes: Sequence[str], modes: Sequence[str], seeds: Sequence[int]) -> Iterator[Job]:
    """What is to be trained, seed by seed; with the fault last, weights only and from one seed."""
    for seed in seeds:
        yield Job("bf16", "weights", seed)
        for mode in modes:
            for recipe in recipes:
                yield Job(recipe, mode, seed)
    for recipe in recipes:
        yield Job(recipe, "weights", seeds[0], planted=True)


def launches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """``jobs`` that differ in nothing but the recipe, together."""
    for _, alike in groupby(jobs, key=lambda job: (job.mode, job.seed, job.planted)):
        group = list(alike)
        for first in range(0, len(group), TOGETHER):
            yield group[first : first + TOGETHER]


def run(jobs: Sequence[Job], steps: int, ranks: int, out: Path) -> Results:
    """Train the example, with ``jobs`` of one launch."""
    # The launcher of the MPI that this Python uses, before any other of the machine.
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise SystemExit("train_check.py needs mpiexec; pip install mpich brings it.")
    job = jobs[0]
    program = [str(PLANTED), str(EXAMPLE)] if job.planted else [str(EXAMPLE)]
    options = ["--compare", ",".join(job.recipe for job in jobs), "--seed", str(job.seed)]
    options += ["--steps", str(steps), "--check", "--out", str(out)]
    options += ["--autocast"] if job.mode == "autocast" else []
    finished = subprocess.run(
        [mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", *program, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if finished.returncode not in (0, 1):
        raise SystemExit(f"{job} ended with exit code {finished.returncode}:\n{finished.stderr}")
    trained = json.loads((out / "record.json").read_text())["runs"]
    return {
        job: Result(run["validation_loss"], run["verdict"][0])
        for job, run in zip(jobs, trained, strict=True)
    }


# --- the record ---


def read_record(path: Path, settings: dict[str, object]) -> Results:
    """The results of earlier calls.

    A record of other settings ends the script: its losses are not to be compared with these.
    """
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    if record["settings"] != settings:
        raise SystemExit(
            f"{path} holds runs of {record['settings']}, and these are of {settings}; delete it, "
            "or name another file with --record."
        )
    return {Job(**entry["job"]): Result(**entry["result"]) for entry in record["runs"]}


def write_record(path: Path, settings: dict[str, object], results: Results) -> None:
    """All results so far, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = [
        json.dumps({"job": asdict(job), "result": asdict(result)})
        for job, result in results.items()
    ]
    lines = ",\n  ".join(runs)
    path.write_text(f'{{\n "settings": {json.dumps(settings)},\n "runs": [\n  {lines}\n ]\n}}\n')


# --- judgement ---


def away_from_bf16(results: Results, recipe: str, mode: str, *, planted: bool = False) -> float:
    """How far the mean loss is from bf16's of the same seeds, as a share of that."""
    losses = {
        job.seed: result.validation_loss
        for job, result in results.items()
        if (job.recipe, job.mode, job.planted) == (recipe, mode, planted)
    }
    bf16 = [results[Job("bf16", "weights", seed)].validation_loss for seed in losses]
    return mean(losses.values()) / mean(bf16) - 1


def print_losses(results: Results) -> None:
    """A row for each recipe and mode: every seed's loss, the mean, how far it is from bf16's."""
    has_bf16 = any(job.recipe == "bf16" for job in results)
    rows: dict[tuple[str, str, bool], list[float]] = {}
    for job, result in results.items():
        rows.setdefault((job.recipe, job.mode, job.planted), []).append(result.validation_loss)
    print("\nvalidation loss, nats a byte; beside it how far from bf16's of the same seeds")
    for (recipe, mode, planted), losses in rows.items():
        seeds = "  ".join(f"{loss:.3f}" for loss in losses)
        what = "wrong scale planted" if planted else mode
        line = f"  {recipe:12}  {what:19}  {seeds:21}   mean {mean(losses):.3f}"
        if has_bf16:
            line += f"  {away_from_bf16(results, recipe, mode, planted=planted):+7.2%}"
        print(line)


def judge(results: Results) -> dict[str, bool]:
    """Every claim and whether it holds; ``results`` have bf16's."""
    bf16 = mean(r.validation_loss for job, r in results.items() if job.recipe == "bf16")

    def within(job: Job) -> bool:
        away = away_from_bf16(results, job.recipe, job.mode, planted=job.planted)
        return abs(away) < job.tolerance

    claims = {f"bf16 is below {BF16_LIMIT} nats a byte": bf16 < BF16_LIMIT}
    for job in results:
        if job.recipe != "bf16" and not job.planted:
            claims[f"{job.recipe}, {job.mode}: within {job.tolerance:.0%} of bf16"] = within(job)
    sound = [result for job, result in results.items() if not job.planted]
    claims["every byte of every weight is that of the unsharded cast"] = all(
        result.bytes_equal for result in sound
    )
    planted = {job: result for job, result in results.items() if job.planted}
    claims["with a wrong scale every recipe's loss leaves its bounds"] = not any(
        within(job) for job in planted
    )
    claims["with a wrong scale every comparison of bytes fails"] = not any(
        result.bytes_equal for result in planted.values()
    )
    return claims


def main() -> int:
    """Train what is not recorded yet, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=RECIPES)
    parser.add_argument("--modes", type=lambda text: text.split(","), default=MODES)
    parser.add_argument(
        "--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2]
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--record", type=Path, default=Path("runs/train_check/record.json"))
    arguments = parser.parse_args()

    settings: dict[str, object] = {"steps": arguments.steps, "ranks": arguments.ranks}
    recorded = read_record(arguments.record, settings)
    jobs = list(all_jobs(arguments.recipes, arguments.modes, arguments.seeds))
    start = time.perf_counter()
    for together in launches([job for job in jobs if job not in recorded]):
        if time.perf_counter() - start > arguments.seconds:
            break
        results = run(together, arguments.steps, arguments.ranks, Path("runs/train_check/latest"))
        recorded |= results
        write_record(arguments.record, settings, recorded)
        for job, result in results.items():
            print(f"{job}: {result}", flush=True)

    results = {job: recorded[job] for job in jobs if job in recorded}
    print_losses(results)
    if len(results) < len(jobs):
        print(f"\n{len(jobs) - len(results)} of {len(jobs)} runs are missing; call this again.")
        return 2
    print()
    claims = judge(results)
    for claim, holds in claims.items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
