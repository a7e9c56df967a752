"""Runs torch on the CPU without flushing subnormals, whatever the caller has set.

``torch.set_flush_denormal`` sets a flag of the calling thread. A worker of torch's thread pool has
the flag that its creator had when the pool grew, and keeps it. So one large operation can flush in
some of its elements and not in others, and clearing the flag here would not reach the workers.
"""

import sys
import threading
from collections.abc import Callable
from functools import wraps

import torch

GRAIN = 1 << 15
"""The fewest elements of an element-wise operation that torch shares among its threads."""

_lock = threading.Lock()  # the number of threads is the process's: one launch at a time changes it


def keeping_subnormals(launch: Callable[[], None]) -> Callable[[], None]:
    """Return ``launch`` with every subnormal kept: in this thread alone where another flushes."""

    @wraps(launch)
    def guarded() -> None:
        if not _any_thread_flushes():
            launch()
            return
        with _lock:
            flushed, threads = _this_thread_flushes(), torch.get_num_threads()
            torch.set_flush_denormal(False)
            torch.set_num_threads(1)
            try:
                launch()
            finally:
                torch.set_num_threads(threads)
                torch.set_flush_denormal(flushed)

    return guarded


def _this_thread_flushes() -> bool:
    # The flag also controls the instructions of Python's floats, and this costs no launch.
    return sys.float_info.min / 2 == 0.0


def _any_thread_flushes() -> bool:
    """Say whether any of the threads that share an operation flushes subnormals."""
    smallest = torch.finfo(torch.float32).tiny
    per_thread = torch.full(
        (torch.get_num_threads() * GRAIN,), smallest, dtype=torch.float32, device="cpu"
    )
    return not bool((per_thread / 2).all())
