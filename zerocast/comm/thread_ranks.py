"""run_in_process: calls a function on ranks that are threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from zerocast.comm.failure import DEFAULT_TIMEOUT, check_timeout, name
from zerocast.comm.in_process import InProcessCommunicator
from zerocast.comm.rendezvous import ThreadGroup, ThreadWorld, one_error
from zerocast.errors import InputError, PeerTimeoutError

T = TypeVar("T")


def run_in_process(
    world_size: int,
    fn: Callable[[InProcessCommunicator], T],
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> list[T]:
    """Call ``fn(comm)`` on every rank of a new group of threads.

    Every thread runs in a copy of the caller's context (context variables, so ``use_backend`` too)
    and computes with one torch thread, so results do not depend on how many ranks share the
    machine. What torch keeps for each thread (``no_grad``, ``autocast``) has its default there. All
    ranks share torch's default random generator, so draw from another one.

    Args:
        world_size: the number of ranks, 1 or more.
        timeout: the seconds that a rank waits for the others in a collective. Once a rank has
            failed, a rank that does not return within this time is left running in its (daemon)
            thread.

    Returns:
        What ``fn`` returned, in rank order.

    Raises:
        InputError: for a wrong ``world_size``.
        RankMismatchError: where ranks called collectives that do not fit together.
        PeerTimeoutError: where a rank did not come to a collective in time, or is left behind.
        BaseException: what ``fn`` raised on the lowest rank whose error did not follow from another
            rank's; ranks that waited for it are released. Different errors of further ranks are its
            context, so a traceback shows them all.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise InputError(f"run_in_process takes a world_size of 1 or more, got {world_size!r}.")
    if not callable(fn):
        raise InputError(f"run_in_process takes a function of a rank's communicator, got {fn!r}.")
    world = ThreadWorld(world_size, check_timeout(timeout))
    group = ThreadGroup(world, range(world_size))
    results: list[Any] = [None] * world_size
    errors: dict[int, BaseException] = {}

    def play(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            results[rank] = fn(InProcessCommunicator(group, rank))
            world.leave(rank)
        except BaseException as error:  # SystemExit and KeyboardInterrupt must not hang the others
            errors[rank] = error
            world.fail(f"rank {rank}", error)

    threads = [
        threading.Thread(
            target=copy_context().run, args=(play, rank), name=f"rank {rank}", daemon=True
        )
        for rank in range(world_size)
    ]
    with _torch_threads_kept():
        try:
            for thread in threads:
                thread.start()
            stuck = _join(threads, world)
        except BaseException as error:  # Ctrl-C in the caller: let no rank wait for others
            world.fail("the caller", error)
            raise
    if errors:
        raise one_error(errors, world.released)
    if stuck:
        raise PeerTimeoutError(
            f"{name(stuck)} of {world_size} did not return within {world.timeout:g} s after other "
            "ranks had failed."
        )
    return results


def _join(threads: Sequence[threading.Thread], world: ThreadWorld) -> list[int]:
    """Wait for all threads, or as long as the timeout once their world is broken; return the ranks
    that then still run.
    """
    for thread in threads:
        while thread.is_alive() and time.monotonic() < world.broken_at + world.timeout:
            thread.join(0.5)
    return [rank for rank, thread in enumerate(threads) if thread.is_alive()]


class _Runs:
    """The runs under way in this process, and how many threads torch had before the first."""

    lock = threading.Lock()
    count = 0
    torch_threads = 1


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """Leave torch's number of threads as it was, which is one for all runs of the process."""
    with _Runs.lock:
        if not _Runs.count:
            _Runs.torch_threads = torch.get_num_threads()
        _Runs.count += 1
    try:
        yield
    finally:
        with _Runs.lock:
            _Runs.count -= 1
            torch.set_num_threads(_Runs.torch_threads)
