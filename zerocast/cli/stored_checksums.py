"""checksums: the SHA-256 of each tensor's bytes in safetensors files, read without that package."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from zerocast.errors import InputError
from zerocast.safe_files import open_regular, printable, read_header

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
            header, begin = read_header(file)
            header.pop("__metadata__", None)
            places, end = list[tuple[int, int, str]](), 0
            for name, each in header.items():
                start, stop = each["data_offsets"]
                places.append((int(start), int(stop), name))
            places.sort()
            # Tensors that shared bytes could take longer to hash than the file has bytes.
            for start, stop, name in places:
                if start != end or stop < start:
                    raise ValueError(f"{name} does not begin where the one before it ends")
                end = stop
            if begin + end != os.fstat(file.fileno()).st_size:
                raise ValueError("its tensors have other bytes than the file")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise InputError(f"{path} is not a readable .safetensors file: {error}") from error
        for start, stop, name in places:
            found = hashlib.sha256()
            for at in range(start, stop, _CHUNK):
                found.update(file.read(min(_CHUNK, stop - at)))
            yield name, found.hexdigest()
