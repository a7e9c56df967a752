"""Whose a checkpoint is: a save replaces what its own training has saved, and nothing else.

Every optimizer has an identity, which is drawn at its first save, kept in the manifest and taken
over by ``load``. The identities of the optimizers that are saved together make a *run*. Two
optimizers of one training, two pipeline stages or two jobs are two runs, and each needs a place of
its own.

A job and its successor, which has loaded what the first saved, are one run. If both still save into
one place, the later of two saves finds another manifest than it began with, or its own files gone,
and gives up. So do both where neither has seen what the other saved. What no manifest names of the
own run is left of saves that were killed, or belongs to such a job; it is removed in both cases.
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

_REMEDY = "name another place, or give replace=True."


def _draw() -> str:
    return secrets.token_hex(8)


@dataclass
class Identity:
    """That of an optimizer.

    Attributes:
        number: 16 hexadecimal digits.
        seen: by place, the ids of the saves there that this optimizer has made or loaded.
    """

    number: str = field(default_factory=_draw)
    seen: defaultdict[Path, set[str]] = field(default_factory=lambda: defaultdict(set))


_identities: weakref.WeakKeyDictionary[torch.optim.Optimizer, Identity]
_identities = weakref.WeakKeyDictionary()


def identity_of(optimizer: torch.optim.Optimizer) -> Identity:
    """Return the identity of an optimizer; a new one where it has none yet. A copy has none."""
    return _identities.setdefault(optimizer, Identity())


def run_of(numbers: Sequence[str]) -> str:
    """Return the run of optimizers that are saved together: 16 hexadecimal digits."""
    return hashlib.sha256(" ".join(numbers).encode()).hexdigest()[:16]


@dataclass
class Claim:
    """A save, and the place that it is about to replace.

    Attributes:
        path: the directory or file, an absolute path without symbolic links.
        replace: whether it replaces whatever is there.
        seen: of :class:`Identity`, for this place.
        run: the run that saves.
        saved: the id of the save.
        replaced: the manifest that is in place, once :meth:`take` has read it.
    """

    path: Path
    replace: bool = False
    seen: set[str] = field(default_factory=set)
    run: str = field(default_factory=_draw)
    saved: str = field(default_factory=_draw)
    replaced: Manifest | None = None

    @property
    def prefix(self) -> str:
        """How the names of this save's files begin."""
        return f"{self.run}-{self.saved}"

    def take(self) -> None:
        """Read what is in place.

        Raises:
            InputError: unless this run may replace it.
        """
        found = self.replaced = self._standing()
        if found is not None:
            is_known = found.run == self.run and (not self.seen or found.saved in self.seen)
            if not is_known and not self.replace:
                raise InputError(
                    f"{self.path} holds a save of the run {found.run}, and this training, the run "
                    f"{self.run}, has neither made nor loaded it: other optimizers have, or a job "
                    f"beside this one. Load it to continue from it, {_REMEDY}"
                )
            self.seen.add(found.saved)

    def check(self, files: Iterable[Path]) -> None:
        """Raise :class:`ZerocastError` where another save has removed one of ``files``, this one's,
        or has ended here since :meth:`take`. To be called right before the renaming.
        """
        found, gone = self._standing(), [each for each in files if not each.exists()]
        if gone or (found and found.saved) != (self.replaced and self.replaced.saved):
            raise ZerocastError(
                f"another job saves into {self.path}, too, and has put its manifest in place or "
                f"removed {gone} of this save, which is given up (or ranks see different "
                f"directories). What the other saved stays. Stop one, or name another place."
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
    """Say whether something is where a save would put its manifest, readable or not."""
    return os.path.lexists(path / NAME if path.is_dir() else path)


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Keep other jobs from looking for needless files, and from putting a manifest in place.

    File systems that have no locks, or those of one host only, do without: then two jobs may lose a
    save where both do so in the same millisecond.

    Raises:
        ZerocastError: where another job does so now.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ZerocastError(f"another job is saving into {directory} now; stop one.") from None
        except OSError:
            pass  # there are no locks
        yield
    finally:
        with suppress(OSError):  # a process that was forked meanwhile would keep it else
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
