"""Visits the finite domains of the arithmetic whole and compares every byte with NumPy's.

    python scripts/prove.py                         # every claim on every backend
    python scripts/prove.py --claims nvfp4-codes --backends emulated --part 3/64
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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cuda_emulation.emulator import BUILDS, Emulator  # noqa: E402
from tests.oracles.finite_domains import CLAIMS, Claim, Difference  # noqa: E402
from zerocast.backends import native_library, use_backend  # noqa: E402
from zerocast.backends.cpu import CpuBackend  # noqa: E402
from zerocast.backends.cuda import CudaBackend  # noqa: E402
from zerocast.numerics import Backend  # noqa: E402

ARITHMETIC = ("cuda_src", "zerocast/backends", "zerocast/formats", "zerocast/numerics",
              "tests/oracles")  # fmt: skip
"""What the arithmetic and the claims consist of: what was visited holds for these alone."""
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


@dataclass(frozen=True)
class Chunk:
    """Items of a claim on a backend, from ``start`` up to ``end``."""

    claim: str
    backend: str
    start: int
    end: int


@dataclass(frozen=True)
class Visited:
    """A chunk, what it decided, the CPU seconds that it took, and of which sources."""

    chunk: Chunk
    pairs: int
    seconds: float
    sources: str


def visit(chunk: Chunk) -> Visited:
    """Visit every item.

    Raises:
        Difference: at the first byte that is not the expected one.
    """
    torch.set_num_threads(1)
    claim: Claim = CLAIMS[chunk.claim]
    begin = time.process_time()
    if chunk.backend in SLOW and hasattr(claim, "by_thresholds"):
        claim = replace(claim, by_thresholds=True)
    with use_backend(backend(chunk.backend)), np.errstate(all="ignore"):
        pairs = sum(claim.visit(item) for item in range(chunk.start, chunk.end))
    return Visited(chunk, pairs, time.process_time() - begin, hash_of_arithmetic())


@cache
def hash_of_arithmetic() -> str:
    """Of all files of :data:`ARITHMETIC`."""
    digest = hashlib.sha256()
    for source in ARITHMETIC:
        path = ROOT / source
        for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if each.suffix in (".py", ".h", ".cpp", ".cu"):
                digest.update(each.read_bytes())
    return digest.hexdigest()[:16]


def chunks(claims: Iterable[str], backends: Iterable[str]) -> Iterator[Chunk]:
    """All chunks of these claims on these backends."""
    for name in backends:
        for claim in claims:
            items = CLAIMS[claim].items
            for start in range(0, items, CHUNK):
                yield Chunk(claim, name, start, min(start + CHUNK, items))


def part_of(work: Sequence[Chunk], part: str) -> list[Chunk]:
    """Part ``"3/64"``, or ``"sources/64"``: the one that the hash of the sources names."""
    which, of = part.split("/")
    number = int(hash_of_arithmetic(), 16) if which == "sources" else int(which)
    return [chunk for at, chunk in enumerate(work) if at % int(of) == number % int(of)]


def table(visited: Iterable[Visited]) -> str:
    """What was decided, a line for each claim and backend."""
    lines: dict[tuple[str, str], list[float]] = {}
    for each in visited:
        line = lines.setdefault((each.chunk.claim, each.chunk.backend), [0, 0, 0])
        found = each.chunk.end - each.chunk.start, each.pairs, each.seconds
        line[:] = map(sum, zip(line, found, strict=True))
    out = [f"{'claim':30} {'backend':10} {'items':>14} {'pairs':>16} {'CPU s':>7}"]
    for (claim, name), (items, pairs, seconds) in sorted(lines.items()):
        share = f"{items:,} / {CLAIMS[claim].items:,}"
        out.append(f"{claim:30} {name:10} {share:>14} {pairs:16,} {seconds:7.1f}")
    return "\n".join(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Visit what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    isas = native_library.instruction_sets(native_library.load())
    known = [*isas, "reference", "emulated"]
    parser.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS), metavar="NAME")
    parser.add_argument("--backends", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--part", default="0/1", help="such as 3/64, or sources/64")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON lines: what was visited is left out")
    given = parser.parse_args(arguments)

    done = []
    if given.out is not None and given.out.exists():
        rows = [json.loads(line) for line in given.out.read_text().splitlines()]
        done = [Visited(**{**row, "chunk": Chunk(**row["chunk"])}) for row in rows]
        done = [each for each in done if each.sources == hash_of_arithmetic()]
    left = set(part_of(list(chunks(given.claims, given.backends)), given.part))
    left -= {each.chunk for each in done}
    pool = ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory() as builds, pool:
        os.environ.setdefault(BUILDS, builds)
        work = sorted(left, key=lambda chunk: (chunk.start, chunk.claim))
        try:
            for each in pool.map(visit, work):
                done.append(each)
                if given.out is not None:
                    with given.out.open("a") as file:
                        file.write(json.dumps(asdict(each)) + "\n")
        except Difference:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(table(done))


if __name__ == "__main__":
    main()
