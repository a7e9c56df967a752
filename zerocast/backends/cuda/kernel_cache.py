"""Keeps compiled kernels on disk, in files that only their owner can use.

A file is used where it is whole: its first bytes are the digest of the others. What is kept is
machine code that a GPU will run. So the folder is the user's own and closed to all others, and a
file or a folder that belongs to another user, or is a symbolic link, is not used. A kernel that
cannot be read is compiled again, and one that cannot be written is used without a file.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_DIGEST_BYTES = hashlib.sha256().digest_size

_DRAFT = ".draft"

_ABANDONED = 3600.0
"""Seconds after which a draft counts as abandoned; writing one takes milliseconds."""


def default_cache() -> Path | None:
    """Return the user's cache directory (XDG), ``zerocast/kernels``; None for a user without a
    home directory.
    """
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(caches) / "zerocast" / "kernels"


def kept(path: Path) -> bytes | None:
    """Return what :func:`keep` wrote to ``path``; None if this user has no whole file there."""
    try:
        if not _is_own(os.lstat(path.parent), stat.S_ISDIR):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not _is_own(os.fstat(descriptor), stat.S_ISREG):
                return None
            digest, content = file.read(_DIGEST_BYTES), file.read()
    except OSError:
        return None
    return content if digest == hashlib.sha256(content).digest() else None


def keep(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically, where its folder is this user's."""
    with suppress(OSError):
        _make(path.parent)
        if not _is_own(os.lstat(path.parent), stat.S_ISDIR):
            return
        path.parent.chmod(0o700)  # it may be older than this rule
        _remove_abandoned(path.parent)
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=_DRAFT)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(draft, path)
        except OSError:
            os.unlink(draft)


def _make(folder: Path) -> None:
    """Make ``folder`` and what it stands in, open to this user alone under any umask."""
    if not folder.exists():
        _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _is_own(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    return is_kind(status.st_mode) and status.st_uid == os.geteuid()


def _remove_abandoned(folder: Path) -> None:
    """Remove the drafts of processes that were killed while they wrote."""
    for draft in folder.glob(f"*{_DRAFT}"):
        with suppress(FileNotFoundError):  # another process removes them, too
            if time.time() - draft.lstat().st_mtime > _ABANDONED:
                draft.unlink()
