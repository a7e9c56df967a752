"""doctor: reports what this installation finds on this machine, and what is missing, slow or wrong.

Every finding has a status: ``ok``; ``missing``, something optional that is not there; ``slow``,
correct but slower than possible; ``wrong``, which makes the exit code 1.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import timeit
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import zerocast
from zerocast.backends import availability, backend_for, native_library
from zerocast.cli.self_check import compare_casts, recipes
from zerocast.errors import OLDEST_TORCH, BackendError

PACKAGES = {
    "numpy": "not needed; without it torch warns once when it is imported",
    "mpi4py": "needed for MPI ranks: pip install 'zerocast[mpi]'",
    "cupy-cuda13x": "needed for the CUDA backend: pip install 'zerocast[cuda]'",
    "nvidia-cuda-nvrtc": "needed for the CUDA backend: pip install 'zerocast[cuda]'",
    "safetensors": "needed for 'inspect' of .safetensors files: pip install safetensors",
    "transformers": "",
    "accelerate": "",
    "torchtitan": "",
}
"""Optional packages and their uses; packages without a text are listed only if installed."""

LAUNCHERS = {"Intel MPI": "Intel", "MPICH": "HYDRA|MPICH", "Open MPI": "Open MPI|OpenRTE|PRRTE"}
"""The MPI libraries that a launcher may belong to, and patterns of its version text."""

ASK_MPI = """
import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.get_vendor()[0], '.'.join(map(str, MPI.get_vendor()[1])))
"""

SLOW_BF16 = 4.0
"""The ratio of the times of a BF16 and an FP32 product above which BF16 is reported as slow."""

_DECODED = "layers multiply decoded operands, which saves memory and communication, no arithmetic:"


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


def report(*, as_json: bool = False) -> tuple[str, int]:
    """Return the report as text or JSON, and the exit code: 1 if a finding is ``wrong``."""
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "Versions": versions,
        "Processor": processor,
        "Backends": backends,
        "Ranks": ranks,
        "GPU": gpu,
    }
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        title = f"Cast on 3 ranks, compared with the unsharded cast ({device})"
        sections[title] = partial(casts, torch.device(device))
    findings = [(section, finding) for section, look in sections.items() for finding in look()]
    code = int(any(finding.status == "wrong" for _, finding in findings))
    if as_json:
        rows = [{"section": section, **finding._asdict()} for section, finding in findings]
        return json.dumps(rows, indent=1), code
    lines = []
    for section in sections:
        found = [finding for place, finding in findings if place == section]
        lines += [section, *(f"  {f.status:9}{f.name:28}{f.text}" for f in found)]
    for status, title in {
        "slow": "What is slow here, and why",
        "wrong": "What is wrong here",
    }.items():
        chosen = [f"  {f.name}: {f.text}" for _, f in findings if f.status == status]
        lines += ["", title, *(chosen or ["  nothing that was checked"])]
    return "\n".join(lines), code


def versions() -> Iterator[Finding]:
    """Yield findings on zerocast, Python, torch, and packages that zerocast works with."""
    place = Path(zerocast.__file__).parent
    yield Finding("zerocast", "ok", f"{zerocast.__version__} in {place}")
    yield Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    oldest = f"zerocast needs {OLDEST_TORCH} or newer"
    yield Finding("torch", "ok", f"{torch.__version__}, {build}; {oldest}")
    for package, use in PACKAGES.items():
        installed = version_of(package)
        if installed or use:
            yield Finding(package, "ok" if installed else "missing", installed or use)


def version_of(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> Iterator[Finding]:
    """Yield findings on the CPU: cores, threads, and the speed of BF16 products."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    system = f"{platform.system()} on {platform.machine()}"
    yield Finding("system", "ok", f"{system}, {cores} cores for this process")
    threads = torch.get_num_threads()
    if threads > cores:
        text = f"{threads} threads share {cores} cores; set OMP_NUM_THREADS={cores} or less"
    else:
        text = f"{threads} a process; with several ranks here, set OMP_NUM_THREADS to cores / ranks"
    yield Finding("threads", "slow" if threads > cores else "ok", text)
    bf16, fp32 = (
        torch.ones(256, 256, dtype=dtype, device="cpu") for dtype in (torch.bfloat16, torch.float32)
    )
    ratio = min(timeit.repeat(lambda: bf16 @ bf16, number=1, repeat=10)) / min(
        timeit.repeat(lambda: fp32 @ fp32, number=1, repeat=10)
    )
    text = f"a product of BF16 matrices takes {ratio:.1f} times as long as one of FP32"
    if ratio > SLOW_BF16:
        text += "; run models in FP32 on this CPU"
    yield Finding("BF16", "slow" if ratio > SLOW_BF16 else "ok", text)


def backends() -> Iterator[Finding]:
    """Yield findings on the backends of CPU tensors, and on a compiler to build a missing one."""
    yield Finding("reference", "ok", "plain torch: correct on every device, and slow")
    try:
        path = native_library.find_library()
        found = native_library.instruction_sets(native_library.load())
    except BackendError as error:
        text = f"CPU tensors are cast by the reference backend, because {error}"
        if (built := installed_library()) is not None:
            text += (
                " Or start Python in another directory: it imported zerocast from this one, and "
                f"the installed zerocast has {built}."
            )
        yield Finding("cpu", "slow", text)
        if compiler := next(filter(shutil.which, ("c++", "g++", "clang++")), None):
            yield Finding("compiler", "ok", f"{compiler}, which can build the native library")
        else:
            yield Finding("compiler", "missing", "no C++ compiler is on PATH to build it")
        return
    text = f"native, {found[0]} of {', '.join(found)} that this machine runs; {path}"
    if found[0] == "baseline":
        text += "; without AVX2 its loops have no vector instructions"
    yield Finding("cpu", "slow" if found[0] == "baseline" else "ok", text)


def installed_library() -> Path | None:
    """Return the native library of the installed distribution of zerocast, or None.

    Another zerocast on Python's path, such as a clone, may hide that distribution.
    """
    if version_of("zerocast") is None:
        return None
    distribution = importlib.metadata.distribution("zerocast")
    path = Path(str(distribution.locate_file(f"zerocast/_native/{native_library.LIBRARY}")))
    return path if path.is_file() else None


def ranks() -> Iterator[Finding]:
    """Yield findings on torch.distributed's backends, mpi4py's MPI library, and the launcher."""
    yield Finding("threads", "ok", "zerocast.comm.run_in_process")
    dist = torch.distributed
    if dist.is_available():
        given = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        names = " and ".join(name for name, is_there in given.items() if is_there) or "no backend"
        yield Finding("torch.distributed", "ok", f"with {names}")
    else:
        yield Finding("torch.distributed", "missing", "this torch was built without it")
    library = mpi_library()
    yield library
    beside_python = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    launcher = beside_python or shutil.which("mpiexec")
    if launcher is None:
        yield Finding("mpiexec", "missing", "no launcher of MPI ranks is on PATH")
        return
    answer = run([launcher, "--version"])
    output = answer.stdout + answer.stderr
    kind = next((name for name, words in LAUNCHERS.items() if re.search(words, output)), None)
    if library.status == "ok" and kind is not None and kind not in library.text:
        text = (
            f"{launcher} is of {kind}, and mpi4py loads another MPI, so its jobs would have one "
            "rank each; use the launcher of mpi4py's MPI"
        )
        yield Finding("mpiexec", "wrong", text)
    else:
        yield Finding("mpiexec", "ok", f"{launcher} of {kind or 'an unknown MPI'}")


def mpi_library() -> Finding:
    """Return a finding on the MPI that mpi4py loads.

    A separate process loads it, since one that cannot be loaded may end the process.
    """
    if version_of("mpi4py") is None:
        return Finding("MPI", "missing", "mpi4py is not installed")
    answer = run([sys.executable, "-c", ASK_MPI])
    if answer.returncode == 0:
        return Finding("MPI", "ok", f"mpi4py loads {answer.stdout.strip()}")
    reason = (answer.stderr.strip().splitlines() or ["no reason"])[-1]
    return Finding("MPI", "wrong", f"mpi4py is installed and loads no MPI: {reason}")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run ``command`` for at most a minute; return code 1 if it cannot run or does not end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return subprocess.CompletedProcess(command, 1, "", "it did not end")


def gpu() -> Iterator[Finding]:
    """Yield findings on CUDA devices, their backend, and the products that run on codes."""
    if not torch.cuda.is_available():
        yield Finding("devices", "missing", "torch sees no CUDA device")
        yield Finding("products on codes", "slow", f"{_DECODED} torch sees no CUDA device")
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        text = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        yield Finding(f"cuda:{index}", "ok", text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = backend_for(torch.device("cuda", torch.cuda.current_device())).name
    warned = "; ".join(str(warning.message) for warning in caught)
    text = warned or "kernels are compiled at first use; they have run under emulation only"
    yield Finding("cuda backend", "ok" if name == "cuda" else "slow", text)
    products = {
        "FP8": availability.is_fp8_available,
        "FP8 in blocks": availability.is_fp8_block_scaling_available,
        "MXFP8": availability.is_mxfp8_available,
        "NVFP4": availability.is_nvfp4_available,
    }
    for name, asked in products.items():
        answer = asked(return_reason=True)
        is_available, reason = answer if isinstance(answer, tuple) else (answer, "")
        text = "computed on codes" if is_available else f"{_DECODED} {reason}"
        yield Finding(f"products of {name}", "ok" if is_available else "slow", text)


def casts(device: torch.device) -> Iterator[Finding]:
    """Yield findings on the sharded cast of every recipe, compared with the unsharded one."""
    for name, recipe in recipes().items():
        try:
            compared = compare_casts(recipe, device)
        except Exception as error:  # noqa: PERF203  (what fails here is what is asked for)
            yield Finding(name, "wrong", f"{type(error).__name__}: {error}")
        else:
            yield Finding(name, "ok", f"{compared:,} bytes are equal on every rank")
