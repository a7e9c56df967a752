"""Plays steps of plans and optimizers on simulated ranks, a schedule and a fault for each seed.

    python scripts/simulate.py                      # 10,000 seeds
    python scripts/simulate.py --seeds 17 18        # one, to see what it does

What is drawn and what must hold is said in tests/support/simulated_steps.py. A seed that fails is
named, with its scenario, and gives the same run again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.simulated_steps import failure

CHUNK = 25
"""Seeds that a process plays at once."""


def played(first: int, end: int) -> tuple[Counter[str], list[str]]:
    """How often each fault and driver was drawn among these seeds, and what did not hold."""
    torch.set_num_threads(1)
    drawn: Counter[str] = Counter()
    wrong = []
    for seed in range(first, end):
        scenario, text = failure(seed)
        drawn[f"{scenario.drives}, {scenario.fault}"] += 1
        wrong += [text] * bool(text)
    return drawn, wrong


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10_000), help="from, to")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    started, drawn, failed = time.monotonic(), Counter[str](), 0
    with ProcessPoolExecutor(args.processes) as pool:
        starts = range(*args.seeds, CHUNK)
        ends = [min(start + CHUNK, args.seeds[1]) for start in starts]
        for counts, wrong in pool.map(played, starts, ends):
            drawn += counts
            failed += len(wrong)
            print(*wrong, sep="\n", end="\n" if wrong else "", flush=True)
    for what, count in sorted(drawn.items()):
        print(f"{what:30}{count:8,}")
    seconds = time.monotonic() - started
    print(f"{sum(drawn.values()):,} seeds in {seconds:.0f} s, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
