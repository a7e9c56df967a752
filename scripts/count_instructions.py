"""How many instructions a cast takes of the AVX2 and of the baseline code, on any machine the same.

    python scripts/count_instructions.py                   # NVFP4, FP8, MXFP8 of [512, 512]
    python scripts/count_instructions.py --recipes nvfp4 --rows 4096 --cols 64

valgrind's callgrind runs another process of this script, and counts what the native library
executes in each step, on one thread. It knows no AVX-512, whose code is not counted, and no caches
or waits: where a count falls, time may stay. bench_cast.py measures time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from bench_frame import prepare
from rich import print
from rich.table import Table

from zerocast.backends import native_library
from zerocast.backends.cpu import CpuBackend
from zerocast.layout import Extent
from zerocast.recipes import RECIPES

CODES = ("baseline", "avx2")


def control(*arguments: str) -> None:
    """Let callgrind, which runs this process, do something now."""
    command = ["callgrind_control", *arguments, str(os.getpid())]
    subprocess.run(command, check=True, capture_output=True)


def run_steps(options: argparse.Namespace) -> None:
    """Cast under valgrind: each step of each recipe twice, the second time counted."""
    torch.set_num_threads(1)
    shape = options.rows, options.cols
    master = torch.randn(options.rows * options.cols, generator=torch.Generator().manual_seed(0))
    for recipe in options.recipes:
        for code in CODES:
            extents, backend = [Extent(0, master.numel())], CpuBackend(code, 1)
            cast = prepare(backend, RECIPES[recipe](), [shape], extents, [master], master.device)
            for name, step in list(cast.steps.items())[1:]:  # without the memset, of torch
                step()
                control("--instr=on")
                step()
                control("--instr=off")
                control(f"--dump={recipe}/{name.replace(' ', '_')}/{code}")
                control("--zero")


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
    table = Table("recipe", "step", *CODES, title="Instructions for each element of the weight")
    for (recipe, step), counts in sorted(found.items()):
        each = (f"{counts[code] / options.rows / options.cols:.3f}" for code in CODES)
        table.add_row(recipe, step, *each)
    print(table)


if __name__ == "__main__":
    main()
