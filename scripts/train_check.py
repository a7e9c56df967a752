"""Does training with quantized weights work, and would this script notice if it did not?

It trains the example (examples/train_gpt.py) with bf16, current and nvfp4 weights from several
seeds on 4 MPI ranks, and holds the mean validation losses to

    bf16     below 2.4 nats a byte
    current  within 2 % of bf16
    nvfp4    within 4 % of bf16

with every byte of every weight equal to the unsharded cast. Then it trains with a wrong scale
planted (scripts/with_wrong_scale.py): both tests must fail then. Exit code 0 if all of that holds.
Takes about 8 minutes on 2 idle cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "train_gpt.py"
PLANTED = ROOT / "scripts" / "with_wrong_scale.py"

BF16_LIMIT = 2.4
"""Nats a byte."""

TOLERANCE = {"current": 0.02, "nvfp4": 0.04}
"""By how much of bf16's loss a mean loss may be larger."""


def run_example(
    recipes: list[str], seed: int, steps: int, out: Path, *, planted: bool
) -> tuple[dict[str, float], bool]:
    """Validation losses by recipe, and whether all weights were the unsharded cast."""
    # The launcher of the MPI that this Python uses, before any other of the machine.
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise SystemExit("train_check.py needs mpiexec; pip install mpich brings it.")
    program = [str(PLANTED), str(EXAMPLE)] if planted else [str(EXAMPLE)]
    options = ["--compare", ",".join(recipes), "--seed", str(seed), "--steps", str(steps)]
    finished = subprocess.run(
        [mpiexec, "-n", "4", sys.executable, *program, *options, "--check", "--out", str(out)],
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if finished.returncode not in (0, 1):
        raise SystemExit(f"the example ended with exit code {finished.returncode}")
    runs = json.loads((out / "record.json").read_text())["runs"]
    return {run["recipe"]: run["validation_loss"] for run in runs}, finished.returncode == 0


def judge(losses: dict[str, list[float]], bf16: float) -> dict[str, bool]:
    """By recipe, whether its mean loss is where it should be; ``bf16`` is what to compare with."""
    verdicts = {}
    for recipe, values in losses.items():
        limit = BF16_LIMIT if recipe == "bf16" else bf16 * (1 + TOLERANCE[recipe])
        verdicts[recipe] = mean(values) < limit
    return verdicts


def print_losses(title: str, losses: dict[str, list[float]], bf16: float) -> None:
    """A row for each recipe: every seed's loss, the mean, and how far it is from bf16's."""
    print(f"\n{title}: validation loss, nats a byte")
    for recipe, values in losses.items():
        seeds = "  ".join(f"{value:.3f}" for value in values)
        print(f"  {recipe:>5}  {seeds}   mean {mean(values):.3f}  {mean(values) / bf16 - 1:+7.2%}")


def main() -> int:
    """Train, compare, plant, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/train_check"))
    arguments = parser.parse_args()

    sound: dict[str, list[float]] = {"bf16": [], "current": [], "nvfp4": []}
    bytes_equal = True
    for seed in range(arguments.seeds):
        out = arguments.out / f"seed{seed}"
        losses, equal = run_example([*sound], seed, arguments.steps, out, planted=False)
        bytes_equal &= equal
        for recipe, loss in losses.items():
            sound[recipe].append(loss)
    bf16 = mean(sound["bf16"])
    print_losses("As it is", sound, bf16)

    out = arguments.out / "planted"
    losses, planted_equal = run_example([*TOLERANCE], 0, arguments.steps, out, planted=True)
    planted = {recipe: [loss] for recipe, loss in losses.items()}
    print_losses("With a wrong scale planted", planted, bf16)

    claims = {
        f"bf16 is below {BF16_LIMIT} nats a byte": judge(sound, bf16)["bf16"],
        "current is within 2 % of bf16": judge(sound, bf16)["current"],
        "nvfp4 is within 4 % of bf16": judge(sound, bf16)["nvfp4"],
        "every byte of every weight is that of the unsharded cast": bytes_equal,
        "with a wrong scale the losses leave their bounds": not any(judge(planted, bf16).values()),
        "with a wrong scale the comparison of bytes fails": not planted_equal,
    }
    print()
    for claim, holds in claims.items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
