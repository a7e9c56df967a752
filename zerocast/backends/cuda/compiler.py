"""Compiles the kernels' sources to machine code of one architecture, by NVRTC, and keeps it on
disk.

CuPy's own compilation flushes subnormals and forgets the included headers in its cache key, so only
its low-level interface to NVRTC is used. That needs no driver and no GPU. A kernel that is a
template is instantiated by the expression that names it. What is compiled is kept in a file named
by everything that shapes it (kernel_cache.py): ranks that start together may all compile a kernel,
and each reads a file that any of them has finished.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from zerocast.backends.cuda.kernel_cache import default_cache, keep, kept
from zerocast.backends.cuda.kernel_sources import cuda_sources
from zerocast.backends.cuda.launcher import Kernel
from zerocast.errors import BackendError

FLAGS = (
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--device-as-default-execution-space",
)
"""IEEE arithmetic, as the headers demand: nothing contracted, nothing flushed, exact division; and
a lambda without annotations is the device's, which NVRTC 13.0 does not infer.
"""

OLDEST = (8, 0)
"""The lowest compute capability on which kernels run: warps have instructions that reduce
integers.
"""

REMEDY = "pip install 'zerocast[cuda]'"


def architecture(capability: tuple[int, int]) -> str:
    """Return what to compile for: (9, 0) -> ``"sm_90"``; from (10, 0) on with the architecture's
    own instructions, ``"sm_100a"``.

    Raises:
        BackendError: for a GPU that is too old.
    """
    if capability < OLDEST:
        raise BackendError(
            f"the cuda backend needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer, "
            f"got {capability[0]}.{capability[1]}; use_backend('reference') runs there."
        )
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 10 else ''}"


def import_nvrtc() -> Any:
    """Return CuPy's interface to NVRTC.

    Raises:
        BackendError: where CuPy or NVRTC is missing, with the remedy.
    """
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:  # RuntimeError: CuPy is there, NVRTC is not
        raise BackendError(
            f"the cuda backend needs CuPy and NVRTC, got '{str(error).strip()}'; {REMEDY}."
        ) from error
    return nvrtc


def compile_text(
    text: str, kernel: str, arch: str, include: Path, options: tuple[str, ...] = ()
) -> tuple[str, bytes, str]:
    """Compile one kernel to a cubin.

    Args:
        text: the source, CUDA C++.
        kernel: the expression that names the kernel in it; a template is instantiated by that.
        arch: such as ``"sm_90"``.
        include: the folder that the sources include from, ``cuda_src``.
        options: beside FLAGS.

    Returns:
        The kernel's name in the cubin, the cubin, and the compiler's log.

    Raises:
        BackendError: where it does not compile, with the compiler's log.
    """
    nvrtc = import_nvrtc()
    program = nvrtc.createProgram(text, f"{kernel.partition('<')[0]}.cu", (), ())
    flags = (f"--gpu-architecture={arch}", *FLAGS, f"--include-path={include}", *options)
    try:
        nvrtc.addNameExpression(program, kernel)
        nvrtc.compileProgram(program, flags)
        # CuPy takes the last byte, a zero as it happens, for the end of a string.
        cubin = nvrtc.getCUBIN(program) + b"\0"
        name = nvrtc.getLoweredName(program, kernel)
        log = nvrtc.getProgramLog(program).strip("\0\n")
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip("\0\n")
        raise BackendError(
            f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))} must compile the kernel {kernel} "
            f"for {arch}, got '{error}':\n{log}\nAn NVRTC that does not know {arch} is too old: "
            f"{REMEDY} --upgrade. Until then use_backend('reference') runs there."
        ) from error
    finally:
        nvrtc.destroyProgram(program)
    return name, cubin, log


def cache_key(kernel: Kernel, arch: str) -> str:
    """Return a name for the kernel's cubin: a hash of all that shapes it.

    Raises:
        BackendError: where CuPy, NVRTC or the sources are missing.
    """
    root = cuda_sources()
    parts = [str(kernel), arch, repr(FLAGS), repr(import_nvrtc().getVersion())]
    headers = sorted([*root.glob("arithmetic/*.h"), *root.glob("cuda/*.h")])
    for file in [root / "cuda" / f"{kernel.name}.cu", *headers]:
        parts += [file.relative_to(root).as_posix(), file.read_text()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"{kernel.name}-{arch}-{digest[:24]}"


def compiled(
    kernel: Kernel, arch: str, cache: Path | None = None, *, afresh: bool = False
) -> tuple[str, bytes]:
    """Return the kernel's name in its cubin, and the cubin: from the cache, or compiled and kept.

    Args:
        kernel: the kernel.
        arch: such as ``"sm_90"``.
        cache: a folder; None for :func:`default_cache`, which may be None, too.
        afresh: compile also what the cache has, and replace it.

    Raises:
        BackendError: where it is not kept and cannot be compiled.
    """
    folder = default_cache() if cache is None else cache
    file = None if folder is None else folder / f"{cache_key(kernel, arch)}.cubin"
    if file is not None and not afresh and (content := kept(file)) is not None:
        name, _, cubin = content.partition(b"\0")
        return name.decode(), cubin
    root = cuda_sources()
    text = (root / "cuda" / f"{kernel.name}.cu").read_text()
    made, cubin, _ = compile_text(text, str(kernel), arch, root)
    if file is not None:
        keep(file, made.encode() + b"\0" + cubin)
    return made, cubin
