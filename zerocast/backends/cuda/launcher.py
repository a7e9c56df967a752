"""Launcher: the one interface through which kernels run.

:class:`zerocast.backends.cuda.CudaBackend` makes tables, grids and arguments; a launcher runs a
kernel on them. On a device that is :class:`zerocast.backends.cuda.device.DeviceLauncher`. The tests
run the same kernels, tables, grids and arguments on a CPU, through another launcher.

Every argument of a kernel is 64 bits wide, an address or an int64, or a struct of such fields, and
keeps its value from launch to launch, except a buffer that is passed to a launch; so an argument
table is made once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

MAX_GRID = 2**31 - 1
"""The most thread blocks of one launch; a kernel visits further tiles in a loop."""


class KernelArguments:
    """The arguments of one kernel, as ``cuLaunchKernel`` takes them: addresses of their values.

    Args:
        words: those that are single 64-bit values.
        struct: the 64-bit fields of a last one, a struct that the kernel takes by value; none
            where it takes no struct.
        tables: the uploaded tables that the kernel reads.
        alive: any further objects to keep alive with the arguments.

    Attributes:
        words, struct_fields: the numbers of both.
        tables: the tables that were given.
        streams: those on which torch knows that the tables are read; the launcher notes them.
    """

    def __init__(
        self,
        words: Sequence[int],
        struct: Sequence[int] = (),
        tables: Sequence[torch.Tensor] = (),
        alive: object = None,
    ) -> None:
        self.tables, self.streams, self._alive = tables, set[int](), alive
        self.words, self.struct_fields = len(words), len(struct)
        self._values = (ctypes.c_int64 * (len(words) + len(struct)))(*words, *struct)
        first, size = ctypes.addressof(self._values), ctypes.sizeof(ctypes.c_int64)
        count = len(words) + bool(struct)
        self._pointers = (ctypes.c_void_p * count)(*(first + i * size for i in range(count)))

    def replace(self, word: int, value: int) -> None:
        """Set one of the single values for the next launch: the address of a buffer that exists for
        one step only.
        """
        self._values[word] = value

    @property
    def address(self) -> int:
        """The address of the array of pointers."""
        return ctypes.addressof(self._pointers)

    @property
    def values(self) -> int:
        """The address of the values, one after the other."""
        return ctypes.addressof(self._values)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: a function of ``cuda_src/cuda/<name>.cu``, instantiated where it is a template.

    Attributes:
        name: the name of the function and of its file.
        threads: the number of threads of a block.
        template: the arguments of the template, as C++ writes them.
    """

    name: str
    threads: int
    template: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the C++ expression that names it."""
        return f"{self.name}<{', '.join(self.template)}>" if self.template else self.name


class Launcher(Protocol):
    """A class that runs kernels and has the memory of their tables. Threads may share one object.

    Attributes:
        device: where the tensors must be that the tables point to.
        launches: kernels launched so far.
        max_grid: the most thread blocks that one launch has.
        capturing: whether launches are being recorded in a graph, and nothing runs.
    """

    device: torch.device
    launches: int
    max_grid: int

    @property
    def capturing(self) -> bool: ...

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host table that kernels can read: complete before any later launch, on
        any stream, without a wait on the host. In a capture, it is complete for the launches of the
        same capture.

        Raises:
            BackendError: in a capture, for a table that cannot be recorded.
        """

    def refresh(self, table: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite an uploaded table by a host tensor of the same shape, in the order of the
        launches around it and without waiting.
        """

    def prepare(self, kernel: Kernel) -> int:
        """Make ``kernel`` ready to be launched; return the handle for :meth:`launch`.

        Raises:
            BackendError: where it cannot be compiled or loaded, with its name and the remedy.
        """

    def launch(self, kernel: Kernel, handle: int, grid: int, arguments: KernelArguments) -> None:
        """Run ``grid`` thread blocks, after everything launched before on this thread's current
        stream. The memory of the tables is not used again before this stream is done with them,
        even if they are freed meanwhile.

        Raises:
            BackendError: where the driver refuses, with the kernel's name.
        """
