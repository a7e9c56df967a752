"""Settings of a process or a thread that zerocast must not follow, each put back afterwards."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from zerocast.tensors.cast_steps import CastSteps


@contextmanager
def changed(put: Callable[[Any], object], before: Any, value: Any) -> Iterator[None]:
    """``value`` is put there, and ``before`` afterwards."""
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """What a factory without a dtype makes."""
    return changed(torch.set_default_dtype, torch.get_default_dtype(), dtype)


def deterministic() -> AbstractContextManager[None]:
    """Operations that are not deterministic are refused, and fresh memory is filled with garbage:
    NaN, or the largest integer.
    """
    assert torch.utils.deterministic.fill_uninitialized_memory
    is_on = torch.are_deterministic_algorithms_enabled()
    return changed(torch.use_deterministic_algorithms, is_on, True)


def two_threads() -> AbstractContextManager[None]:
    """An operation on many elements is shared between two threads."""
    return changed(torch.set_num_threads, torch.get_num_threads(), 2)


@contextmanager
def steps_of_casts() -> Iterator[list[str]]:
    """Those that are run meanwhile."""
    ran: list[str] = []
    run = CastSteps.run

    def recorded(self: CastSteps, *names: str) -> None:
        ran.extend(names)
        run(self, *names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CastSteps, "run", recorded)
        yield ran
