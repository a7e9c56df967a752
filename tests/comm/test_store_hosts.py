"""Ranks of gloo end in time whatever becomes of the process that serves their store: its calls are
made in C++, where nothing ends them.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerocast
from zerocast.comm.failure import GRACE
from zerocast.comm.store_thread import StoreThread

STARTS = 240
"""Seconds in which a process has started, on a machine that does much else."""


class Process:
    """A process of store_ranks.py; what it prints is read here line by line."""

    def __init__(self, port: int, serves: bool, rank: int, size: int, timeout: float, does: str):
        given = [port, "serves" if serves else "uses", rank, size, timeout, does]
        program = Path(__file__).with_name("store_ranks.py")
        root = str(Path(zerocast.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, str(program), *map(str, given)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def line(self, seconds: float = STARTS) -> str:
        """The next that it prints, within so many seconds."""
        limit = threading.Timer(seconds, self.process.kill)
        limit.start()
        try:
            assert self.process.stdout is not None
            return self.process.stdout.readline().strip() or "nothing"
        finally:
            limit.cancel()


class Job:
    """The processes of one group, by rank, and a port of their own."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.processes: list[Process] = []

    def start(self, does: list[str], serving: int, timeout: float) -> list[Process]:
        """Start one process for each of ``does``, and wait until its collectives run."""
        size = len(does) - ("serves" in does)
        self.processes = [
            Process(self.port, rank == serving, rank, size, timeout, each)
            for rank, each in enumerate(does)
        ]
        for each in self.processes:
            assert each.line() == "store"
        for each, what in zip(self.processes, does, strict=True):
            assert what == "serves" or each.line() == "ready"
        return self.processes


@pytest.fixture
def job() -> Iterator[Job]:
    """A job, all of whose processes end with the test."""
    made = Job()
    yield made
    for each in made.processes:
        each.process.kill()
        each.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("serving", [0, 1])
def test_a_rank_that_is_stopped_is_named_after_the_timeout(job: Job, serving: int) -> None:
    """Whether it serves the store or not; the process ends, too."""
    stopped, other = job.start(["forever", "forever"], serving, timeout=3)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    said = other.line(3 + 10 + 20)
    assert said.startswith("PeerTimeoutError: ")
    assert "timeout of 3 s: rank 0 neither called it nor answered; rank 1 waited in it." in said
    assert other.process.wait(60) == 0


@pytest.mark.slow
def test_an_interrupt_ends_a_rank_whose_store_does_not_answer(job: Job) -> None:
    """Long before its timeout."""
    stopped, other = job.start(["forever", "forever"], 0, timeout=600)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    time.sleep(2)  # so that it waits
    other.process.send_signal(signal.SIGINT)
    assert other.line(2 + 20).startswith("KeyboardInterrupt")


@pytest.mark.slow
@pytest.mark.parametrize("serving", [0, 1])
def test_a_rank_that_is_killed_is_noticed_at_once(job: Job, serving: int) -> None:
    """Long before the timeout, whether it serves the store or not."""
    killed, other = job.start(["forever", "forever"], serving, timeout=600)
    killed.process.kill()
    assert re.match("PeerFailedError: .*rank 0 neither called it nor answered", other.line(30))
    assert other.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("serving", [0, 1])
def test_what_another_rank_raised_is_heard_through_its_store(job: Job, serving: int) -> None:
    """Long before the timeout, and in its words."""
    raises, other = job.start(["raises", "forever"], serving, timeout=600)
    assert raises.line() == "OSError: planted"
    assert re.match(r"PeerFailedError: .*: rank 0 raised OSError: planted\. ", other.line(30))
    assert [each.process.wait(60) for each in job.processes] == [0, 0]


@pytest.mark.slow
def test_ranks_that_wait_for_nobody_ask_no_store(job: Job) -> None:
    """Collectives go on and processes end while its host is stopped."""
    *ranks, server = job.start(["ends", "ends", "serves"], 2, timeout=600)
    os.kill(server.process.pid, signal.SIGSTOP)
    for each in ranks:
        assert each.process.stdin is not None
        each.process.stdin.write("\n")
        each.process.stdin.flush()
    assert [each.line() for each in ranks] == ["end", "end"]
    assert [each.process.wait(60) for each in ranks] == [0, 0]


def test_a_call_that_does_not_end_is_not_waited_for() -> None:
    """Nor is one behind it; both are made as soon as they can be, and the thread ends."""
    free, made = threading.Event(), list[int]()
    thread = StoreThread()

    def last() -> None:
        made.append(threading.get_ident())

    thread.call(lambda: made.clear() if free.wait() else None, 0.01)
    assert not thread.is_idle
    thread.call(last, 0.01)
    assert made == []
    free.set()
    thread.call(last, 60)
    assert thread.is_idle
    assert len(made) == 2
    [own] = [each for each in threading.enumerate() if each.ident == made[0]]
    del thread
    own.join(60)
    assert not own.is_alive()


def test_a_store_that_is_gone_is_called_no_more() -> None:
    """torch writes a page for each call in vain."""
    calls = []

    def gone() -> None:
        calls.append(1)
        raise RuntimeError("Connection reset by peer")

    thread = StoreThread()
    for _ in range(3):
        thread.call(gone, GRACE * 60)
        assert thread.is_idle
    assert calls == [1]
