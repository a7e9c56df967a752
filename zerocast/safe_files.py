"""Reads untrusted files safely, and writes files without replacing any unless asked to.

Only regular files are read, with headers of bounded length. Reading a pipe, a device or a socket
could block or continue forever.

A draft is written in a directory with a random name, next to its final path. No other program
writes there, so drafts are opened without checking for links.
"""

import json
import operator
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from zerocast.errors import InputError

LARGEST_HEADER = 100_000_000
"""The maximum header size of a safetensors file in bytes, as in the safetensors package."""

MOST_DIMENSIONS = 64
"""The maximum number of dimensions of a shape: the product of many takes longer than reading them.
"""

LENGTH = 8
"""The size in bytes of the header length that precedes the header."""


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading, without blocking.

    Raises:
        InputError: if it is neither a regular file nor a link to one.
        OSError: if it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path} is not a regular file; give one.")
    return os.fdopen(descriptor, "rb")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raise as :func:`open_regular`, or UnicodeDecodeError."""
    with open_regular(path) as file:
        return file.read().decode()


def read_header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file and the byte offset of its tensors.

    Raises:
        ValueError, TypeError, RecursionError: if the header is missing or too long.
    """
    length = int.from_bytes(file.read(LENGTH), "little")
    if length > min(LARGEST_HEADER, os.fstat(file.fileno()).st_size):
        raise ValueError(f"its header would have {length} bytes")
    return dict(json.loads(file.read(length))), LENGTH + length


class StoredBytes(NamedTuple):
    """A tensor in a safetensors file: its name, safetensors' name of its dtype, its shape, and the
    byte offset of its first and after its last element in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_tensor_table(file: IO[bytes]) -> list[StoredBytes]:
    """Return the tensors of a safetensors file, in the order of their bytes.

    Raises:
        ValueError, TypeError, LookupError, RecursionError: if the header is missing or damaged, or
            the tensors do not fill the file without gaps and overlaps.
    """
    header, begin = read_header(file)
    header.pop("__metadata__", None)
    table = list[StoredBytes]()
    for name, each in header.items():
        start, end = map(operator.index, each["data_offsets"])  # int() takes texts and infinities
        shape = tuple(map(operator.index, each["shape"]))
        table.append(StoredBytes(name, str(each["dtype"]), shape, begin + start, begin + end))
    table.sort(key=lambda each: (each.start, each.end))
    # Tensors that shared bytes could take longer to read than the file has bytes.
    for each in table:
        if each.start != begin or each.end < each.start:
            raise ValueError(f"{each.name} does not begin where the one before it ends")
        if len(each.shape) > MOST_DIMENSIONS or any(not 0 <= n < 2**63 for n in each.shape):
            raise ValueError(f"{each.name} has the shape {str(each.shape)[:80]}")
        begin = each.end
    if begin != os.fstat(file.fileno()).st_size:
        raise ValueError("its tensors have other bytes than the file")
    return table


def printable(text: str) -> str:
    """Return ``text`` with every unprintable character escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# --- drafts ---

DRAFTS = ".*.zerocast-drafts"
"""The glob pattern of draft directories."""


@contextmanager
def drafts_in(directory: Path) -> Iterator[Path]:
    """Yield a new draft directory in ``directory``, and remove it at the end. Create ``directory``
    if needed.

    Raises:
        OSError: if it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drafts = directory / DRAFTS.replace("*", secrets.token_hex(8))
    drafts.mkdir()
    try:
        yield drafts
    finally:
        shutil.rmtree(drafts, ignore_errors=True)


def publish(drafts: Path, *, last: str = "", overwrite: bool = False) -> dict[str, int]:
    """Move every draft to the parent directory of ``drafts``, with the mode that the umask gives.

    After an error without ``overwrite``, the files that were already moved are removed.

    Args:
        drafts: the directory that :func:`drafts_in` yields.
        last: the name of the file to move last.
        overwrite: whether to replace existing files.

    Returns:
        The size of each file in bytes, by name.

    Raises:
        FileExistsError: if a file of that name exists. It is not changed.
        OSError: if a file cannot be moved.
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
                path.open("xb").close()  # rename alone would replace an existing file
            sizes[name] = draft.stat().st_size
            draft.replace(path)
    except BaseException:
        for name in () if overwrite else sizes:
            (drafts.parent / name).unlink(missing_ok=True)
        raise
    return sizes
