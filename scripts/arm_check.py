"""Compares every byte that the CPU library writes on AArch64, under an emulator, with x86-64's.

    python scripts/arm_check.py                         # g++-aarch64-linux-gnu, qemu-user, cmake
    python scripts/arm_check.py --compiler aarch64-linux-gnu-g++-14 --stride 1
    python scripts/arm_check.py --library FILE          # one that is built, as of a wheel

The library is cross-compiled, and tests/kernels/other_process.cpp calls it under qemu-aarch64 on
memory that this process sends. Compared are the patterns of elements, drawn casts of every recipe,
the operations of the kernels' tests, and the claims of scripts/prove.py, whose bytes are NumPy's.
An emulator says nothing of speed, nor of a processor's own errors.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.kernels.other_process import PROGRAM, OtherCpuBackend, OtherProcess  # noqa: E402
from tests.kernels.subjects import SUBJECTS  # noqa: E402
from tests.oracles.finite_domains import CLAIMS  # noqa: E402
from tests.support.claims import assert_same_tensors  # noqa: E402
from tests.support.operations import (  # noqa: E402
    Written,
    masters_of,
    operand,
    run_operations,
    scheme_of,
)
from tests.support.partitions import draw_partition  # noqa: E402
from tests.support.recipes import VARIANTS  # noqa: E402
from tests.support.values import KINDS, draw_values, every_bf16  # noqa: E402
from zerocast.backends import native_library, use_backend  # noqa: E402
from zerocast.backends.cpu import CpuBackend  # noqa: E402
from zerocast.layout import BlockGrid, Extent  # noqa: E402
from zerocast.numerics import (  # noqa: E402
    E4M3,
    E5M2,
    NOMINALS,
    Backend,
    Float8Numerics,
    Numerics,
    NVFP4Numerics,
)

PACKAGES = "on Debian, apt-get install g++-aarch64-linux-gnu qemu-user cmake"


def build(compiler: str, emulator: str, folder: Path, library: Path | None = None) -> list[str]:
    """Compile the program, and the library if none is given; return the command that runs them."""
    for program in (compiler, emulator, "cmake"):
        if shutil.which(program) is None:
            sys.exit(f"{program} is not on PATH: {PACKAGES}")
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    sources = ["-S", str(ROOT), "-B", str(folder), f"-DCMAKE_CXX_COMPILER={compiler}"]
    program = folder / PROGRAM.stem
    commands = [[compiler, "-O2", str(PROGRAM), "-o", str(program), "-ldl"]]
    if library is None:
        library = folder / native_library.LIBRARY
        parallel = ["--parallel", str(os.cpu_count())]
        commands += [["cmake", *sources, *system], ["cmake", "--build", str(folder), *parallel]]
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    libc = subprocess.run([compiler, "-print-file-name=libc.so.6"], capture_output=True, text=True)
    prefix = Path(libc.stdout.strip()).resolve().parent.parent  # of the loader, for the emulator
    return [emulator, "-L", str(prefix), str(program), str(library)]


def compare(what: str, run: Callable[[Backend], Written], backend: OtherCpuBackend) -> int:
    """Raise where a byte differs from this machine's library; return how many were compared."""
    expected = run(CpuBackend(threads=backend.threads))
    assert_same_tensors(run(backend), expected, what)
    return sum(tensor.nbytes for tensor in expected.values())


def patterns() -> Iterator[torch.Tensor]:
    """All of BF16 and FP16; of FP32 each sign and exponent with all 12 upper bits of the mantissa
    and a drawn rest, and those that BF16 has.
    """
    halves = torch.arange(1 << 16).to(torch.int16)
    yield from (halves.view(torch.bfloat16), halves.view(torch.float16), every_bf16())
    upper = torch.arange(1 << 21, dtype=torch.int32)
    below = torch.randint(1 << 11, (1 << 21,), generator=torch.Generator().manual_seed(0))
    yield (upper << 11 | below.to(torch.int32)).view(torch.float32)


def encoded(numerics: Numerics, x: torch.Tensor, round_to: torch.dtype) -> Callable[..., Written]:
    """Codes and amax of ``x``, unscaled whatever it holds."""

    def run(backend: Backend) -> Written:
        tops = numerics.fmt.max * torch.tensor([1.0, 448.0])
        block, amax = tops[:1], tops[isinstance(numerics, NVFP4Numerics) :][:1]
        codes = torch.zeros(x.numel() * numerics.fmt.bits // 8, dtype=torch.uint8)
        measured = torch.zeros(x.numel(), dtype=torch.int32)
        extent, grid = Extent(0, x.numel()), BlockGrid(1, x.numel(), 1, x.numel())
        shard = operand(grid, block.view(torch.int32), amax.view(torch.int32), codes,
                        extent=extent, round_to=round_to)  # fmt: skip
        backend.partial_cast(numerics, [shard], masters_of(x))()
        each = operand(BlockGrid(1, x.numel(), 1, 1), measured, extent=extent, round_to=round_to)
        backend.partial_amax([each], masters_of(x))()
        return {"codes": codes, "amaxes": measured}

    return run


def check_patterns(backend: OtherCpuBackend) -> int:
    """Bytes compared of all patterns, rounded to each nominal dtype and encoded in each format."""
    numerics = (NVFP4Numerics(), Float8Numerics(E4M3), Float8Numerics(E5M2))
    return sum(
        compare(f"{kind} of {x.dtype} rounded to {to}", encoded(kind, x, to), backend)
        for x, kind, to in product(patterns(), numerics, NOMINALS)
    )


def check_casts(backend: OtherCpuBackend) -> int:
    """Bytes compared of every recipe on every kind of value, in shapes and cuts that are drawn."""
    found, drawn = 0, random.Random(0)
    for (name, recipe), kind in product(VARIANTS.items(), KINDS):
        cols = 32 * drawn.randint(1, 12) if name.startswith(("mx", "nv")) else drawn.randint(1, 400)
        rows = drawn.choice([1, 3, 16, 35, 70, 130, 1000])
        cuts = draw_partition(rows * cols, 4, drawn)
        master, scheme = draw_values(kind, rows * cols, len(name)), scheme_of(recipe, rows, cols)
        masters = [master.to(drawn.choice([*NOMINALS])), master]

        def run(on: Backend, args: tuple = (scheme, masters, cuts)) -> Written:
            return run_operations(on, *args)

        found += compare(f"{name}, {kind}, {rows}x{cols}, {cuts}", run, backend)
    return found


def check_subjects(backend: OtherCpuBackend) -> int:
    """Bytes compared of what the tests of the kernels run."""
    return sum(compare(name, subject, backend) for name, subject in SUBJECTS.items())


def check_claims(backend: OtherCpuBackend, stride: int) -> int:
    """Pairs that claims of scripts/prove.py decide: of many items each ``stride``-th and the last,
    on both sides of each place where a code changes.
    """
    pairs = 0
    with use_backend(backend), np.errstate(all="ignore"):
        for claim in CLAIMS.values():
            if hasattr(claim, "by_thresholds"):
                claim = replace(claim, by_thresholds=True)
            items = range(0, claim.items, stride if claim.items > 255 else 1)
            pairs += sum(map(claim.visit, {*items, claim.items - 1}))
    return pairs


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, compare, and print what was compared."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compiler", default="aarch64-linux-gnu-g++")
    parser.add_argument("--emulator", default="qemu-aarch64")
    parser.add_argument("--library", type=Path, help="compare this one, and build none")
    parser.add_argument("--stride", type=int, default=16, help="of the claims' amaxes")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        library = OtherProcess(build(given.compiler, given.emulator, Path(folder), given.library))
        print(f"instruction sets of the library: {library.instruction_sets}", flush=True)
        one, three = (OtherCpuBackend(library, threads) for threads in (1, 3))
        for name, check, unit in (
            ("patterns of elements", lambda: check_patterns(one), "bytes"),
            ("operations of the tests", lambda: check_subjects(one), "bytes"),
            ("drawn casts, 1 thread", lambda: check_casts(one), "bytes"),
            ("drawn casts, 3 threads", lambda: check_casts(three), "bytes"),
            ("claims of prove.py", lambda: check_claims(one, given.stride), "pairs"),
        ):
            start = time.perf_counter()
            count = check()
            took = time.perf_counter() - start
            print(f"{name:26}{count:16,} {unit} are equal, {took:6.1f} s", flush=True)
        library.close()


if __name__ == "__main__":
    main()
