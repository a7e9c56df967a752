"""Calls in a process of their own, for what may write anywhere in its memory."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

P, R = ParamSpec("P"), TypeVar("R")

# Each child is a fork of a process that has imported what most of them need, and done nothing else.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.kernels.subjects"])


def in_child(function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R | None:
    """What ``function`` returns or raises in a fresh process; None where a signal ended that.

    The function, its arguments and its result are pickled.
    """
    with ProcessPoolExecutor(1, mp_context=_forks) as pool:
        try:
            return pool.submit(function, *args, **options).result()
        except BrokenProcessPool:
            return None
