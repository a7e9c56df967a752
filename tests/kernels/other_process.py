"""The CPU library in another process, whose processor may be an emulated one.

A call's tables, and the storages that they point to, are sent to ``other_process.cpp``, which calls
the function there and sends them back. All else (plans, collectives, expected bytes) stays here.
"""

import ctypes
import struct
import subprocess
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerocast.backends import cpu
from zerocast.backends.cpu import CpuBackend
from zerocast.numerics import Masters, Numerics

PROGRAM = Path(__file__).with_suffix(".cpp")
PLACE = 0x2000_0000_0000
"""The address of the memory in the other process."""
LINE = 64
"""Bytes: what is sent keeps its alignment within them."""

storages: dict[int, tuple[int, StorageWeakRef]] = {}
"""By address: sizes of the storages that tables may point to, as long as these live."""


def note(tensor: torch.Tensor | None) -> None:
    """Remember the storage of a tensor."""
    if tensor is not None and tensor.numel():
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes(), StorageWeakRef(storage)


_found_address = cpu._address


def address(tensor: torch.Tensor | None) -> int:
    """Return what the backend's own function returns, and remember the storage.

    It takes that function's place while a process is open, and no longer: it makes objects, which
    other tests count.
    """
    note(tensor)
    return _found_address(tensor)


class SentMemory:
    """What one call sends: tables and storages, end to end.

    Args:
        lists: addresses of the storages that hold addresses.
    """

    def __init__(self, lists: set[int]) -> None:
        for gone in [at for at, (_, of) in storages.items() if of.expired()]:
            del storages[gone]
        self._known = sorted(storages)
        self._lists = lists
        self.bytes = bytearray()
        self.places: dict[int, int] = {}

    def put(self, content: bytes, at: int) -> int:
        """Append what lies at address ``at`` here; return its place."""
        place = -(-len(self.bytes) // LINE) * LINE + at % LINE
        self.bytes += bytes(place - len(self.bytes)) + content
        return place

    def moved(self, content: bytes) -> bytes:
        """Words, with the addresses among them as they are in the other process."""
        return array("q", map(self._moved, array("q", content))).tobytes()

    def _moved(self, word: int) -> int:
        i = bisect_right(self._known, word) - 1
        start = self._known[i] if i >= 0 else 0
        if not start or word > start + storages[start][0]:
            return word
        if start not in self.places:
            content = ctypes.string_at(start, storages[start][0])
            if start in self._lists:
                content = self.moved(content)
            self.places[start] = self.put(content, start)
        return PLACE + self.places[start] + word - start

    def take_back(self) -> None:
        """Write the storages as they came back, but those that hold addresses."""
        sent = (ctypes.c_char * len(self.bytes)).from_buffer(self.bytes)
        for start in self.places.keys() - self._lists:
            place = ctypes.addressof(sent) + self.places[start]
            ctypes.memmove(start, place, storages[start][0])


class OtherProcess:
    """Stands for the library that ctypes loads, from its making to :meth:`close`; one at a time.

    Args:
        command: runs the program on a library.
    """

    def __init__(self, command: Sequence[str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, bufsize=0, **pipes)
        self.instruction_sets = self.process.stdout.readline().decode().split()
        if not self.instruction_sets:
            self._ended()
        self.lists: set[int] = set()
        cpu._address = address

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            memory = SentMemory(self.lists)
            words = [
                each.value
                if isinstance(each, ctypes.c_int64)
                else PLACE + memory.put(memory.moved(bytes(each)), 0)
                for each in arguments
            ]
            words += [0] * (5 - len(words))
            head = struct.pack("64sq5q", name.encode(), len(memory.bytes), *words)
            for rest in (memoryview(head), memoryview(memory.bytes)):
                while rest:
                    rest = rest[self.process.stdin.write(rest) :]
            self._receive(memoryview(memory.bytes))
            memory.take_back()

        return call

    def _receive(self, rest: memoryview) -> None:
        while rest:
            if not (got := self.process.stdout.readinto(rest)):
                self._ended()
            rest = rest[got:]

    def _ended(self) -> NoReturn:
        self._end()
        raise RuntimeError(f"{self.process.args} ended with {self.process.returncode}.")

    def close(self) -> None:
        """End the process, and give the backend its function back."""
        cpu._address = _found_address
        storages.clear()
        self._end()

    def _end(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class OtherCpuBackend(CpuBackend):
    """The CPU backend by a library in another process, on its first instruction set."""

    name = "cpu in another process"

    def __init__(self, library: OtherProcess, threads: int | None = 1) -> None:
        self._library = library  # type: ignore[assignment]
        self.isa, self.threads = library.instruction_sets[0], threads

    def _launch(
        self,
        operation: str,
        numerics: Numerics | None,
        rows: list[list[int]],
        operands: Sequence[object],
    ) -> Callable[..., None]:
        launch = super()._launch(operation, numerics, rows, operands)
        masters = [each for each in operands if isinstance(each, Masters)]

        def run(*given: Any) -> None:
            for each in masters:
                for tensor in (each.table, *each.tensors):
                    note(tensor)
            self._library.lists = {each.table.data_ptr() for each in masters}
            launch(*given)

        return run
