"""What commands print, and the paths that they write to.

Paths are checked before any work, and written completely or not at all. Tables are printed whole,
whatever the width of the terminal. Progress is shown on stderr, and only if that is a terminal.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zerocast.arguments import shown_bytes
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


def aligned(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)
) -> list[str]:
    """Return the lines of a table whose columns are right-aligned, except those at ``left``."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


@contextmanager
def progress(
    title: str, total: int, unit: str = "", *, is_shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes what was done since its last call. After two seconds it shows
    what was done, the rate and the time left, in a line that is removed at the end.

    Args:
        title: what is done.
        total: how much there is to do.
        unit: what is counted; bytes by default.
        is_shown: False on ranks that show nothing.
    """
    started, done, following = time.monotonic(), 0, 2.0
    is_shown = is_shown and sys.stderr.isatty()

    def add(amount: int) -> None:
        nonlocal done, following
        done += amount
        seconds = time.monotonic() - started
        if is_shown and done and seconds >= following:
            following = seconds + 0.2
            minutes, left = divmod(round(max(total - done, 0) * seconds / done), 60)
            text = f"{done:,} of {total:,} {unit}"
            if not unit:
                rate = shown_bytes(done / seconds)
                text = f"{shown_bytes(done)} of {shown_bytes(total)}, {rate} a second"
            sys.stderr.write(f"\r{f'{title}: {text}, {minutes} min {left:02} s left':<79}")
            sys.stderr.flush()

    try:
        yield add
    finally:
        if following > 2:
            sys.stderr.write(f"\r{'':79}\r")
