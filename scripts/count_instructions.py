"""How many instructions a cast takes of AVX2, baseline and NEON code, on any machine the same.

    python scripts/count_instructions.py                   # NVFP4, FP8, MXFP8 of [512, 512]
    python scripts/count_instructions.py --recipes nvfp4 --rows 4096 --cols 64
    python scripts/count_instructions.py --neon --rows 64  # needs what scripts/arm_check.py needs

valgrind's callgrind runs another process of this script, and counts what the native library
executes in each step, on one thread. It knows no AVX-512, whose code is not counted, and no caches
or waits: where a count falls, time may stay. bench_cast.py measures time. NEON's are the lines of
qemu's log of single steps, some hundred of each call and copies by the C library among them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from arm_check import build  # also puts the repository's root on the path
from bench_frame import Work, prepare
from rich import print
from rich.table import Table

from tests.kernels.other_process import OtherCpuBackend, OtherProcess
from zerocast.backends import native_library
from zerocast.backends.cpu import CpuBackend
from zerocast.layout import Extent
from zerocast.recipes import RECIPES

CODES = ("baseline", "avx2")


def control(*arguments: str) -> None:
    """Let callgrind, which runs this process, do something now."""
    command = ["callgrind_control", *arguments, str(os.getpid())]
    subprocess.run(command, check=True, capture_output=True)


def steps(options: argparse.Namespace, backend: CpuBackend) -> Iterator[tuple[str, str, Work]]:
    """Yield the steps of each recipe, with its name and theirs, when they have run once."""
    torch.set_num_threads(1)
    shape = options.rows, options.cols
    master = torch.randn(options.rows * options.cols, generator=torch.Generator().manual_seed(0))
    for recipe in options.recipes:
        extents = [Extent(0, master.numel())]
        cast = prepare(backend, RECIPES[recipe](), [shape], extents, [master], master.device)
        for name, step in list(cast.steps.items())[1:]:  # without the memset, of torch
            step()
            yield recipe, name.replace(" ", "_"), step


def run_steps(options: argparse.Namespace) -> None:
    """Cast under valgrind: each step of each recipe twice, the second time counted."""
    for code in CODES:
        for recipe, name, step in steps(options, CpuBackend(code, 1)):
            control("--instr=on")
            step()
            control("--instr=off")
            control(f"--dump={recipe}/{name}/{code}")
            control("--zero")


def neon_instructions(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield recipes, steps, and the instructions that an emulated processor executes in them."""
    with tempfile.TemporaryDirectory() as folder:
        emulator, *rest = build("aarch64-linux-gnu-g++", "qemu-aarch64", Path(folder))
        log = Path(folder, "log")
        each = [emulator, "-singlestep", "-d", "exec,nochain", "-D", str(log)]
        library = OtherProcess([*each, *rest])
        for recipe, name, step in steps(options, OtherCpuBackend(library)):
            os.truncate(log, 0)
            step()
            with log.open("rb") as lines:
                pieces = iter(lambda lines=lines: lines.read(1 << 20), b"")
                yield recipe, name, sum(piece.count(b"\n") for piece in pieces)
        library.close()


def instructions(dump: str) -> int:
    """Those that the library executed, in callgrind's format: lines of "place count" below the
    object that they are of, where a line behind "calls=" counts what was called.
    """
    total, is_ours, is_call = 0, False, False
    for line in dump.splitlines():
        if line.startswith("ob="):
            is_ours = line.endswith(native_library.LIBRARY)
        elif line[:1].isdigit():
            total += 0 if is_call or not is_ours else int(line.split()[1])
        is_call = line.startswith("calls=")
    return total


def main() -> None:
    """Print the counts for each element of the weight."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--cols", type=int, default=512)
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=["nvfp4", "current", "mxfp8"]
    )
    parser.add_argument("--neon", action="store_true", help="also of the library for AArch64")
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.counted:
        run_steps(options)
        return
    found: dict[tuple[str, str], dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tool = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no",
                "--compress-strings=no", "--compress-pos=no",
                f"--callgrind-out-file={folder}/dump"]  # fmt: skip
        subprocess.run([*tool, sys.executable, *sys.argv, "--counted"], check=True)
        for path in Path(folder).iterdir():
            text = path.read_text()
            if asked := re.search(r"Trigger: .*?(\w+)/(\w+)/(\w+)", text):
                recipe, step, code = asked.groups()
                found.setdefault((recipe, step), {})[code] = instructions(text)
    if options.neon:
        for recipe, step, count in neon_instructions(options):
            found[recipe, step]["neon"] = count
    codes = [*CODES, "neon"] if options.neon else CODES
    table = Table("recipe", "step", *codes, title="Instructions for each element of the weight")
    for (recipe, step), counts in sorted(found.items()):
        each = (f"{counts[code] / options.rows / options.cols:.3f}" for code in codes)
        table.add_row(recipe, step, *each)
    print(table)


if __name__ == "__main__":
    main()
