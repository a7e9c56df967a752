"""Plays steps of plans and optimizers on simulated ranks, a schedule and a fault for each seed.

    python scripts/simulate.py                      # 10,000 seeds
    python scripts/simulate.py --seeds 17 18        # one, to see what it does

What is drawn and what must hold is said in tests/support/simulation.py. A seed that fails is
named, with its scenario, and gives the same run again.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.simulation import failure


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10_000), help="from, to")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    drawn = Counter[str]()
    with ProcessPoolExecutor(args.processes, None, torch.set_num_threads, (1,)) as pool:
        for what, wrong in pool.map(failure, range(*args.seeds), chunksize=25):
            drawn[what] += 1
            print(wrong, end="\n" if wrong else "", flush=True)
    print(*(f"{what:40}{count:8,}" for what, count in sorted(drawn.items())), sep="\n")
    print(f"{drawn.total():,} seeds, {drawn['failed']} failed")
    sys.exit(drawn["failed"] > 0)


if __name__ == "__main__":
    main()
