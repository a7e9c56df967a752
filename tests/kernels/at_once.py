"""Launches of the CPU library from several threads at once, for the thread sanitizer.

Threads of Python run the tests' subjects, two of them the same ones over the same masters. Their
launches meet, and are started together by threads of C++, so that no lock of Python lies between
them. Tables of numerics are shared, too.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.backends.test_changes import check
from tests.kernels import subjects
from tests.support.claims import assert_same_tensors
from tests.support.operations import Written
from zerocast.backends import cpu, native_library
from zerocast.backends.cpu import CpuBackend

CALLERS, TEAM, WORDS = 4, 3, 5
"""Threads that launch, threads of each launch, and words that a function takes at most."""


class Together:
    """A native library, a call of which waits for those of all other callers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._calls: list[list[int]] = []
        self.barrier = threading.Barrier(CALLERS, self._launch)

    def __getattr__(self, name: str) -> Callable[..., None]:
        address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value

        def call(*arguments: Any) -> None:
            words = [
                each.value if isinstance(each, ctypes.c_int64) else ctypes.addressof(each)
                for each in arguments
            ]
            self._calls.append([address, *words, *[0] * (WORDS - len(words))])
            self.barrier.wait(timeout=300)

        return call

    def _launch(self) -> None:
        words = [word for call in self._calls for word in call]
        self._calls.clear()
        self._library.launch_at_once((ctypes.c_int64 * len(words))(*words), CALLERS)


def run(path: Path, names: Sequence[str] = ()) -> None:
    """Run the subjects of these names, or all and the comparisons, on the library at ``path``: they
    write from every thread what the installed library writes on one.
    """
    subjects.marked = cache(subjects.marked)
    table_of = cpu._table
    shared: dict[tuple[int, ...], Any] = {}  # what holds no address is the same for all
    cpu._table = lambda rows: (
        shared.setdefault(tuple(rows[0]), table_of(rows)) if len(rows) == 1 else table_of(rows)
    )
    chosen = [(name, subjects.SUBJECTS[name]) for name in names or subjects.SUBJECTS]
    backend = CpuBackend("baseline", threads=TEAM)
    backend._library = library = Together(native_library.open_library(path))  # type: ignore[assignment]
    written: list[dict[str, Written]] = [{} for _ in range(CALLERS)]
    errors: list[BaseException] = []

    def call(caller: int) -> None:
        turn = caller // 2 * len(chosen) // 2
        try:
            for name, subject in chosen[turn:] + chosen[:turn]:
                written[caller][name] = subject(backend)
            if not names:
                check(backend)
        except BaseException as error:
            errors.append(error)
            library.barrier.abort()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for name, subject in chosen:
        expected = subject(CpuBackend(threads=1))
        for found in written:
            assert_same_tensors(found[name], expected, name)
