"""Ranks that go on from call to call, for tests that decide what comes next by what was before."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from zerocast.comm import Communicator, run_in_process

Call = Callable[[Communicator], Any]
Outcome = tuple[Any, BaseException | None]


class LivingRanks:
    """A group of ``size`` threads that wait for calls until :meth:`end`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls = [queue.SimpleQueue[Call | None]() for _ in range(size)]
        self._outcomes = [
            queue.SimpleQueue[tuple[Any, BaseException | None]]() for _ in range(size)
        ]
        self._run = threading.Thread(
            target=run_in_process, args=(size, self._serve), kwargs={"timeout": 60}, daemon=True
        )
        self._run.start()

    def _serve(self, comm: Communicator) -> None:
        for call in iter(self._calls[comm.rank].get, None):
            try:
                outcome = call(comm), None
            except BaseException as error:
                outcome = None, error
            self._outcomes[comm.rank].put(outcome)

    def errors(self, call: Call) -> list[BaseException | None]:
        """By rank: what ``call(comm)`` raised."""
        return [error for _, error in self._called(call)]

    def all(self, call: Call) -> list[Any]:
        """By rank: what ``call(comm)`` returned; what a rank raises is raised."""
        outcomes = self._called(call)
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]

    def _called(self, call: Call) -> list[Outcome]:
        for calls in self._calls:
            calls.put(call)
        return [outcomes.get(timeout=300) for outcomes in self._outcomes]

    def end(self) -> None:
        """Let the threads return."""
        for calls in self._calls:
            calls.put(None)
        self._run.join()
