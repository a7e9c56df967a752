"""Who does the arithmetic: the choice of a backend for a device.

CPU tensors go to the native library, and to the reference where that is not built, with one
warning. Other devices go to the reference, which is right everywhere and fast nowhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from zerocast.backends.cpu import CpuBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.errors import BackendError, InputError
from zerocast.ops import Backend

_REFERENCE = ReferenceBackend()
_forced: ContextVar[str | None] = ContextVar("zerocast_backend", default=None)


@cache
def _cpu() -> Backend:
    try:
        return CpuBackend()
    except BackendError as error:
        warnings.warn(
            f"zerocast uses its reference backend, which is slow: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return _REFERENCE


def backend_for(device: torch.device) -> Backend:
    """The backend that serves tensors on ``device``, or the one that :func:`use_backend` forces."""
    forced = _forced.get()
    if forced == "reference":
        return _REFERENCE
    if forced == "cpu":
        if device.type != "cpu":
            raise InputError(
                f"the cpu backend serves CPU tensors, got a tensor on {device}; leave "
                "use_backend('cpu')."
            )
        return CpuBackend()
    return _cpu() if device.type == "cpu" else _REFERENCE


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the context, prepare operations with the named backend: ``"reference"`` or ``"cpu"``.

    A plan keeps the backend that it was made with. The choice belongs to this thread (or asyncio
    task).

    Raises:
        InputError: for an unknown name.
        BackendError: when the backend cannot run here, with the remedy.
    """
    if name not in ("reference", "cpu"):
        raise InputError(f"use_backend takes 'reference' or 'cpu', got {name!r}.")
    if name == "cpu":
        CpuBackend()  # raises here rather than at the first cast
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
