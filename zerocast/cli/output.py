"""Output paths of commands: checked before any work, and written completely or not at all."""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zerocast.errors import InputError
from zerocast.safe_files import drafts_in, publish

Reads = Callable[[argparse.Namespace], list[Path]]
"""Maps the arguments of a command to the files that it reads; some may not exist."""


def add_output(
    parser: argparse.ArgumentParser,
    name: str,
    *,
    reads: Reads = lambda given: [],
    is_directory: bool = False,
) -> None:
    """Declare that the command writes to its argument ``name`` by :func:`drafted`.

    The argument is the path of a file, or of a directory of files. Also add ``--overwrite``.
    """
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.set_defaults(output=name, reads=reads, is_directory=is_directory)


@contextmanager
def drafted(given: argparse.Namespace) -> Iterator[Path | None]:
    """Yield the path of a draft that the command writes, which replaces that of its argument at the
    end; None if the command writes nothing.

    Raises:
        InputError: if the path exists and must not be overwritten, or the command reads it.
        OSError: if it cannot be written.
    """
    path: Path | None = getattr(given, getattr(given, "output", ""), None)
    if path is None:
        yield None
        return
    path = path.absolute()
    if path.exists() and any(each.exists() and each.samefile(path) for each in given.reads(given)):
        raise InputError(f"{path} is read by the command; choose another output file.")
    is_one = path.is_dir() if given.is_directory else path.is_file()
    is_empty = given.is_directory and is_one and not any(path.iterdir())
    if os.path.lexists(path) and not is_empty and not (given.overwrite and is_one):
        raise InputError(f"{path} exists; choose another file, or give --overwrite.")
    with drafts_in(path if given.is_directory else path.parent) as drafts:
        yield drafts if given.is_directory else drafts / path.name
        publish(drafts, overwrite=given.overwrite)
