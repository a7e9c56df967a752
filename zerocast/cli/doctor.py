"""doctor: what this installation finds on this machine, what is missing, slow or wrong, and why.

Every finding has a status: ``ok``; ``missing``, something optional that is not there; ``slow``,
right but slower than it could be; ``wrong``, which makes the exit code 1.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import zerocast
from zerocast.backends import availability, backend_for, native_library
from zerocast.cli.self_check import self_check
from zerocast.errors import BackendError

STATUSES = ("ok", "missing", "slow", "wrong")

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
"""Optional packages, and what they are for; those without a word are named only where they are."""

SLOW_BF16 = 4.0
"""A product in BF16 that takes so many times as long as one in FP32 is called slow."""

_DECODED = "layers multiply decoded operands, which saves memory and communication, no arithmetic:"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: what it is about.
        name: of what was looked at.
        status: one of :data:`STATUSES`.
        text: what was found, and what to do where something is to be done.
    """

    section: str
    name: str
    status: str
    text: str


def report(*, as_json: bool = False) -> tuple[str, int]:
    """The report as text or JSON, and the exit code: 1 where a finding is ``wrong``."""
    findings = [*versions(), *processor(), *backends(), *mpi(), *gpu(), *cast_on_ranks()]
    code = int(any(finding.status == "wrong" for finding in findings))
    if as_json:
        return json.dumps([asdict(finding) for finding in findings], indent=1), code
    lines = []
    for section in dict.fromkeys(finding.section for finding in findings):
        lines.append(section)
        lines += [f"  {f.status:9}{f.name:28}{f.text}" for f in findings if f.section == section]
    for status, title in (
        ("slow", "What is slow here, and why"),
        ("wrong", "What is wrong here"),
    ):
        chosen = [f"  {f.name}: {f.text}" for f in findings if f.status == status]
        lines += ["", title, *(chosen or ["  nothing that was looked at"])]
    return "\n".join(lines), code


def versions() -> Iterator[Finding]:
    """Of zerocast, Python, torch, and of packages that zerocast works with."""
    section = "Versions"
    place = Path(zerocast.__file__).parent
    yield Finding(section, "zerocast", "ok", f"{zerocast.__version__} in {place}")
    yield Finding(section, "Python", "ok", f"{platform.python_version()}, {sys.executable}")
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Finding(section, "torch", "ok", f"{torch.__version__}, {build}")
    for package, use in PACKAGES.items():
        installed = version_of(package)
        if installed or use:
            yield Finding(section, package, "ok" if installed else "missing", installed or use)


def version_of(package: str) -> str | None:
    """The version of an installed distribution; None where there is none of this name."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> Iterator[Finding]:
    """The CPU: cores, threads, and how fast it multiplies BF16."""
    section = "Processor"
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    system = f"{platform.system()} on {platform.machine()}"
    yield Finding(section, "system", "ok", f"{system}, {cores} cores for this process")
    threads = torch.get_num_threads()
    if threads > cores:
        text = f"{threads} threads share {cores} cores; set OMP_NUM_THREADS={cores} or less"
        yield Finding(section, "threads", "slow", text)
    else:
        text = f"{threads} a process; with several ranks here, set OMP_NUM_THREADS to cores / ranks"
        yield Finding(section, "threads", "ok", text)
    ratio = _product_time(torch.bfloat16) / _product_time(torch.float32)
    text = f"a product of BF16 matrices takes {ratio:.1f} times as long as one of FP32"
    if ratio > SLOW_BF16:
        text += "; run models in FP32 on this CPU"
    yield Finding(section, "BF16", "slow" if ratio > SLOW_BF16 else "ok", text)


def _product_time(dtype: torch.dtype) -> float:
    """Seconds of the fastest of ten products of small matrices."""
    matrix, times = torch.ones(256, 256, dtype=dtype, device="cpu"), []
    for _ in range(10):
        start = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - start)
    return min(times)


def backends() -> Iterator[Finding]:
    """Who casts CPU tensors, and whether somebody could build what is missing."""
    section = "Backends"
    yield Finding(section, "reference", "ok", "plain torch: right everywhere and fast nowhere")
    try:
        path = native_library.find_library()
        found = native_library.instruction_sets(native_library.load())
    except BackendError as error:
        text = f"CPU tensors are cast by the reference backend, because {error}"
        if (built := installed_library()) is not None:
            text += (
                f" Or start Python in another directory: it took zerocast from this one, and the "
                f"installed zerocast has {built}."
            )
        yield Finding(section, "cpu", "slow", text)
        compiler = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
        yield (
            Finding(section, "compiler", "ok", f"{compiler}, which can build the native library")
            if compiler
            else Finding(section, "compiler", "missing", "no C++ compiler is on PATH to build it")
        )
        return
    text = f"native, {found[0]} of {', '.join(found)} that this machine runs; {path}"
    status = "ok" if found[0] != "baseline" else "slow"
    if status == "slow":
        text += "; without AVX2 its loops have no vector instructions"
    yield Finding(section, "cpu", status, text)


def installed_library() -> Path | None:
    """The native library of the zerocast that pip installed, which another one on Python's path, as
    that of a clone, may hide; None where there is none.
    """
    try:
        distribution = importlib.metadata.distribution("zerocast")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"zerocast/_native/{native_library.LIBRARY}")))
    return path if path.is_file() else None


def mpi() -> Iterator[Finding]:
    """torch.distributed's backends; the MPI library that mpi4py loads, and the launcher."""
    section, dist = "Ranks", torch.distributed
    yield Finding(section, "threads", "ok", "zerocast.comm.run_in_process")
    if dist.is_available():
        given = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        names = " and ".join(name for name, is_there in given.items() if is_there) or "no backend"
        yield Finding(section, "torch.distributed", "ok", f"with {names}")
    else:
        text = "this torch was built without it"
        yield Finding(section, "torch.distributed", "missing", text)
    library = mpi_library()
    yield library
    launcher = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which(
        "mpiexec"
    )
    if launcher is None:
        yield Finding(section, "mpiexec", "missing", "no launcher of MPI ranks is on PATH")
        return
    said = _said_by([launcher, "--version"])
    families = {"MPICH": "HYDRA|MPICH", "Open MPI": "Open MPI|OpenRTE|PRRTE", "Intel MPI": "Intel"}
    kinds = [name for name, pattern in families.items() if re.search(pattern, said)]
    kind = "Intel MPI" if "Intel MPI" in kinds else (kinds or ["an unknown MPI"])[0]
    if library.status == "ok" and kind in families and kind not in library.text:
        text = (
            f"{launcher} is that of {kind}, and mpi4py loads another: it would start jobs of one "
            "rank; use the launcher of mpi4py's MPI"
        )
        yield Finding(section, "mpiexec", "wrong", text)
    else:
        yield Finding(section, "mpiexec", "ok", f"{launcher} of {kind}")


def mpi_library() -> Finding:
    """The MPI that mpi4py loads, asked in another process: one that cannot be loaded may end it."""
    if version_of("mpi4py") is None:
        return Finding("Ranks", "MPI", "missing", "mpi4py is not installed")
    ask = (
        "import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False\n"
        "from mpi4py import MPI\n"
        "print(MPI.get_vendor()[0], '.'.join(map(str, MPI.get_vendor()[1])))"
    )
    done = _run([sys.executable, "-c", ask])
    if done is not None and done.returncode == 0:
        return Finding("Ranks", "MPI", "ok", f"mpi4py loads {done.stdout.strip()}")
    said = (done.stderr.strip().splitlines() or ["no reason"])[-1] if done else "it did not end"
    return Finding("Ranks", "MPI", "wrong", f"mpi4py is installed and loads no MPI: {said}")


def _said_by(command: list[str]) -> str:
    done = _run(command)
    return "" if done is None else done.stdout + done.stderr


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    """None where it cannot run, or does not end within a minute."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def gpu() -> Iterator[Finding]:
    """CUDA devices, the backend that serves them, and which products they compute on codes."""
    section = "GPU"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            text = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
            yield Finding(section, f"cuda:{index}", "ok", text)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            name = backend_for(torch.device("cuda", torch.cuda.current_device())).name
        said = "; ".join(str(warning.message) for warning in caught)
        text = said or "kernels are compiled at first use; they have run under emulation only"
        yield Finding(section, "cuda backend", "ok" if name == "cuda" else "slow", text)
    else:
        yield Finding(section, "devices", "missing", "torch sees no CUDA device")
        yield Finding(section, "products on codes", "slow", f"{_DECODED} torch sees no CUDA device")
        return
    products = {
        "FP8": availability.is_fp8_available,
        "FP8 in blocks": availability.is_fp8_block_scaling_available,
        "MXFP8": availability.is_mxfp8_available,
        "NVFP4": availability.is_nvfp4_available,
    }
    for name, asked in products.items():
        answer = asked(return_reason=True)
        is_available, reason = answer if isinstance(answer, tuple) else (answer, "")
        status = "ok" if is_available else "slow"
        text = "computed on codes" if is_available else f"{_DECODED} {reason}"
        yield Finding(section, f"products of {name}", status, text)


def cast_on_ranks() -> Iterator[Finding]:
    """The self-check, on the CPU and, where there is one, on the current CUDA device."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        for name, outcome in self_check(torch.device(device)).items():
            section = f"Cast on 3 ranks, compared with the unsharded cast ({device})"
            text = outcome.difference or f"{outcome.compared:,} bytes are equal on every rank"
            yield Finding(section, name, "wrong" if outcome.difference else "ok", text)
