"""Asynchronous saves: a thread writes copies while training continues."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from zerocast.comm import Attempt, Communicator, raise_together
from zerocast.comm.uncopied import Uncopied
from zerocast.errors import ZerocastError

_pending: weakref.WeakKeyDictionary[Any, PendingSave] = weakref.WeakKeyDictionary()
"""The saves that have not been waited for yet, by optimizer."""


class PendingSave(Uncopied):
    """An asynchronous save, as ``save(..., asynchronous=True)`` returns it.

    If it fails on a rank, that rank immediately logs an error to the logger ``zerocast``; the next
    call with any of the optimizers raises it.

    Args:
        path: the checkpoint.
        comm: the ranks.
        write: writes this rank's part; runs in a thread.
        finish: runs after ``write``, and does nothing except on rank 0. It waits until all parts
            are written, and puts the checkpoint in place. It removes all parts if one is missing,
            or if its event is set first.
    """

    instead = "call its wait() where it was made"

    def __init__(
        self,
        path: Path,
        comm: Communicator,
        write: Callable[[], None],
        finish: Callable[[threading.Event], None],
    ) -> None:
        self._path, self._comm, self._write, self._finish = path, comm, write, finish
        self._error: ZerocastError | None = None
        self._has_written, self._is_futile = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerocast-save")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether this rank's thread has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is whole. Collective.

        Raises:
            ZerocastError: on every rank, if writing failed on any; the previous checkpoint is
                whole.
        """
        self._has_written.wait()
        try:
            raise_together(self._comm, self._error)  # else rank 0 would wait for a missing part
            self._thread.join()
            raise_together(self._comm, self._error)
        except ZerocastError:
            self._is_futile.set()
            self._thread.join()
            self._error = None  # it is raised once
            raise

    def _run(self) -> None:
        try:
            self._attempt(self._write)
        finally:
            self._has_written.set()
        self._attempt(lambda: self._finish(self._is_futile))

    def _attempt(self, do: Callable[[], None]) -> None:
        attempt = Attempt()
        with attempt:
            do()
        is_known = self._error is not None or self._is_futile.is_set()
        if (error := attempt.error) is not None and not is_known:
            self._error = type(error)(
                f"saving {self._path} in the background failed: {error} The previous checkpoint is "
                "intact; save again."
            )
            self._error.__cause__ = error
            logging.getLogger("zerocast").error("%s", self._error)


def remember(optimizers: Sequence[torch.optim.Optimizer], save: PendingSave) -> None:
    """Make the next call with any of these optimizers wait for ``save``."""
    _pending.update(dict.fromkeys(optimizers, save))


def wait_for(optimizers: Sequence[object]) -> None:
    """Wait for the pending saves of these optimizers. Collective if there is one."""
    for optimizer in optimizers:
        is_one = isinstance(optimizer, torch.optim.Optimizer)  # the caller refuses others
        if is_one and (save := _pending.pop(optimizer, None)) is not None:
            save.wait()
