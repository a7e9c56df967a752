"""A launcher that runs the CUDA kernels on the CPU, unchanged: see ``emulation.h``."""

import ctypes
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from zerocast.backends.cuda import Kernel, KernelArguments
from zerocast.backends.cuda.device import WORDS
from zerocast.backends.cuda.kernel_sources import cuda_sources
from zerocast.errors import BackendError

HEADER = Path(__file__).with_name("emulation.h")
BUILDS = "ZEROCAST_EMULATION_BUILDS"
"""Of the environment: the folder of the compiled kernels, which tests/conftest.py makes for the
session and all of its processes.
"""
ORDERS = ("forward", "reverse", "random")

needs_emulation = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None,
    reason="the emulation of CUDA takes g++ on x86-64",
)

# A vector access at an address that is not aligned for it ends the process, as it ends a kernel.
FLAGS = ("-std=c++17", "-g0", "-fPIC", "-shared", "-ffp-contract=off", "-w")
SANITIZE = ("-fsanitize=alignment,bounds,shift,integer-divide-by-zero", "-fno-sanitize-recover=all")

_lock = threading.Lock()  # a library's fibers are the process's: one launch at a time


@dataclass(frozen=True)
class Mistake:
    """In ``file``, relative to the sources, ``right`` becomes ``wrong`` where it stands for the
    ``nth`` time. Kernels of ``source`` are compiled with it, all others without.
    """

    source: str

    file: str
    right: str
    wrong: str
    nth: int = 0

    def plant(self, root: Path) -> None:
        """Make the mistake in a copy of the sources."""
        path = root / self.file
        pieces = path.read_text().split(self.right)
        assert len(pieces) > self.nth + 1, f"{self} does not apply"
        head = self.right.join(pieces[: self.nth + 1])
        path.write_text(head + self.wrong + self.right.join(pieces[self.nth + 1 :]))


class KernelFault(AssertionError):
    """The emulation has seen a kernel do what a device forbids."""


class Emulator:
    """Runs kernels as fibers; see :class:`zerocast.backends.cuda.Launcher`.

    Args:
        order: in which order threads and blocks run; the random one differs from launch to launch.
        max_grid: the most thread blocks of a launch, so that a small plan goes on to further tiles.
        mistake: planted in the sources before they are compiled.
        flags: for the compiler, beside FLAGS.

    Attributes:
        launches: how many there were, and ``names`` their kernels.
        capturing: to be set; launches run all the same, and large tables are refused.
        sent: the entries of each table that was uploaded, and ``tables`` they as long as somebody
            else keeps them.
        refreshed: how often tables were written anew.
    """

    device = torch.device("cpu")
    capturing = False

    def __init__(
        self,
        order: str = "forward",
        max_grid: int = 2**31 - 1,
        mistake: Mistake | None = None,
        flags: tuple[str, ...] = SANITIZE,
    ) -> None:
        self.launches = self.refreshed = 0
        self.max_grid = max_grid
        self.names: list[str] = []
        self.sent: list[int] = []
        self.tables: list[weakref.ref[torch.Tensor]] = []
        self._order = ORDERS.index(order)
        self._seeds = itertools.count(1)
        self._mistake = mistake
        self._flags = flags
        self._libraries: dict[Kernel, ctypes.CDLL] = {}

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        if self.capturing and table.numel() > WORDS:
            raise BackendError(f"a table of {table.numel()} words cannot be sent in a capture")
        copy = table.clone()
        self.sent.append(table.numel())
        self.tables.append(weakref.ref(copy))
        return copy

    def refresh(self, table: torch.Tensor, values: torch.Tensor) -> None:
        self.refreshed += 1
        table.copy_(values)

    def prepare(self, kernel: Kernel) -> int:
        with _lock:
            if kernel not in self._libraries:
                library = _build(kernel, self._mistake, self._flags)
                self._libraries[kernel] = ctypes.CDLL(str(library))
        return ctypes.c_void_p.in_dll(self._libraries[kernel], "emulated_kernel").value

    def launch(self, kernel: Kernel, handle: int, grid: int, arguments: KernelArguments) -> None:
        message = ctypes.create_string_buffer(1024)
        with _lock:
            self.launches += 1
            self.names.append(str(kernel))
            failed = self._libraries[kernel].emulation_launch(
                ctypes.c_void_p(handle), ctypes.c_uint(grid), ctypes.c_uint(kernel.threads),
                ctypes.c_void_p(arguments.values), arguments.words, arguments.struct_fields,
                self._order,
                ctypes.c_ulonglong(next(self._seeds)), message, ctypes.c_size_t(len(message)),
            )  # fmt: skip
        if failed:
            raise KernelFault(f"{kernel}: {message.value.decode()}")


def _build(kernel: Kernel, mistake: Mistake | None, flags: tuple[str, ...]) -> Path:
    """One kernel as a library, built once a session; a template is instantiated by naming it."""
    root = cuda_sources()
    if mistake is not None and mistake.source != kernel.name:
        mistake = None
    key = hashlib.sha256(repr((str(kernel), mistake, flags)).encode()).hexdigest()[:16]
    builds = Path(os.environ[BUILDS])
    library = builds / f"{kernel.name}-{key}.so"
    if library.exists():
        return library
    # Processes that build the same at once put the same in its place.
    made = Path(tempfile.mkdtemp(dir=builds))
    if mistake is not None:
        root = shutil.copytree(root, made / "sources")
        mistake.plant(root)
    file = made / f"{kernel.name}.cpp"
    text = (root / "cuda" / f"{kernel.name}.cu").read_text()
    file.write_text(f'{text}\nextern "C" {{ void* emulated_kernel = (void*)&{kernel}; }}\n')
    # What has a mistake runs one small case, and compiles in half the time without optimization.
    level = "-O1" if mistake is None else "-O0"
    command = ["g++", level, *FLAGS, *flags, f"-I{root}", "-include", str(HEADER)]
    done = subprocess.run(
        [*command, str(file), "-o", str(made / library.name)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return (made / library.name).replace(library)
