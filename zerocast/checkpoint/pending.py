"""Saves that go on beside the training: a thread writes copies, and nobody waits for it.

The threads of different ranks tell each other what they have written by small files in the
directory itself, since collectives belong to the training. Rank 0 puts the manifest in place when
all ranks have told it; a rank that fails says so there, and each rank's next call raises.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerocast.checkpoint.files import FileInfo, replace_file
from zerocast.comm import Attempt, Communicator, raise_together
from zerocast.errors import ZerocastError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import WriteResult

_pending: weakref.WeakKeyDictionary[Any, PendingSave] = weakref.WeakKeyDictionary()
"""By optimizer, a save that nobody has waited for."""


class PendingSave:
    """A save that goes on; what ``save(..., asynchronous=True)`` returns.

    Where it fails the rank says so in the log of ``zerocast`` at once; the next call raises.

    Args:
        path: the checkpoint.
        comm: the ranks.
        write: writes this rank's part; runs in a thread.
        finish: puts the checkpoint in place once all parts are written, unless the event is set
            before; runs after ``write``. Rank 0's does something.
    """

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
        """Whether this rank's thread has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is whole. Collective.

        Raises:
            ZerocastError: on every rank, where writing failed on any; the checkpoint before it is
                whole.
        """
        self._has_written.wait()
        try:
            raise_together(self._comm, self._error)  # else rank 0 would wait for its part
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
        if self._error is None:
            self._attempt(lambda: self._finish(self._is_futile))

    def _attempt(self, do: Callable[[], None]) -> None:
        attempt = Attempt()
        with attempt:
            do()
        if (error := attempt.error) is not None and not self._is_futile.is_set():
            self._error = type(error)(
                f"saving {self._path} beside the training failed: {error} The checkpoint before it "
                "is whole; save again."
            )
            self._error.__cause__ = error
            logging.getLogger("zerocast").error("%s", self._error)


def remember(optimizer: object, save: PendingSave) -> None:
    """Let the next call with this optimizer wait for ``save``."""
    _pending[optimizer] = save


def wait_for(optimizer: object) -> None:
    """Wait for the save of this optimizer that is under way, if there is one. Collective then."""
    is_one = isinstance(optimizer, torch.optim.Optimizer)  # else the caller refuses it
    if is_one and (save := _pending.pop(optimizer, None)) is not None:
        save.wait()


def told(directory: Path, saved: str, rank: int, write: Callable[[], list[WriteResult]]) -> None:
    """Write this rank's part, and tell rank 0 what it has written, or why it has not."""
    note = _note(directory, saved, rank)
    try:
        said = _written(write())
    except Exception as error:
        with suppress(OSError):  # where nothing can be written, the next call tells it
            replace_file(note, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        raise
    replace_file(note, json.dumps(said).encode())


def _written(results: list[WriteResult]) -> dict[str, Any]:
    places = [[r.index.fqn, list(r.index.offset or ()), r.storage_data.start] for r in results]
    file = asdict(results[0].storage_data.file) if results else None
    return {"file": file, "places": places}


def hear(
    directory: Path,
    saved: str,
    comm: Communicator,
    result: Callable[[str, Any, FileInfo, int], Any],
    is_futile: threading.Event,
) -> list[list[Any]]:
    """Return what all ranks have written, once they have told it.

    Raises:
        ZerocastError: where one has failed, or does not tell it within the communicator's timeout;
            or where ``is_futile`` is set.
    """
    end, everyone = time.monotonic() + comm.timeout, []
    for rank in range(comm.size):
        path, pause = _note(directory, saved, rank), 0.001
        while not path.exists():
            if time.monotonic() > end or is_futile.wait(pause):
                raise ZerocastError(
                    f"rank {rank} has not written its part of a checkpoint within {comm.timeout:g} "
                    f"s. Every rank must see the directory {directory}."
                )
            pause = min(2 * pause, 0.25)
        said = json.loads(path.read_text())
        if "error" in said:
            raise ZerocastError(f"rank {rank} could not write its part: {said['error']}.")
        everyone.append(
            [
                result(name, at, FileInfo(**said["file"]), start)
                for name, at, start in said["places"]
            ]
        )
    return everyone


def _note(directory: Path, saved: str, rank: int) -> Path:
    return directory / f"{saved}-rank{rank:05}.json"
