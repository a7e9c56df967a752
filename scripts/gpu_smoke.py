"""What has to be true before a GPU's time is worth measuring: every kernel compiles, and a little
of every recipe, function and norm has the reference's bytes.

    gpu_smoke.py compile   machine code of all kernels for this GPU, by all cores, into the cache
    gpu_smoke.py smoke     casts by plans on two ranks, quantized and decoded tensors, functions

Each kernel and each subject is a row (bench_rows.py) of OUTPUT, so one that takes the process down
leaves the others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from bench_cuda import Machine, emulation, gpu
from bench_rows import Result, Rows, supervise, told
from sass_report import INSTANCES

import zerocast
from tests.cast.test_bitwise_guarantee import DTYPES, Case, check_in_process
from tests.support import fused_ops
from tests.support.recipes import SHARDABLE, VARIANTS
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.values import KINDS, draw_values
from zerocast.backends.cuda import Kernel
from zerocast.backends.cuda.compiler import architecture, compiled
from zerocast.layout import Extent

ROW_LIMIT = 60.0
"""Seconds after which a row counts as hung."""

REHEARSED = ("nvfp4", "transpose<4>", "identity current")
"""The subjects of a rehearsal."""

KERNELS = {
    str(kernel): kernel
    for name, templates in INSTANCES.items()
    for kernel in (Kernel(name, 0, (template,) if template else ()) for template in templates)
}


def compile_one(name: str, machine: Machine) -> Result:
    """Compile a kernel."""
    if machine.device != "cuda":
        machine.backend.launcher.prepare(KERNELS[name])
        return {}
    arch = architecture(torch.cuda.get_device_capability())
    return {"arch": arch, "bytes": len(compiled(KERNELS[name], arch)[1])}


def cast(name: str, machine: Machine) -> Result:
    """Cast by plans and by quantize, decode, and compare."""
    recipe, shape = VARIANTS[name], torch.Size((80, 608))
    numel, where = shape.numel(), machine.device
    case = Case(1, 2)
    count = len(KINDS) if name in SHARDABLE else 0
    case.recipes, case.shapes = [recipe] * count, [shape] * count
    case.dtypes = [DTYPES[i % 3] for i in range(count)]
    case.columnwise, case.own_buffers = [True] * count, False
    case.masters = [draw_values(kind, numel, 1) for kind in KINDS[:count]]
    case.partitions = [[Extent(0, 18_001), Extent(18_001, numel)]] * count
    with zerocast.use_backend(machine.backend):
        if count:
            check_in_process(case, 2, torch.device(where))
        x = draw_values("normal", numel, 2).view(shape)
        quantized = zerocast.quantize(x.to(where), recipe, dtype=torch.bfloat16)
        values = quantized.dequantize()
    with zerocast.use_backend("reference"):
        expected = zerocast.quantize(x, recipe, dtype=torch.bfloat16)
        decoded = expected.dequantize()
    assert_same_storage(quantized, expected, name)
    assert_same_bytes(values, decoded, f"{name} decoded")
    return {"equal": True}


def fuse(function: str, recipe: str, machine: Machine) -> Result:
    """Compute a function whose result is quantized, and compare."""
    x = fused_ops.source(function, (130, 288), "normal", 2).bfloat16().to(machine.device)
    for usage in fused_ops.USAGES:
        quantizer = fused_ops.quantizer_of(fused_ops.RECIPES[recipe], usage, machine.device)
        what = f"{function}, {recipe}, {usage}"
        fused_ops.assert_fused(machine.backend, function, quantizer, x, what)
    return {"equal": True}


def works(stage: str, machine: Machine) -> dict[str, Callable[[], Result]]:
    """Return what makes each row of a stage."""
    if stage == "compile":
        return {f"compile {name}": partial(compile_one, name, machine) for name in KERNELS}
    found = {f"smoke {name}": partial(cast, name, machine) for name in VARIANTS}
    for function in fused_ops.FUNCTIONS:
        for recipe in fused_ops.RECIPES:
            found[f"smoke {function} {recipe}"] = partial(fuse, function, recipe, machine)
    return found


def main(arguments: Sequence[str]) -> int:
    """Let processes do the rows of one stage; say which failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("compile", "smoke"))
    parser.add_argument("--output", type=Path, required=True, help="a file of rows, .jsonl")
    parser.add_argument("--rehearse", action="store_true", help="a few, on an emulation")
    parser.add_argument("--worker", metavar="I/N", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    rows = Rows(options.output)
    if options.worker:
        machine = emulation() if options.rehearse else gpu()
        number, count = map(int, options.worker.split("/"))
        found = works(options.stage, machine)
        if options.rehearse:
            found = {row: work for row, work in found.items() if row.split(" ", 1)[1] in REHEARSED}
        own = list(found.items())[number::count]
        return 0 if rows.do(dict(own)) else 1
    workers = (os.cpu_count() or 1) if options.stage == "compile" and not options.rehearse else 1
    command = [sys.executable, str(Path(__file__)), *arguments, "--worker"]
    with ThreadPoolExecutor(workers) as pool:
        done = all(
            pool.map(
                lambda i: supervise(rows, [*command, f"{i}/{workers}"], ROW_LIMIT), range(workers)
            )
        )
    return 0 if told(rows, lambda row: row.split(" ", 1)[0] == options.stage) and done else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
