"""Saves that go on beside the training: a thread writes copies, and nobody waits for it.

The threads of different ranks tell each other what they have written by small files in the
directory itself, since collectives belong to the training. Rank 0 puts the manifest in place when
all ranks have told it; a rank that fails says so there, and each rank's next call raises.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerocast.checkpoint.files import FileInfo, replace_file
from zerocast.comm import Attempt, Communicator, raise_together
from zerocast.errors import ZerocastError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import WriteResult

PATIENCE = 600.0
"""Seconds for which rank 0 waits for what other ranks write after its own part is written."""

_pending: weakref.WeakKeyDictionary[Any, PendingSave] = weakref.WeakKeyDictionary()
"""By optimizer, a save that nobody has waited for."""


class PendingSave:
    """A save that goes on; what ``save(..., asynchronous=True)`` returns.

    Args:
        comm: the ranks.
        write: writes this rank's part, and on rank 0 the manifest; runs in a thread.
    """

    def __init__(self, comm: Communicator, write: Callable[[], None]) -> None:
        self._comm, self._attempt = comm, Attempt()
        self._thread = threading.Thread(target=self._run, args=(write,), name="zerocast-save")
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
        self._thread.join()
        error, self._attempt.error = self._attempt.error, None
        raise_together(self._comm, error)

    def _run(self, write: Callable[[], None]) -> None:
        with self._attempt:
            write()


def remember(optimizer: object, save: PendingSave) -> None:
    """Let the next call with this optimizer wait for ``save``."""
    _pending[optimizer] = save


def wait_for(optimizer: object) -> None:
    """Wait for the save of this optimizer that is under way, if there is one. Collective then."""
    is_one = isinstance(optimizer, torch.optim.Optimizer)  # else the caller refuses it
    if is_one and (save := _pending.pop(optimizer, None)) is not None:
        save.wait()


def tell(directory: Path, saved: str, rank: int, said: dict[str, Any]) -> None:
    """Tell rank 0 what this rank has written, or why it has not."""
    replace_file(_note(directory, saved, rank), json.dumps(said).encode())


def written_note(results: list[WriteResult]) -> dict[str, Any]:
    """Return what :func:`tell` says of files that are written."""
    places = [[r.index.fqn, list(r.index.offset or ()), r.storage_data.start] for r in results]
    file = asdict(results[0].storage_data.file) if results else None
    return {"file": file, "places": places}


def hear(
    directory: Path, saved: str, ranks: int, result: Callable[[str, Any, FileInfo, int], Any]
) -> list[list[Any]]:
    """Return what all ranks have written, once they have told it.

    Raises:
        ZerocastError: where one has failed, or does not tell it within :data:`PATIENCE`.
    """
    end, everyone = time.monotonic() + PATIENCE, []
    for rank in range(ranks):
        path, pause = _note(directory, saved, rank), 0.001
        while not path.exists():
            if time.monotonic() > end:
                raise ZerocastError(
                    f"rank {rank} has not written its part of a checkpoint within {PATIENCE:g} s; "
                    f"the one before it is whole. Every rank must see the directory {directory}."
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        said = json.loads(path.read_text())
        if "error" in said:
            raise ZerocastError(f"rank {rank} could not write its part: {said['error']}")
        everyone.append(
            [
                result(name, at, FileInfo(**said["file"]), start)
                for name, at, start in said["places"]
            ]
        )
    return everyone


def _note(directory: Path, saved: str, rank: int) -> Path:
    return directory / f"{saved}-rank{rank:05}.json"
