"""Safetensors files, written piece by piece and read with a digest for every block.

A file consists of eight bytes with the length of the header, the header in JSON, and the bytes of
the tensors. This module does not use the package safetensors. A rank writes pieces one by one and
reads parts of them, so that it needs no memory for a second copy of its share.

A file is divided into blocks of :data:`BLOCK` bytes, and a manifest
(:mod:`zerocast.checkpoint.manifest`) has the digest of each. A reader checks the digest of a block
before it uses its bytes. So a rank that needs part of a file reads only the blocks of that part.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from zerocast.errors import InputError
from zerocast.safe_files import LARGEST_HEADER, LENGTH, open_regular, read_header

BLOCK = 1 << 22
"""The bytes of a block, which has one digest."""

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The names of dtypes in safetensors."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One tensor of a file: its name there, dtype and shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileInfo:
    """The entry of a file in a manifest.

    Attributes:
        name: the name in the directory.
        num_bytes: the length of the file.
        begin: the first byte of the first block; not 0 if the manifest is in the file's header.
        digests: the digest of each block.
    """

    name: str
    num_bytes: int
    begin: int
    digests: list[str]


def header_of(
    entries: Sequence[FileEntry], metadata: dict[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """Return the header of a file of ``entries``, with its length, and the first byte of each.

    Raises:
        InputError: if the header is too long.
    """
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end, ends = 0, [0]
    for entry in entries:
        start, end = end, end + entry.num_bytes
        table[entry.key] = {
            "dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]
        }  # fmt: skip
        ends.append(end)
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise InputError(
            f"the header of one file must have at most {LARGEST_HEADER:,} bytes, got "
            f"{len(text):,}; save into a directory, or save fewer values besides tensors."
        )
    head = len(text).to_bytes(LENGTH, "little") + text
    return head, [len(head) + end for end in ends[:-1]]


class DigestingWriter:
    """A writer of a new file, from beginning to end, that computes the digests of its blocks.

    It removes the file if its context raises.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("xb")  # "x" does not follow symbolic links
        self._path = path
        self._digests: list[str] = []
        self._block, self._filled = hashlib.sha256(), 0
        self._size = self._begin = 0

    def __enter__(self) -> DigestingWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            remove_files([self._path])
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Write the next bytes."""
        data = memoryview(data)
        self._file.write(data)
        self._size += len(data)
        while len(data):
            part = data[: BLOCK - self._filled]
            self._block.update(part)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BLOCK:
                self._end_block()

    def skip(self, size: int) -> None:
        """Reserve ``size`` bytes at the beginning for :meth:`write_beginning`, without digests."""
        self._size = self._begin = size
        self._file.seek(size)

    def write_beginning(self, data: bytes) -> None:
        """Write the skipped bytes, and sync the file to the disk."""
        assert len(data) == self._begin
        self._file.seek(0)
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """Write the elements of a tensor, in order."""
        held = tensor.detach().cpu().contiguous()
        self.write(bytes_of(held))

    def finish(self) -> FileInfo:
        """Sync the file to the disk, and return its entry for a manifest."""
        if self._filled:
            self._end_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileInfo(self._path.name, self._size, self._begin, self._digests)

    def _end_block(self) -> None:
        self._digests.append(self._block.hexdigest()[:16])
        self._block, self._filled = hashlib.sha256(), 0


class VerifiedFile:
    """A reader of a file that checks its blocks against the digests in the manifest.

    Args:
        path: the file.
        info: its entry in the manifest.
        held: its tensors according to the manifest, with the first byte of each.

    Raises:
        InputError: if it is missing, has another length, or its header lists other tensors.
    """

    def __init__(self, path: Path, info: FileInfo, held: Iterable[tuple[FileEntry, int]]) -> None:
        self._path, self._info = path, info
        try:
            self._file = open_regular(path)
            size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise InputError(
                f"the checkpoint names the file {path}, which cannot be read: {error}."
            ) from None
        if size != info.num_bytes:
            self._file.close()
            raise InputError(
                f"{path} must have {info.num_bytes} bytes, as its checkpoint says, and has {size}; "
                f"it was cut off or replaced. Load an earlier checkpoint."
            )
        self._block, self._number = b"", -1
        try:
            table, begin = read_header(self._file)
            table.pop("__metadata__", None)
        except (ValueError, TypeError, RecursionError):
            table, begin = {}, 0
        if table != {
            entry.key: {
                "dtype": DTYPES[entry.dtype], "shape": list(entry.shape),
                "data_offsets": [start - begin, start - begin + entry.num_bytes],
            } for entry, start in held
        }:  # fmt: skip
            self._file.close()
            raise InputError(
                f"the tensors listed in {path} must be those of its checkpoint, and differ; the "
                "file or the manifest is damaged. Load an earlier checkpoint."
            )

    def __enter__(self) -> VerifiedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_into(self, start: int, tensor: torch.Tensor) -> None:
        """Fill ``tensor``, contiguous and on the CPU, with the bytes from ``start`` on.

        Raises:
            InputError: if a block has another digest; ``tensor`` must then not be used.
        """
        view = bytes_of(tensor)
        while len(view):
            number, skipped = divmod(start - self._info.begin, BLOCK)
            part = self._verified(number)[skipped : skipped + len(view)]
            view[: len(part)] = part
            view, start = view[len(part) :], start + len(part)

    def _verified(self, number: int) -> memoryview:
        if number != self._number:
            first = self._info.begin + number * BLOCK
            self._file.seek(first)
            self._block = self._file.read(BLOCK)
            self._number = number
            if hashlib.sha256(self._block).hexdigest()[:16] != self._info.digests[number]:
                raise InputError(
                    f"{self._path} is damaged between bytes {first} and "
                    f"{first + len(self._block)}: they are not those that were saved. "
                    f"Load an earlier checkpoint."
                )
        return memoryview(self._block)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the memory of a contiguous CPU tensor, which must outlive the view."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, and sync them to the disk."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync the entries of a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, text: bytes) -> None:
    """Write a new file, and sync it to the disk; remove it if that fails."""
    with DigestingWriter(path) as file:
        file.write(text)
        file.finish()


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files that are no longer needed; ignore those that cannot be removed."""
    for path in paths:
        with suppress(OSError):
            path.unlink()
