"""Chooses the backend that does the arithmetic on a device.

CPU tensors go to the native library, CUDA tensors to our kernels. If those cannot run, the
reference backend is used, which is slow, with one warning. It also serves all other devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from zerocast.arguments import shown
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.cuda import CudaBackend
from zerocast.backends.cuda.device import DeviceLauncher
from zerocast.backends.reference import ReferenceBackend
from zerocast.errors import BackendError, InputError
from zerocast.numerics import Backend

NAMES = ("reference", "cpu", "cuda")
"""The backends that :func:`use_backend` knows by name."""

_REFERENCE = ReferenceBackend()
_forced: ContextVar[str | Backend | None] = ContextVar("zerocast_backend", default=None)


def backend_for(device: torch.device) -> Backend:
    """Return the backend that serves tensors on ``device``, or the one that :func:`use_backend`
    forces.
    """
    forced = _forced.get()
    if forced is None:
        return _default(device.type, _index(device)) if device.type in NAMES else _REFERENCE
    if not isinstance(forced, str):
        return forced
    if forced not in ("reference", device.type):
        raise InputError(
            f"the {forced} backend takes {forced.upper()} tensors, got a tensor on {device}; leave "
            f"the context use_backend({forced!r})."
        )
    return _named(forced, _index(device))


@contextmanager
def use_backend(backend: str | Backend) -> Iterator[None]:
    """Prepare operations within the context with this backend: ``"reference"``, ``"cpu"``,
    ``"cuda"``, or a user's object (:class:`zerocast.numerics.Backend`).

    A plan keeps the backend that it was made with. The choice belongs to this thread (or asyncio
    task).

    Raises:
        InputError: for an unknown name.
        BackendError: when the backend cannot run here, with the remedy.
    """
    if isinstance(backend, str):
        if backend not in NAMES:
            raise InputError(
                f"use_backend takes {', '.join(map(repr, NAMES[:-1]))} or {NAMES[-1]!r}, got "
                f"{backend!r}."
            )
        _named(backend, None)  # raises here rather than at the first cast
    elif isinstance(backend, type) or not isinstance(backend, Backend):
        raise InputError(
            f"use_backend takes the name of a backend, {', '.join(map(repr, NAMES))}, or an object "
            f"with the methods of zerocast.numerics.Backend, got {shown(backend)}."
        )
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def _index(device: torch.device) -> int | None:
    """Return the index of a GPU; ``"cuda"`` without one means the current GPU."""
    if device.type != "cuda" or device.index is not None:
        return device.index
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _named(name: str, index: int | None) -> Backend:
    if name == "reference":
        return _REFERENCE
    return CpuBackend() if name == "cpu" else _cuda(index or 0)


@cache
def _cuda(index: int) -> Backend:
    """Return the one backend of a GPU, so that kernels are loaded once."""
    return CudaBackend(DeviceLauncher(torch.device("cuda", index)))


@cache
def _default(name: str, index: int | None) -> Backend:
    try:
        return _named(name, index)
    except BackendError as error:
        warnings.warn(
            f"zerocast uses its reference backend, which is slow: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return _REFERENCE
