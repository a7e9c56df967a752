"""The CPU library's plain loops, compiled for a sanitizer; and programs of Python under one.

Quick to compile: without CMake, the casts in one unit, as they share templates, and functions once
instead of wherever they are called.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zerocast.backends import native_library

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "cuda_src"
CASTS = ("partial_amax", "partial_amax_cast", "partial_cast")
ADDRESSES = (
    "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize=null,object-size,vptr",
    "-fno-sanitize-recover=all",
)  # fmt: skip
"""Of the compiler: addresses, and undefined behaviour but what shows as a wrong address."""
THREADS = ("-fsanitize=thread", "-fopenmp")
FLAGS = (
    "-std=gnu++17", "-O0", "-g0", "-fPIC", "-w", "-ffp-contract=off", "-fno-exceptions",
    "-fno-rtti", "-Dalways_inline=unused", "-DZEROCAST_ISA=baseline",
)  # fmt: skip


def units() -> dict[str, list[Path]]:
    """The sources, by the name of the unit in which they are compiled."""
    alone = {path.stem: [path] for path in sorted((SOURCES / "cpu").glob("*.cpp"))}
    return {"casts": [alone.pop(name)[0] for name in CASTS], **alone}


def compiled(
    folder: Path, flags: Iterable[str], names: Iterable[str] = (), sources: Path = SOURCES
) -> dict[str, Path]:
    """Object files in ``folder``, by the name of their unit: of ``names``, or of all."""

    def compile_unit(name: str) -> tuple[str, Path]:
        unit, made = folder / f"{name}.cpp", folder / f"{name}.o"
        unit.write_text("".join(f'#include "cpu/{path.name}"\n' for path in units()[name]))
        run(["g++", *FLAGS, *flags, f"-I{sources}", "-c", str(unit), "-o", str(made)])
        return name, made

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(compile_unit, names or units()))


def linked(folder: Path, objects: Mapping[str, Path], flags: Iterable[str], *more: Path) -> Path:
    """One library of the objects, and of ``more`` sources."""
    library, files = folder / native_library.LIBRARY, [*map(str, objects.values()), *map(str, more)]
    run(["g++", "-std=gnu++17", "-shared", "-fPIC", *flags, *files, "-o", str(library)])
    return library


def run(command: list[str]) -> None:
    """A command that must not fail."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def under_the_sanitizer(
    name: str, program: str, *arguments: str, timeout: int = 900
) -> subprocess.CompletedProcess[str]:
    """A program of Python in a process of its own, into which a sanitizer is loaded first, so that
    every tensor is an allocation whose bounds it knows. Skips where g++ has none.

    Args:
        name: of the sanitizer's runtime: ``"asan"`` or ``"tsan"``.
    """
    command = ["g++", f"-print-file-name=lib{name}.so"]
    runtime = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"g++ has no lib{name} here")
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
    }
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, env=environment, timeout=timeout,
    )  # fmt: skip
