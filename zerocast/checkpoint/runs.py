"""Ownership of checkpoints: a save replaces only checkpoints of the same run.

Every optimizer has an identity, a random number drawn at its first save, stored in the manifest and
adopted by ``load``. A *run* is identified by the identities of the optimizers that are saved
together. Two optimizers that are saved separately, two pipeline stages or two jobs are two runs,
and each needs a separate place.

A job and its successor, which has loaded the first one's checkpoint, are one run. If both still
save into one place, the later save finds another manifest than it started with, or its files
removed, and raises. Both raise if neither has seen the other's save. Files of this run that no
manifest names are from killed saves or from such a job; they are removed in both cases.
"""

import fcntl
import hashlib
import os
import secrets
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zerocast.checkpoint.manifest import NAME, Manifest, read_manifest
from zerocast.errors import InputError, ZerocastError

_REMEDY = "choose another path, or give replace=True."


def _draw() -> str:
    return secrets.token_hex(8)


@dataclass
class Identity:
    """The identity of an optimizer.

    Attributes:
        number: 16 hexadecimal digits.
        seen: by place, the ids of the saves there that this optimizer has made or loaded.
    """

    number: str = field(default_factory=_draw)
    seen: defaultdict[Path, set[str]] = field(default_factory=lambda: defaultdict(set))


_identities: weakref.WeakKeyDictionary[torch.optim.Optimizer, Identity]
_identities = weakref.WeakKeyDictionary()


def identity_of(optimizer: torch.optim.Optimizer) -> Identity:
    """Return the identity of an optimizer; draw one if it has none, as a copy has."""
    return _identities.setdefault(optimizer, Identity())


def run_of(numbers: Sequence[str]) -> str:
    """Return the run of optimizers that are saved together: 16 hexadecimal digits."""
    return hashlib.sha256(" ".join(numbers).encode()).hexdigest()[:16]


@dataclass
class Claim:
    """A save, and the place that it is about to replace.

    Attributes:
        path: the directory or file, an absolute path without symbolic links.
        replace: whether it may replace any checkpoint that is there.
        seen: the ids in :class:`Identity` for this place.
        run: the run that saves.
        saved: the id of the save.
        replaced: the manifest that :meth:`take` found in place; None if there was none.
    """

    path: Path
    replace: bool = False
    seen: set[str] = field(default_factory=set)
    run: str = field(default_factory=_draw)
    saved: str = field(default_factory=_draw)
    replaced: Manifest | None = None

    @property
    def prefix(self) -> str:
        """The prefix of the names of this save's files."""
        return f"{self.run}-{self.saved}"

    def take(self) -> None:
        """Read the manifest in place.

        Raises:
            InputError: if this run may not replace it.
        """
        found = self.replaced = self._standing()
        if found is not None:
            is_known = found.run == self.run and (not self.seen or found.saved in self.seen)
            if not is_known and not self.replace:
                raise InputError(
                    f"{self.path} holds a save of the run {found.run}, and this training, the run "
                    f"{self.run}, has neither made nor loaded it. Load it to continue from it, "
                    f"{_REMEDY}"
                )
            self.seen.add(found.saved)

    def check(self, files: Iterable[Path]) -> None:
        """Raise :class:`ZerocastError` if another save has removed one of this save's ``files``, or
        has ended here since :meth:`take`. Must be called right before the rename.
        """
        found, gone = self._standing(), [each for each in files if not each.exists()]
        if gone or (found and found.saved) != (self.replaced and self.replaced.saved):
            raise ZerocastError(
                f"another job saves into {self.path} as well. It has replaced the manifest or "
                f"removed {gone} of this save, which is abandoned (or ranks see different "
                "directories). The other save is kept. Stop one job, or choose another path."
            )
        self.seen.add(self.saved)

    def _standing(self) -> Manifest | None:
        try:
            return read_manifest(self.path) if is_taken(self.path) else None
        except InputError as error:
            if self.replace:
                return None
            raise InputError(f"it cannot be replaced: {error} To save, {_REMEDY}") from None


def is_taken(path: Path) -> bool:
    """Return whether something, readable or not, is where a save would put its manifest."""
    return os.path.lexists(path / NAME if path.is_dir() else path)


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Lock ``directory`` against other jobs that remove files or put a manifest in place.

    File systems without locks, or with locks within one host only, do not protect. Then a save may
    be lost if two jobs do this in the same millisecond.

    Raises:
        ZerocastError: if another job holds the lock.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ZerocastError(f"another job is saving into {directory} now; stop one.") from None
        except OSError:
            pass  # the file system has no locks
        yield
    finally:
        with suppress(OSError):  # explicit, as a process forked meanwhile has the handle too
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
