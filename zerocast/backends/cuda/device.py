"""The launcher of a GPU: kernels by the driver's calls, through CuPy, on torch's current stream."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

import torch

from zerocast.backends.cuda.compiler import REMEDY, architecture, compiled, import_nvrtc
from zerocast.backends.cuda.launcher import MAX_GRID, Kernel, KernelArguments
from zerocast.errors import BackendError

WRITE = Kernel("write_words", 128)
WORDS = 120
"""The bytes that one launch of WRITE writes; see ``cuda_src/cuda/write_words.cu``."""


class DeviceLauncher:
    """Launches on one GPU; see :class:`zerocast.backends.cuda.Launcher`.

    A launch goes to the stream that is torch's current one for the device at that moment, so it is
    ordered with torch's own kernels, and is recorded where that stream is being captured. Threads
    share one launcher: the backward of a layer calls it in autograd's thread.

    Args:
        device: a CUDA device with its index.

    Raises:
        BackendError: where torch sees no such GPU, it is too old, or CuPy or NVRTC is missing.
    """

    def __init__(self, device: torch.device) -> None:
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise BackendError(
                "the cuda backend needs a GPU that torch can use, got a torch that "
                + ("sees none" if torch.version.cuda else "was built without CUDA")
                + "; install the driver, and a CUDA build of torch."
            )
        assert device.type == "cuda"
        assert device.index is not None
        import_nvrtc()
        self.device = device
        self.launches = 0
        self.max_grid = MAX_GRID
        self._arch = architecture(torch.cuda.get_device_capability(device))
        self._functions: dict[Kernel, int] = {}
        # By stream on which tables were sent: an event after the latest of them.
        self._uploads: dict[int, torch.cuda.Event] = {}
        self._one_thread = threading.Lock()  # guards the uploads and counts
        self._one_loads = threading.Lock()
        self._thread = threading.local()

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        small = table.numel() <= WORDS
        if self.capturing and not small:
            raise BackendError(
                "plans, and launches for a new shape, must be prepared before a CUDA graph is "
                "captured, got a stream that is being captured; run the same calls once before the "
                "capture."
            )
        with torch.cuda.device(self.device):
            if small:
                copy = torch.empty_like(table, device=self.device)
                words = table.flatten().tolist()
                words += [0] * (WORDS - len(words))
                arguments = KernelArguments([copy.data_ptr(), table.numel()], words)
                self.launch(WRITE, self._write, 1, arguments)
            else:
                # torch keeps the pinned copy until the transfer is over.
                copy = table.pin_memory().to(self.device, non_blocking=True)
            if not self.capturing:
                stream = torch.cuda.current_stream()
                with self._one_thread:  # of two events on one stream the later one is kept
                    self._uploads[stream.cuda_stream] = stream.record_event()
        return copy

    def refresh(self, table: torch.Tensor, values: torch.Tensor) -> None:
        if self.capturing:
            raise BackendError(
                "masters must be given before a CUDA graph is captured, got other tensors in a "
                "capture; run plan.cast(master_weights) once before it, then capture plan.cast()."
            )
        table.copy_(values.pin_memory(), non_blocking=True)

    def prepare(self, kernel: Kernel) -> int:
        with torch.cuda.device(self.device), self._one_loads:
            self._make_context_current()
            try:
                if kernel not in self._functions:
                    self._functions[kernel] = self._load(kernel)
                return self._functions[kernel]
            except self._driver.CUDADriverError as error:
                raise BackendError(
                    f"the driver must load kernel {kernel} for {self._arch}, got '{error}'; a "
                    "driver older than the compiler cannot load its code: install a newer driver, "
                    "or an nvidia-cuda-nvrtc of the driver's version."
                ) from error

    def _load(self, kernel: Kernel) -> int:
        try:
            return self._function(*compiled(kernel, self._arch))
        except self._driver.CUDADriverError:  # perhaps of a kept file: try a new one
            return self._function(*compiled(kernel, self._arch, afresh=True))

    def _function(self, name: str, cubin: bytes) -> int:
        return int(self._driver.moduleGetFunction(self._driver.moduleLoadData(cubin), name))

    def launch(self, kernel: Kernel, handle: int, grid: int, arguments: KernelArguments) -> None:
        if torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                self.launch(kernel, handle, grid, arguments)
            return
        self._make_context_current()
        current = torch.cuda.current_stream()
        stream = current.cuda_stream
        # torch waits for the device before it captures, so a capture has nothing to wait for.
        if self._uploads and not self.capturing:
            self._wait_for_uploads(current)
        if stream not in arguments.streams:
            for table in arguments.tables:
                table.record_stream(current)
            arguments.streams.add(stream)
        with self._one_thread:
            self.launches += 1
        try:
            self._driver.launchKernel(
                handle, grid, 1, 1, kernel.threads, 1, 1, 0, stream, arguments.address, 0
            )
        except self._driver.CUDADriverError as error:
            raise BackendError(
                f"the driver must launch kernel {kernel} on {grid} blocks of {kernel.threads} "
                f"threads on {self.device}, got '{error}'. The error may be that of an earlier "
                "kernel of any library: run again with CUDA_LAUNCH_BLOCKING=1 to find it."
            ) from error

    def _make_context_current(self) -> None:
        """Make the context that torch uses current for the driver's calls of this thread.

        Any call of the CUDA runtime does that. But torch makes none in a thread whose device is
        already the right one, because memory comes from its cache. So the first call of autograd's
        thread may be a driver call from here.
        """
        if not getattr(self._thread, "has_context", False):
            self._cupy.runtime.setDevice(self.device.index)
            self._thread.has_context = True

    def _wait_for_uploads(self, current: torch.cuda.Stream) -> None:
        """Let ``current`` wait for the tables that were sent on other streams and are under way."""
        with self._one_thread:
            for stream, event in list(self._uploads.items()):
                if event.query():
                    del self._uploads[stream]
                elif stream != current.cuda_stream:
                    current.wait_event(event)

    @cached_property
    def _write(self) -> int:
        return self.prepare(WRITE)

    @property
    def _driver(self) -> Any:
        return self._cupy.driver

    @cached_property
    def _cupy(self) -> Any:
        try:
            from cupy import cuda
        except ImportError as error:
            raise BackendError(f"the cuda backend needs CuPy, got '{error}'; {REMEDY}.") from error
        return cuda
