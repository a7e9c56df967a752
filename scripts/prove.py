"""Visits the finite domains of the arithmetic whole and compares every byte with NumPy's.

    python scripts/prove.py                         # every claim on every backend
    python scripts/prove.py --claims nvfp4-codes --backends emulated
    python scripts/prove.py --kept proof            # goes on where it was stopped

The claims and the bytes that they expect are those of tests/oracles/finite_domains.py. Not covered
are 4-over-6's choice and stochastic rounding, which depend on more than a few numbers, and the
rounding of FP32 masters to BF16.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
from joblib import Memory, Parallel, delayed

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cuda_emulation.emulator import BUILDS, Emulator  # noqa: E402
from tests.oracles.finite_domains import CLAIMS, Claim  # noqa: E402
from zerocast.backends import native_library, use_backend  # noqa: E402
from zerocast.backends.cpu import CpuBackend  # noqa: E402
from zerocast.backends.cuda import CudaBackend  # noqa: E402
from zerocast.cli.output import aligned  # noqa: E402
from zerocast.numerics import Backend  # noqa: E402

SOURCES = (
    "CMakeLists.txt", "cuda_src/*/*.*", "zerocast/backends/**/*.py", "zerocast/numerics/*.py",
    "zerocast/numerics/*.py", "zerocast/recipes/*.py", "tests/cuda_emulation/*.*",
    "tests/oracles/finite_domains.py", "tests/oracles/scalar_*.py",
)  # fmt: skip
"""Files that may decide which bytes the claims see: what was visited holds for these alone."""
CHUNK = 128
"""Items that are visited, and kept, at once."""

SLOW = ("reference", "emulated")
"""Backends whose codes are visited by thresholds where a claim knows both ways."""


@cache
def backend(name: str) -> Backend | str:
    """An instruction set, ``"reference"``, or ``"emulated"``: CUDA's kernels on the CPU."""
    if name != "emulated":
        return name if name == "reference" else CpuBackend(name, 1)
    return CudaBackend(Emulator("forward"))


def visit(name: str, by: str, items: range, sources: str) -> tuple[int, float]:
    """Visit ``items`` of a claim on a backend, of these ``sources``; return how many pairs they
    decide, and the CPU seconds that it took.

    Raises:
        AssertionError: at the first byte that is not the expected one.
    """
    torch.set_num_threads(1)
    claim: Claim = CLAIMS[name]
    begin = time.process_time()
    if by in SLOW and hasattr(claim, "by_thresholds"):
        claim = replace(claim, by_thresholds=True)
    with use_backend(backend(by)), np.errstate(all="ignore"):
        pairs = sum(map(claim.visit, items))
    return pairs, time.process_time() - begin


@cache
def hash_of_arithmetic() -> str:
    """Of :data:`SOURCES`."""
    files = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    contents = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(contents).hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> None:
    """Visit what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    isas = native_library.instruction_sets(native_library.load())
    known = [*isas, "reference", "emulated"]
    parser.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS), metavar="NAME")
    parser.add_argument("--backends", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kept", type=Path, metavar="FOLDER",
                        help="where what was visited is kept, and not visited again")  # fmt: skip
    given = parser.parse_args(arguments)

    rows, kept = [], delayed(Memory(given.kept, verbose=0).cache(visit))
    with tempfile.TemporaryDirectory() as builds:
        os.environ.setdefault(BUILDS, builds)
        for name, by in product(given.claims, given.backends):
            items = range(CLAIMS[name].items)
            found = Parallel(given.processes, backend="multiprocessing")(
                kept(name, by, items[start : start + CHUNK], hash_of_arithmetic())
                for start in items[::CHUNK]
            )
            pairs, seconds = map(sum, zip(*found, strict=True))
            rows.append([name, by, f"{len(items):,}", f"{pairs:,}", f"{seconds:.1f}"])
    print(*aligned(["claim", "backend", "items", "pairs", "CPU s"], rows), sep="\n")


if __name__ == "__main__":
    main()
