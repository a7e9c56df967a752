"""Plants faults on one of four ranks, on every communicator and in every phase of a step.

A cell of the table is good where every rank that lives ends with an error in time, nothing that was
half written can be read, and the step, repeated by the processes that live with a new group from
the last checkpoint, gives the bytes of the run without a fault. What one rank may do otherwise than
the others is good where no rank has an error, and all have the same bytes.

    scripts/fault_matrix.sh [--only PATTERN] [--communicators threads gloo mpi] [--out FILE]
                            [--patience SECONDS]

The faults are in fault_cells.py, and how they are run in fault_transports.py. What does not end
within ``--patience`` seconds is ended and called a hang: programs start slowly beside others.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import signal
import sys
import warnings
from pathlib import Path

import torch
from fault_cells import (
    ALL_EXIT,
    CELLS,
    FAULTY,
    HARMLESS,
    NOT_GATHERED,
    OF_GLOO,
    PLANNED,
    RANKS,
    STEPS,
    STEPS_OF,
    TIMEOUT,
    Run,
    ends,
)
from fault_transports import TRANSPORTS, Outcome, mpi_rank, run

import zerocast
from zerocast.comm import SingleRank

NAMED = r"\bevery rank\b|\branks?(?: \d+,)* {}\b|owned by no rank"
"""What an error says of the rank that is at fault."""

GOOD = ("error on all living ranks, nothing lost", "no error", "MPI ended")


def without_fault() -> list[str | None]:
    """The digests of the weights before a step and after each, on one rank."""
    alone = Run(SingleRank())
    digests = [alone.digest()]
    for number in range(STEPS + 1):
        alone.step(number)
        digests.append(alone.digest())
    for value in 0.0, 1.0:  # before and after the casts of plans
        whole = torch.full((32, 32), value)
        alone.params = [zerocast.quantize(whole, r, dtype=torch.bfloat16) for r in PLANNED]
        digests.append(alone.digest())
    return digests


def judged(cell: str, outcome: Outcome, whole: list[str | None]) -> str:
    """What is written into the table."""
    saws = outcome.saws
    if cell == ALL_EXIT:
        by_itself = outcome.in_time and not outcome.failed and not saws
        return "no error, all processes ended by themselves" if by_itself else f"BAD: {outcome}"
    living = [rank for rank in range(RANKS) if not (ends(cell) and rank == FAULTY)]
    missing = [rank for rank in living if rank not in saws]
    if missing:
        is_ended = outcome.job and ends(cell)
        return outcome.job if is_ended else f"HANG or death of ranks {missing}"
    problems = [] if outcome.in_time else ["a process did not end"]
    if cell in HARMLESS:
        digests = {saws[rank]["digest"] for rank in living}
        is_same = digests == {whole[STEPS_OF[cell]]} if cell in STEPS_OF else len(digests) == 1
        problems += [f"rank {r} raised {saws[r]['error']}: {saws[r]['text']}"
                     for r in living if saws[r]["error"]]  # fmt: skip
        if None in digests or not is_same:
            problems.append("ranks hold other bytes")
        return "; ".join(problems) or "no error, the same bytes on all ranks"
    at_fault = 0 if cell.startswith("signalled") else FAULTY
    for rank in living:
        saw = saws[rank]
        is_own, is_told = rank in (FAULTY, at_fault), re.search(NAMED.format(at_fault), saw["text"])
        returned = rank == FAULTY and cell.startswith("step: skipped")
        returned |= rank != FAULTY and cell.startswith("step: one more")  # all steps were made
        if saw["error"] is None and not returned:
            problems.append(f"rank {rank} has no error")
        elif saw["error"] and not saw["ours"] and not is_own and not cell.startswith(OF_GLOO):
            problems.append(f"rank {rank} raised {saw['error']}")
        elif saw["error"] and saw["ours"] and not is_own and not is_told:
            problems.append(f"rank {rank} is not told of rank {at_fault}: {saw['text']}")
        if saw["digest"] not in (None, *whole) and cell not in NOT_GATHERED:
            problems.append(f"rank {rank} can read weights of two steps")
        if not ends(cell) and saw.get("again") != whole[2]:
            problems.append(f"rank {rank} cannot repeat the step")
    slowest = max(saws[rank]["seconds"] for rank in living)
    if slowest > TIMEOUT + 3:
        problems.append("late")
    kinds = "/".join(sorted({str(saws[r]["error"]) for r in living if saws[r]["ours"]}))
    said = "; ".join(problems) or "error on all living ranks, nothing lost"
    return f"{said}, in {slowest:.1f} s ({kinds})"


def main() -> None:
    """Print the table; the exit status says whether a cell is bad."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of the cells' names")
    parser.add_argument("--communicators", nargs="+", default=TRANSPORTS)
    parser.add_argument("--out", type=Path, help="where the table is written, too")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for a cell")
    parser.add_argument("--mpi-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("cells", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    torch.set_num_threads(1)
    if args.mpi_rank is not None:
        mpi_rank(args.cells, args.mpi_rank)
        return
    whole, lines, bad = without_fault(), [], 0
    cells = [cell for cell in CELLS if any(fnmatch.fnmatch(cell, each) for each in args.only)]
    for kind in args.communicators:
        for cell, outcome in run(kind, cells, args.patience):
            said = judged(cell, outcome, whole)
            good = said.startswith(GOOD)
            bad += not good
            lines.append(f"{'good' if good else 'BAD '} {kind:8} {cell:46} {said}")
            print(lines[-1], flush=True)
    lines.append(f"{len(lines)} cells, {bad} bad; {RANKS} ranks, timeout {TIMEOUT:g} s")
    print(lines[-1])
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
