"""checksums: the SHA-256 of each tensor's bytes in safetensors files, read without that package."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from zerocast.errors import InputError
from zerocast.safe_files import open_regular, printable, read_tensor_table

_CHUNK = 1 << 20  # bytes that are read at once


def checksums(path: Path, *, as_json: bool = False) -> tuple[str, int]:
    """Return the output for a safetensors file, or a directory of them, and the exit code.

    Args:
        path: the file; or the directory, whose files are read in the order of their names.
        as_json: whether to print an object from names to checksums instead of lines.

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
    for file in files:
        for name, checksum in _of_file(file):
            if name in found:
                raise InputError(f"{path} has two tensors {name}, the second in {file.name}.")
            found[name] = checksum
    if as_json:
        return json.dumps(found, indent=1), 0
    return "\n".join(f"{checksum}  {printable(name)}" for name, checksum in found.items()), 0


def _of_file(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and checksum of each tensor of a file, in the order of their bytes."""
    with open_regular(path) as file:
        try:
            table = read_tensor_table(file)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise InputError(f"{path} is not a readable .safetensors file: {error}") from error
        for each in table:
            found = hashlib.sha256()
            for at in range(each.start, each.end, _CHUNK):
                found.update(file.read(min(_CHUNK, each.end - at)))
            yield each.name, found.hexdigest()
