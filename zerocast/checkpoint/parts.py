"""The parts of a checkpoint: one file per rank, with the pieces of tensors that the rank writes.

A save first checks what is in the directory. It ends when the manifest, which names the parts of
all ranks, is put in place. A rank that loads reads what it needs from the parts of any rank.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerocast.checkpoint.files import (
    DigestingWriter,
    FileEntry,
    FileInfo,
    VerifiedFile,
    header_of,
    make_directory,
    sync_directory,
    write_file,
)
from zerocast.checkpoint.manifest import (
    NAME,
    Chunk,
    Manifest,
    SavedTensor,
    check_place,
    remove_saved,
)
from zerocast.checkpoint.runs import Claim, alone_in, is_taken
from zerocast.errors import InputError
from zerocast.optim.boxes import Box, Share


def entry_of(name: str, dtype: torch.dtype, shape: Sequence[int], box: Box) -> FileEntry:
    """Return the file entry of a piece of a tensor, with its offsets in the name unless whole."""
    offsets = "" if box.sizes == tuple(shape) else f"@{','.join(map(str, box.offsets))}"
    return FileEntry(name + offsets, dtype, box.sizes)


# --- writing ---


class Part(NamedTuple):
    """The file that a rank has written, if any, and the first byte of each of its pieces."""

    file: FileInfo | None
    starts: list[int]


def write_part(path: Path, entries: Sequence[FileEntry], values: Iterable[torch.Tensor]) -> Part:
    """Write a file of pieces; write no file if there is no piece."""
    if not entries:
        return Part(None, [])
    head, starts = header_of(entries)
    with DigestingWriter(path) as file:
        file.write(head)
        for tensor in values:
            file.write_tensor(tensor)
        return Part(file.finish(), starts)


class DirectorySave:
    """A save into a directory that all ranks share.

    Args:
        claim: the save, its run, and the place that it replaces.
        versions: the versions of the packages that save.
        training: the description of the training for the manifest, in JSON values.
    """

    def __init__(self, claim: Claim, versions: dict[str, Any], training: dict[str, Any]) -> None:
        self.claim, self.path = claim, claim.path
        self._versions, self._training = versions, training
        self._draft = self.path / f"{claim.prefix}.draft"
        self._mark = self.path / f"{claim.prefix}.json"  # removed with what the save replaces
        self._is_renaming = False

    def begin(self) -> None:
        """Create the directory, remove files that killed saves of this run left in it, and leave
        a mark for :meth:`check_directory`.

        Raises:
            InputError: if other files, or the checkpoint of another run, are in it.
        """
        check_place(self.path)
        make_directory(self.path)
        with alone_in(self.path):
            self.claim.take()
            if self.claim.replaced is not None or not is_taken(self.path):
                remove_saved(self.path, self.claim.run, self.claim.replaced)
            write_file(self._mark, b"")

    def check_directory(self) -> None:
        """Raise :class:`InputError` on a rank that does not see what :meth:`begin` has written."""
        if not self._mark.exists():
            raise InputError(
                f"every rank must see the directory {self.path}, and this one does not see there "
                f"what rank 0 has just written (or another job saves there, too); name a directory "
                f"on a file system that all hosts share."
            )

    def part(self, rank: int) -> Path:
        """Return the path of a rank's file."""
        return self.path / f"{self.claim.prefix}-rank{rank:05}.safetensors"

    def end(self, ranks: int, tensors: dict[str, SavedTensor]) -> None:
        """Put the manifest in place, and remove the files of the checkpoint that it replaces.

        Raises:
            ZerocastError: if another job has saved here meanwhile; its save is kept.
        """
        claim = self.claim
        manifest = Manifest(claim.saved, claim.run, ranks, self._versions, tensors, self._training)
        write_file(self._draft, manifest.to_text().encode())
        sync_directory(self.path)  # the files that it names must be on the disk before it
        with alone_in(self.path):
            claim.check(self.path / name for name in manifest.files)
            self._is_renaming = True
            self._draft.replace(self.path / NAME)
            sync_directory(self.path)
            remove_saved(self.path, "" if claim.replace else claim.run, manifest)

    @contextmanager
    def removing_files(self) -> Iterator[None]:
        """Remove the files of all ranks if the context raises before the manifest is in place.
        Used by the rank that writes the manifest.
        """
        try:
            yield
        except BaseException:
            if not self._is_renaming or self._draft.exists():
                remove_saved(self.path, self.claim.saved)
            raise


# --- reading ---


class Reading(NamedTuple):
    """Elements to read: the tensor's name, their box, the chunk that has them, and the target."""

    name: str
    box: Box
    chunk: Chunk
    target: torch.Tensor


def read(path: Path, manifest: Manifest, wanted: Iterable[Reading]) -> None:
    """Read elements into their targets, file by file.

    Raises:
        InputError: if a file is missing or damaged.
    """
    held: dict[str, list[tuple[FileEntry, int]]] = {name: [] for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            entry = entry_of(name, tensor.dtype, tensor.shape, chunk.box)
            held[chunk.file.name].append((entry, chunk.start))
    by_file: dict[str, list[Reading]] = {}
    for each in wanted:
        by_file.setdefault(each.chunk.file.name, []).append(each)
    for name, readings in by_file.items():
        place = path / name if path.is_dir() else path
        with VerifiedFile(place, readings[0].chunk.file, held[name]) as file:
            for each in sorted(readings, key=lambda each: each.chunk.start):
                each.target.copy_(_read(file, each, manifest.tensors[each.name].dtype))


def _read(file: VerifiedFile, wanted: Reading, dtype: torch.dtype) -> torch.Tensor:
    """Return elements of a chunk; the whole rows that contain them are read."""
    chunk, box = wanted.chunk, wanted.box.inside(wanted.chunk.box)
    if not box.sizes:
        values = torch.empty((), dtype=dtype, device="cpu")
        file.read_into(chunk.start, values)
        return values
    first, row = box.offsets[0], chunk.box.sizes[1:]
    rows = torch.empty((box.sizes[0], *row), dtype=dtype, device="cpu")
    file.read_into(chunk.start + first * math.prod(row) * dtype.itemsize, rows)
    return Box((0, *box.offsets[1:]), box.sizes).of(rows)


def fill(path: Path, manifest: Manifest, shares: dict[str, Share]) -> None:
    """Fill the pieces of ``shares`` from a checkpoint that has all of them.

    Raises:
        InputError: if a file is missing or damaged.
    """
    read(
        path,
        manifest,
        (
            Reading(name, common, chunk, common.inside(box).of(piece))
            for name, share in shares.items()
            for box, piece in share.pieces.items()
            for chunk in manifest.tensors[name].chunks
            if (common := box.common(chunk.box))
        ),
    )
