"""Visits the finite domains of the arithmetic whole and compares every byte with NumPy's.

    python scripts/prove.py                         # every claim on every backend
    python scripts/prove.py --claims nvfp4-codes --backends emulated
    python scripts/prove.py --out proof.jsonl       # goes on where it was stopped

The claims and the bytes that they expect are those of tests/oracles/finite_domains.py. Not covered
are 4-over-6's choice and stochastic rounding, which depend on more than a few numbers, and the
rounding of FP32 masters to BF16.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cuda_emulation.emulator import BUILDS, Emulator  # noqa: E402
from tests.oracles.finite_domains import CLAIMS, Claim  # noqa: E402
from zerocast.backends import native_library, use_backend  # noqa: E402
from zerocast.backends.cpu import CpuBackend  # noqa: E402
from zerocast.backends.cuda import CudaBackend  # noqa: E402
from zerocast.costs.tables import markdown  # noqa: E402
from zerocast.numerics import Backend  # noqa: E402

SOURCES = (
    "CMakeLists.txt", "cuda_src/*/*.*", "zerocast/backends/**/*.py", "zerocast/formats/*.py",
    "zerocast/numerics/*.py", "zerocast/recipes/*.py", "tests/cuda_emulation/*.*",
    "tests/oracles/finite_domains.py", "tests/oracles/scalar_*.py",
)  # fmt: skip
"""Files that may decide which bytes the claims see: what was visited holds for these alone."""
CHUNK = 128
"""Items that are visited, and noted in the file, at once."""

SLOW = ("reference", "emulated")
"""Backends whose codes are visited by thresholds where a claim knows both ways."""


@cache
def backend(name: str) -> Backend | str:
    """An instruction set, ``"reference"``, or ``"emulated"``: CUDA's kernels on the CPU."""
    if name != "emulated":
        return name if name == "reference" else CpuBackend(name, 1)
    return CudaBackend(Emulator("forward"))


class Visited(NamedTuple):
    """A chunk (items of a claim on a backend), what it decided, the CPU seconds that it took, and
    of which sources.
    """

    claim: str
    backend: str
    start: int
    end: int
    pairs: int
    seconds: float
    sources: str


def visit(chunk: tuple[str, str, int, int]) -> Visited:
    """Visit every item of the first four fields of what is returned.

    Raises:
        AssertionError: at the first byte that is not the expected one.
    """
    name, by, start, end = chunk
    torch.set_num_threads(1)
    claim: Claim = CLAIMS[name]
    begin = time.process_time()
    if by in SLOW and hasattr(claim, "by_thresholds"):
        claim = replace(claim, by_thresholds=True)
    with use_backend(backend(by)), np.errstate(all="ignore"):
        pairs = sum(map(claim.visit, range(start, end)))
    return Visited(*chunk, pairs, time.process_time() - begin, hash_of_arithmetic())


@cache
def hash_of_arithmetic() -> str:
    """Of :data:`SOURCES`."""
    files = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    contents = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(contents).hexdigest()[:16]


def table(visited: Iterable[Visited]) -> str:
    """What was decided, a line for each claim and backend."""
    rows = []
    for names, found in groupby(sorted(visited), key=lambda each: each[:2]):
        _, _, starts, ends, pairs, seconds, _ = zip(*found, strict=True)
        items = f"{sum(ends) - sum(starts):,} / {CLAIMS[names[0]].items:,}"
        rows.append([*names, items, f"{sum(pairs):,}", f"{sum(seconds):.1f}"])
    return markdown(["claim", "backend", "items", "pairs", "CPU s"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Visit what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    isas = native_library.instruction_sets(native_library.load())
    known = [*isas, "reference", "emulated"]
    parser.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS), metavar="NAME")
    parser.add_argument("--backends", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=os.devnull,
                        help="JSON lines: what was visited is left out")  # fmt: skip
    given = parser.parse_args(arguments)

    chunks = {(claim, name, start, min(start + CHUNK, CLAIMS[claim].items))
              for name in given.backends for claim in given.claims
              for start in range(0, CLAIMS[claim].items, CHUNK)}  # fmt: skip
    with tempfile.TemporaryDirectory() as builds, given.out.open("a+") as out:
        out.seek(0)
        earlier = (Visited(*json.loads(line)) for line in out)
        done = [each for each in earlier if each.sources == hash_of_arithmetic()]
        left = chunks - {each[:4] for each in done}
        os.environ.setdefault(BUILDS, builds)
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            for each in pool.imap(visit, sorted(left, key=lambda chunk: chunk[2])):
                done.append(each)
                print(json.dumps(each), file=out, flush=True)
    print(table(done))


if __name__ == "__main__":
    main()
