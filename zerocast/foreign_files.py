"""Reads files that others may have written: regular files alone, headers of a bounded length.

A pipe, a device or a socket under a file's name would be waited for, or read, for ever.
"""

import json
import os
import stat
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
