"""StoredFiles: the tensors of a directory of safetensors files, of which any range can be read.

Files are read by offset, not mapped into memory: a file that another program shortens meanwhile
gives an error, where a mapped one would end the process.
"""

import contextlib
import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.export.folder import INDEX
from zerocast.layout import Extent
from zerocast.safe_files import open_regular, read_tensor_table, read_text

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""torch's dtypes by their names in safetensors files."""

UNREADABLE = (OSError, ValueError, TypeError, LookupError, RecursionError, MemoryError)
"""The errors that reading a damaged file may raise."""

_MOST = 1 << 30  # bytes of one call; the system takes no more than 2 GiB


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: the path of the file.
        start: the byte offset of its first element.
        like: a tensor of its shape and dtype on the meta device.
    """

    file: Path
    start: int
    like: torch.Tensor

    def read(self, extent: Extent) -> torch.Tensor:
        """Return elements, flat, on the CPU.

        Raises:
            InputError: if the file has become shorter.
            OSError: if it cannot be read.
        """
        dtype, itemsize = self.like.dtype, self.like.itemsize
        if not extent:
            return torch.empty(0, dtype=dtype, device="cpu")
        held, at = _memory(extent.size * itemsize), self.start + extent.start * itemsize
        room = memoryview(held)
        with open_regular(self.file) as file:
            while len(room):
                count = os.preadv(file.fileno(), [room[:_MOST]], at)
                if not count:
                    raise InputError(f"{self.file} ends before its tensors do; it was changed.")
                room, at = room[count:], at + count
        return torch.frombuffer(held, dtype=dtype, count=extent.size)

    def whole(self) -> torch.Tensor:
        """Return the whole tensor. Raise as :meth:`read`."""
        return self.read(Extent(0, self.like.numel())).view(self.like.shape)


def _memory(size: int) -> mmap.mmap:
    """Return ``size`` bytes in huge pages, where the system has them: else the faults of new pages
    take longer than reading a fast disk.
    """
    held = mmap.mmap(-1, size)
    with contextlib.suppress(OSError):
        held.madvise(mmap.MADV_HUGEPAGE)
    return held


class StoredFiles:
    """The tensors of a directory.

    Attributes:
        folder: the directory.
        files: the names of its safetensors files, with their sizes in bytes and the times of their
            latest changes in nanoseconds.
        tensors: the tensors by name.

    Raises:
        InputError: if a file is missing or damaged, or two files have a tensor of one name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, dict[str, tuple[int, int]]()
        self.tensors: dict[str, StoredTensor] = {}
        index = folder / INDEX
        name = index.name
        try:
            places = dict(json.loads(read_text(index))["weight_map"]) if index.is_file() else {}
            for name in sorted(set(places.values())) or ["model.safetensors"]:
                if not isinstance(name, str) or Path(name).name != name:
                    raise ValueError(f"its index names {name!r}, which is not one of its files")
                self._add(name)
        except UNREADABLE as error:
            raise InputError(f"{folder} has a file that cannot be read: {name}: {error}") from error
        missing = places.keys() - self.tensors.keys()
        if missing:
            raise InputError(f"{folder} lacks {min(missing)}, which its index names.")

    def _add(self, name: str) -> None:
        path = self.folder / name
        with open_regular(path) as file:
            found, table = os.fstat(file.fileno()), read_tensor_table(file)
        self.files[name] = found.st_size, found.st_mtime_ns
        for each in table:
            if each.dtype not in DTYPES:
                raise ValueError(f"{each.name} has the dtype {each.dtype}, which is not known")
            like = torch.empty((), dtype=DTYPES[each.dtype], device="meta")
            if math.prod(each.shape) * like.itemsize != each.end - each.start:
                raise ValueError(f"{each.name} has other bytes than its shape {list(each.shape)}")
            if each.name in self.tensors:
                raise ValueError(f"two of its files have a tensor {each.name}")
            self.tensors[each.name] = StoredTensor(path, each.start, like.expand(each.shape))

    @property
    def likes(self) -> dict[str, torch.Tensor]:
        """Tensors of their shapes and dtypes on the meta device, by name."""
        return {name: each.like for name, each in self.tensors.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        InputError: if it cannot be read, or holds anything else.
    """
    try:
        found = json.loads(read_text(path))
    except UNREADABLE as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} must hold an object, got {type(found).__name__}.")
    return found
