"""Reads files of others safely, and writes files that replace nothing unasked.

Only regular files are read, with headers of a bounded length: a pipe, a device or a socket under a
file's name would be waited for, or read, for ever.

A draft is written in a directory with a random name, beside the place of its file. There it is
opened without a look at links, and no other program writes to it.
"""

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from zerocast.errors import InputError

LARGEST_HEADER = 100_000_000
"""The bytes of the longest header of a file of safetensors, as the package safetensors has it."""

MOST_DIMENSIONS = 64
"""The most dimensions of a shape: the product of many takes longer than reading them."""

LENGTH = 8
"""The bytes of the number before a header, which is its length."""


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading, without waiting for anybody.

    Raises:
        InputError: where it is no regular file, nor a link to one.
        OSError: where it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"a regular file must be read, and {path} is none; give a file.")
    return os.fdopen(descriptor, "rb")


def read_text(path: Path) -> str:
    """Return a text in UTF-8; raises as :func:`open_regular`, and UnicodeDecodeError."""
    with open_regular(path) as file:
        return file.read().decode()


def read_header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Return the header of a file of safetensors, and the byte at which its tensors begin.

    Raises:
        ValueError, TypeError, RecursionError: where it has none, or one that is too long.
    """
    length = int.from_bytes(file.read(LENGTH), "little")
    if length > min(LARGEST_HEADER, os.fstat(file.fileno()).st_size):
        raise ValueError(f"its header would have {length} bytes")
    return dict(json.loads(file.read(length))), LENGTH + length


def printable(text: str) -> str:
    """Return ``text`` with escapes for what would move a terminal's cursor, or end a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# --- drafts ---

DRAFTS = ".*.zerocast-drafts"
"""The names of directories of drafts."""


@contextmanager
def drafts_in(directory: Path) -> Iterator[Path]:
    """Give a directory in ``directory``, which is made, for its drafts; it is removed at the end.

    Raises:
        OSError: where it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drafts = directory / DRAFTS.replace("*", secrets.token_hex(8))
    drafts.mkdir()
    try:
        yield drafts
    finally:
        shutil.rmtree(drafts, ignore_errors=True)


def publish(drafts: Path, *, last: str = "", overwrite: bool = False) -> dict[str, int]:
    """Give every draft its name in the directory that ``drafts`` is in, each with the umask's mode;
    after an error none has it.

    Args:
        drafts: of :func:`drafts_in`.
        last: the name that is given last.
        overwrite: whether files of these names are replaced.

    Returns:
        The size of each file in bytes, by name.

    Raises:
        FileExistsError: where there is a file of such a name. It stays as it is.
        OSError: where a name cannot be given.
    """
    mode, sizes = drafts.stat().st_mode & 0o666, dict[str, int]()
    files = (file for file in drafts.rglob("*") if file.is_file())
    try:
        for draft in sorted(files, key=lambda file: (file.name == last, file)):
            name = str(draft.relative_to(drafts))
            path = drafts.parent / name
            draft.chmod(mode)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not overwrite:
                path.open("xb").close()  # a rename would replace what another program wrote now
            sizes[name] = draft.stat().st_size
            draft.replace(path)
    except BaseException:
        for name in () if overwrite else sizes:
            (drafts.parent / name).unlink(missing_ok=True)
        raise
    return sizes
