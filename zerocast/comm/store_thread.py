"""StoreThread: makes the calls of a torch store in a thread, because they can last without limit.

Where the host of a TCPStore is stopped or unreachable, a call waits in C++ until TCP times out,
some 15 minutes, and no interrupt ends it. Meanwhile it leaves other threads the GIL. So a rank
passes its calls to this thread, and waits for them as long as it wants to. Without calls the thread
sleeps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

_Calls: TypeAlias = "SimpleQueue[tuple[Callable[[], None], threading.Event] | None]"

_LAST = 1.0
"""The most seconds for which the end of a group, or of the interpreter, waits for the thread."""


class StoreThread:
    """A thread that makes one call after the other, and ends with this object."""

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        self._last = threading.Event()
        self._last.set()
        # A daemon, because the interpreter does not end before other threads.
        thread = threading.Thread(
            target=_serve, args=(self._calls,), name="zerocast store", daemon=True
        )
        thread.start()
        weakref.finalize(self, _end, self._calls, thread)

    @property
    def is_idle(self) -> bool:
        """Whether all calls have been made."""
        return self._last.is_set()

    def call(self, function: Callable[[], None], seconds: float) -> None:
        """Call ``function`` in the thread, after all before it; wait at most ``seconds`` for it.

        An exception, such as the :class:`RuntimeError` that torch raises where the store is gone,
        is dropped, and no further call is made.
        """
        self._last = done = threading.Event()
        self._calls.put((function, done))
        done.wait(seconds)


def _serve(calls: _Calls) -> None:
    """Make ``calls`` until one is None."""
    is_gone = False
    while (given := calls.get()) is not None:
        function, done = given
        if not is_gone:
            try:
                function()
            except Exception:
                is_gone = True
        done.set()
        del given, function, done  # else they keep objects alive while the thread sleeps


def _end(calls: _Calls, thread: threading.Thread) -> None:
    """End the thread. One that returns from C++ after the interpreter aborts the process."""
    calls.put(None)
    if thread is not threading.current_thread():  # garbage may be collected in it, too
        thread.join(_LAST)
