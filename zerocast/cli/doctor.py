"""doctor: reports what this installation finds on this machine, and what is missing, slow or wrong.

Every finding has a status: ``ok``; ``missing``, something optional that is not there; ``slow``,
correct but slower than possible; ``wrong``, which makes the exit code 1.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import zerocast
from zerocast.backends import backend_for, native_library
from zerocast.cli.self_check import compare_casts, recipes
from zerocast.errors import OLDEST_TORCH, BackendError
from zerocast.recipes import in_words

PACKAGES = {
    "numpy": "not needed; without it torch warns once when it is imported",
    "mpi4py": "needed for MPI ranks: pip install 'zerocast[mpi]'",
    "cupy-cuda13x": "needed for the CUDA backend: pip install 'zerocast[cuda]'",
    "nvidia-cuda-nvrtc": "needed for the CUDA backend: pip install 'zerocast[cuda]'",
    "safetensors": "needed for checkpoints of servers: pip install safetensors",
    "transformers": "",
    "accelerate": "",
    "torchtitan": "",
}
"""Optional packages and their uses; packages without a text are listed only if installed."""

ASK_MPI = """
from mpi4py import MPI
name, version = MPI.get_vendor()
if MPI.COMM_WORLD.rank == 0:
    print(MPI.COMM_WORLD.size, name, ".".join(map(str, version)))
"""
"""A program of two ranks, the first of which prints their number and the MPI that mpi4py loads."""


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        name: the name of the thing that was checked.
        status: "ok", "missing", "slow" or "wrong".
        text: the result of the check, and what to do, if anything.
    """

    name: str
    status: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command: none."""


def run(given: argparse.Namespace) -> tuple[Any, int]:
    """Return the output and the exit code, which is 1 if a finding is ``wrong``."""
    sections = report()
    found = [{"section": s, **f._asdict()} for s, findings in sections.items() for f in findings]
    code = int(any(each["status"] == "wrong" for each in found))
    if given.json:
        return found, code
    lines = []
    for title, findings in sections.items():
        lines += [title, *(f"  {f.status:9}{f.name:28}{f.text}" for f in findings)]
    return "\n".join(lines), code


def report() -> dict[str, list[Finding]]:
    """Return all findings by section."""
    sections = {
        "Versions": versions(),
        "Processor": processor(),
        "Backends": backends(),
        "Ranks": ranks(),
        "GPU": gpu(),
    }
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        title = f"Cast on 3 ranks, compared with the unsharded cast ({device})"
        sections[title] = casts(torch.device(device))
    return {title: list(findings) for title, findings in sections.items()}


def versions() -> Iterator[Finding]:
    """Yield findings on zerocast, Python, torch, and packages that zerocast works with."""
    yield Finding("zerocast", "ok", f"{zerocast.__version__} in {Path(zerocast.__file__).parent}")
    yield Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    oldest = f"zerocast needs {OLDEST_TORCH} or newer"
    yield Finding("torch", "ok", f"{torch.__version__}, {build}; {oldest}")
    for package, use in PACKAGES.items():
        try:
            yield Finding(package, "ok", importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:  # noqa: PERF203  (there are eight)
            if use:
                yield Finding(package, "missing", use)


def processor() -> Iterator[Finding]:
    """Yield findings on the CPU: cores, threads, and torch's instruction set."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    yield Finding("system", "ok", f"{platform.platform()}, {cores} cores for this process")
    threads, rule = torch.get_num_threads(), "set OMP_NUM_THREADS to cores / ranks or less"
    yield Finding("threads", "slow" if threads > cores else "ok", f"{threads} a process; {rule}")
    used = torch.backends.cpu.get_cpu_capability()
    text = f"torch uses {used}; without AVX512, products in BF16 may be far slower than in FP32"
    yield Finding("instructions", "ok" if "AVX512" in used else "slow", text)


def backends() -> Iterator[Finding]:
    """Yield a finding on the backend of CPU tensors."""
    try:
        path = native_library.find_library()
        found = native_library.instruction_sets(native_library.load())
    except BackendError as error:
        text = f"CPU tensors are cast by the reference backend, in plain torch, because {error}"
        if Path.cwd() == Path(zerocast.__file__).parent.parent:
            text += " If another zerocast is installed, start Python in another directory."
        yield Finding("cpu", "slow", text)
        return
    text = f"native, {found[0]} of {', '.join(found)} that this machine runs; {path}"
    yield Finding("cpu", "slow" if found[0] == "baseline" else "ok", text)


def ranks() -> Iterator[Finding]:
    """Yield findings on torch.distributed's backends, mpi4py, and the launcher of its ranks."""
    dist = torch.distributed
    if dist.is_available():
        given = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        names = " and ".join(name for name, is_there in given.items() if is_there) or "no backend"
        yield Finding("torch.distributed", "ok", f"with {names}")
    else:
        yield Finding("torch.distributed", "missing", "this torch was built without it")
    beside_python = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    launcher = beside_python or shutil.which("mpiexec")
    if launcher is None:
        yield Finding("mpiexec", "missing", "no launcher of MPI ranks is on PATH")
    elif importlib.util.find_spec("mpi4py") is None:
        yield Finding("mpiexec", "missing", f"{launcher} is there, mpi4py is not installed")
    else:
        yield started_ranks(launcher)


def started_ranks(launcher: str) -> Finding:
    """Start two MPI ranks; return whether each sees the other."""
    command = [launcher, "-n", "2", sys.executable, "-c", ASK_MPI]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("mpiexec", "wrong", str(error))
    size, _, library = answer.stdout.partition("\n")[0].partition(" ")
    if answer.returncode:
        why = " ".join(answer.stderr.split())[-400:]
        return Finding("mpiexec", "wrong", f"{launcher} started no ranks of mpi4py: {why}")
    if size != "2":
        text = f"{launcher} starts jobs of one rank; use the launcher of the MPI that mpi4py loads"
        return Finding("mpiexec", "wrong", f"{text}: {library}")
    return Finding("mpiexec", "ok", f"{launcher} starts ranks of {library}, which mpi4py loads")


def gpu() -> Iterator[Finding]:
    """Yield findings on CUDA devices and their backend."""
    if not torch.cuda.is_available():
        text = "torch sees no CUDA device, so layers multiply decoded operands"
        yield Finding("devices", "missing", text)
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        text = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        yield Finding(f"cuda:{index}", "ok", text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = backend_for(torch.device("cuda", torch.cuda.current_device())).name
    said = "; ".join(str(warning.message) for warning in caught)
    text = said or "kernels are compiled at first use"
    yield Finding("cuda backend", "ok" if name == "cuda" else "slow", text)


def casts(device: torch.device) -> Iterator[Finding]:
    """Yield findings on the sharded cast of every recipe, compared with the unsharded one."""
    for name, recipe in recipes().items():
        try:
            compared = compare_casts(recipe, device)
        except Exception as error:  # noqa: PERF203  (what fails here is what is asked for)
            yield Finding(name, "wrong", f"{type(error).__name__}: {error}")
        else:
            text = f"{in_words(recipe)}: {compared:,} bytes are equal on every rank"
            yield Finding(name, "ok", text)
