"""checksums: the SHA-256 of each tensor's bytes in safetensors files, read without that package."""

import argparse
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerocast.cli.output import progress
from zerocast.errors import InputError
from zerocast.safe_files import open_regular, printable, read_tensor_table

_CHUNK = 1 << 20  # bytes that are read at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    stored = "of safetensors, or a directory of these"
    parser.add_argument("path", type=Path, metavar="FILE_OR_DIR", help=stored)


def run(given: argparse.Namespace) -> tuple[Any, int]:
    """Return the output and the exit code. Raise as :func:`checksums`."""
    found = checksums(given.path)
    return found if given.json else lines_of(found), 0


def lines_of(found: Mapping[str, str]) -> str:
    """Return lines of checksums and names."""
    return "\n".join(f"{checksum}  {printable(name)}" for name, checksum in found.items())


def checksums(path: Path) -> dict[str, str]:
    """Return the checksums by name of a safetensors file, or of a directory of them, whose files
    are read in the order of their names.

    Raises:
        InputError: if a file is damaged, or two files have a tensor of the same name.
        OSError: if one cannot be read.
    """
    files = [path] if not path.is_dir() else sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(
            f"checksums needs a .safetensors file or a directory of them, {path} has none."
        )
    found: dict[str, str] = {}
    with progress("checksums", sum(file.stat().st_size for file in files)) as add:
        for file in files:
            for name, checksum in _of_file(file, add):
                if name in found:
                    raise InputError(f"{path} has two tensors {name}, the second in {file.name}.")
                found[name] = checksum
    return found


def _of_file(path: Path, add: Callable[[int], None]) -> Iterator[tuple[str, str]]:
    """Yield the name and checksum of each tensor of a file, in the order of their bytes."""
    with open_regular(path) as file:
        try:
            table = read_tensor_table(file)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise InputError(f"{path} is not a readable .safetensors file: {error}") from error
        for each in table:
            found = hashlib.sha256()
            for at in range(each.start, each.end, _CHUNK):
                data = file.read(min(_CHUNK, each.end - at))
                found.update(data)
                add(len(data))
            yield each.name, found.hexdigest()
