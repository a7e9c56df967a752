"""A launcher that runs the CUDA kernels on the CPU, unchanged: see ``emulation.h``."""

import ctypes
import hashlib
import itertools
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zerocast.backends.cuda import Arguments, Kernel
from zerocast.backends.cuda.sources import cuda_sources

HEADER = Path(__file__).with_name("emulation.h")
ORDERS = ("forward", "reverse", "random")

needs_emulation = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None,
    reason="the emulation of CUDA takes g++ on x86-64",
)

Edit = Callable[[str], str]

# A vector access at an address that is not aligned for it ends the process, as it ends a kernel.
FLAGS = ("-std=c++17", "-O1", "-g0", "-fPIC", "-shared", "-ffp-contract=off", "-w")
SANITIZE = ("-fsanitize=alignment,bounds,shift,integer-divide-by-zero", "-fno-sanitize-recover=all")

_folder = tempfile.TemporaryDirectory(prefix="zerocast-emulation-")  # gone with the session
_builds = Path(_folder.name)
_lock = threading.Lock()  # a library's fibers are the process's: one launch at a time


class KernelFault(AssertionError):
    """The emulation has seen a kernel do what a device forbids."""


class Emulator:
    """Runs kernels as fibers; see :class:`zerocast.backends.cuda.Launcher`.

    Args:
        order: in which order threads and blocks run; the random one differs from launch to launch.
        max_grid: the most thread blocks of a launch, so that a small plan goes on to further tiles.
        edit: what is done to a kernel's source first, to plant a mistake.
        flags: for the compiler, beside FLAGS.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        order: str = "forward",
        max_grid: int = 2**31 - 1,
        edit: Edit | None = None,
        flags: tuple[str, ...] = SANITIZE,
    ) -> None:
        self.launches = 0
        self.max_grid = max_grid
        self.names: list[str] = []
        self._order = ORDERS.index(order)
        self._seeds = itertools.count(1)
        self._edit = edit
        self._flags = flags
        self._libraries: dict[str, ctypes.CDLL] = {}

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        return table.clone()

    def refresh(self, table: torch.Tensor, values: torch.Tensor) -> None:
        table.copy_(values)

    def prepare(self, kernel: Kernel) -> int:
        with _lock:
            if kernel.source not in self._libraries:
                library = _build(kernel.source, self._edit, self._flags)
                self._libraries[kernel.source] = ctypes.CDLL(str(library))
        function = getattr(self._libraries[kernel.source], kernel.name)
        return ctypes.cast(function, ctypes.c_void_p).value

    def launch(self, kernel: Kernel, handle: int, grid: int, arguments: Arguments) -> None:
        message = ctypes.create_string_buffer(1024)
        with _lock:
            self.launches += 1
            self.names.append(kernel.name)
            failed = self._libraries[kernel.source].emulation_launch(
                ctypes.c_void_p(handle), ctypes.c_uint(grid), ctypes.c_uint(kernel.threads),
                ctypes.c_void_p(arguments.address), len(arguments), self._order,
                ctypes.c_ulonglong(next(self._seeds)), message, ctypes.c_size_t(len(message)),
            )  # fmt: skip
        if failed:
            raise KernelFault(f"{kernel.name}: {message.value.decode()}")


def _build(source: str, edit: Edit | None, flags: tuple[str, ...]) -> Path:
    """The kernels of one source as a library, built once a session."""
    root = cuda_sources()
    text = (root / "kernels" / f"{source}.cu").read_text()
    if edit is not None:
        edited = edit(text)
        assert edited != text, f"the edit does not apply to {source}.cu"
        text = edited
    key = hashlib.sha256(repr((source, text, flags)).encode()).hexdigest()[:16]
    library = _builds / f"{source}-{key}.so"
    if not library.exists():
        file = library.with_suffix(".cpp")
        file.write_text(text)
        command = ["g++", *FLAGS, *flags, f"-I{root / 'include'}", "-include", str(HEADER)]
        done = subprocess.run(
            [*command, str(file), "-o", str(library)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    return library
