"""Writes and reads checkpoints through ``torch.distributed.checkpoint`` (DCP): storage classes for
it.

DCP's own storage keeps its metadata, and every value except tensors, by pickle, which runs what a
file names; it writes its metadata in place and without a digest. So :class:`Writer` and
:class:`Reader` implement DCP's two interfaces of storage over files of safetensors and a manifest
in JSON (:mod:`zerocast.checkpoint.manifest`). DCP's planners do the rest: who writes what all ranks
hold, whether what all ranks write covers every tensor once, and which parts of which chunks a rank
reads. They are driven over a :class:`zerocast.comm.Communicator` here, so MPI and threads do as
well as torch.distributed; ``dcp.save`` and ``dcp.load`` can be given the same two classes.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zerocast.checkpoint.boxes import Box
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
    read_manifest,
    remove_saved,
)
from zerocast.checkpoint.planners import Shares, chunk_of, part_of, piece_of
from zerocast.checkpoint.runs import Claim, alone_in, is_taken
from zerocast.errors import UnsupportedError


class Place(NamedTuple):
    """Where a chunk was written."""

    file: FileInfo
    start: int


class Writer(StorageWriter):
    """Writes a checkpoint into a directory that all ranks see.

    Args:
        path: the directory; it is made where it does not exist.
        training: what the checkpoint says beside its tensors, in JSON values.
        versions: the versions of the packages that saved it.
        replace: whether to replace a checkpoint that is not this writer's.
        claim: the save and its run; new ones by default.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        training: dict[str, Any] | None = None,
        versions: dict[str, Any] | None = None,
        *,
        replace: bool = False,
        claim: Claim | None = None,
    ) -> None:
        self._is_given = claim is not None
        self._claim = claim or Claim(Path(os.path.realpath(path)), replace=replace)
        self._training, self._versions = training or {}, versions or {}
        self._is_renaming = False

    @property
    def path(self) -> Path:
        """The directory."""
        return self._claim.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write the next checkpoint into another directory, where one is given."""
        path = self.path if checkpoint_id is None else Path(os.path.realpath(checkpoint_id))
        self._claim = Claim(path, self._claim.replace, run=self._claim.run)
        self._is_renaming = False

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Make the directory, and remove what killed saves of this run have left in it.

        Raises:
            InputError: where something else is in it, or the checkpoint of another run.
        """
        if not self._is_given:
            self.reset()  # DCP gives one writer several saves
        if is_coordinator:
            check_place(self.path)
            make_directory(self.path)
            with alone_in(self.path):
                self._claim.take()
                replaced = self._claim.replaced
                if replaced is not None or not is_taken(self.path):
                    remove_saved(self.path, self._claim.run, replaced)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is.

        Raises:
            UnsupportedError: where it has what DCP would pickle.
        """
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                raise UnsupportedError(
                    f"{item.index.fqn} is not a tensor, and would have to be pickled; give "
                    "zerocast.checkpoint.save such values by extra."
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank's plan the name of its file."""
        prefix = self._claim.prefix
        names = [f"{prefix}-rank{rank:05}.safetensors" for rank in range(len(plans))]
        return [
            dataclasses.replace(plan, storage_data=name)
            for plan, name in zip(plans, names, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; the result is there when it is on the disk."""
        written: Future[list[WriteResult]] = Future()
        written.set_result(self.write(plan, planner))
        return written

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Do what :meth:`write_data` does, and return what it promises."""
        if not plan.items:
            return []
        entries = [_entry_of_item(item) for item in plan.items]
        head, starts = header_of(entries)
        with DigestingWriter(self.path / plan.storage_data) as file:
            file.write(head)
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                file.write_tensor(tensor)
            info = file.finish()
        return [
            WriteResult(item.index, entry.num_bytes, Place(info, start))
            for item, entry, start in zip(plan.items, entries, starts, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put the manifest in place, and remove the files of what it replaces.

        Raises:
            ZerocastError: where another job has saved here meanwhile; what it saved stays.
        """
        claim, tensors = self._claim, saved_tensors(metadata, results)
        manifest = Manifest(
            claim.saved, claim.run, len(results), self._versions, tensors, self._training
        )
        write_file(self._draft, manifest.to_text().encode())
        sync_directory(self.path)  # the files that it names are there before it is
        with alone_in(self.path):
            claim.check(self.path / name for name in manifest.files)
            self._is_renaming = True
            self._draft.replace(self.path / NAME)
            sync_directory(self.path)
            remove_saved(self.path, "" if claim.replace else claim.run, manifest)

    @contextmanager
    def removing_files(self) -> Iterator[None]:
        """Remove the files of all ranks where the context fails before the manifest is in place.
        For the rank that puts it there.
        """
        try:
            yield
        except BaseException:
            if not self._is_renaming or self._draft.exists():
                remove_saved(self.path, self._claim.saved)
            raise

    @property
    def _draft(self) -> Path:
        return self.path / f"{self._claim.prefix}.draft"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether it can be a directory."""
        return "://" not in os.fspath(checkpoint_id)


class Reader(StorageReader):
    """Reads a checkpoint, a directory or one file.

    Args:
        path: the directory or file.
        manifest: what it says of itself, where that has been read.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.path, self._manifest = Path(path), manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another checkpoint, where one is given."""
        if checkpoint_id is not None:
            self.path, self._manifest = Path(checkpoint_id), None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the checkpoint.

        Raises:
            InputError: as :func:`zerocast.checkpoint.manifest.read_manifest`.
        """
        if self._manifest is None:
            self._manifest = read_manifest(self.path)
        return self._manifest

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return DCP's description of the tensors."""
        described: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(tensor.dtype),
                torch.Size(tensor.shape),
                [chunk_of(chunk.box) for chunk in tensor.chunks],
            )
            for name, tensor in self.manifest.tensors.items()
        }
        return Metadata(described)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Do nothing: the manifest has been read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for; it is over when this returns.

        Raises:
            InputError: where a file is missing or damaged.
        """
        for item, values in self.read(plan.items):
            target = planner.resolve_tensor(item)
            target.copy_(values)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read(self, wanted: Iterable[ReadItem]) -> Iterator[tuple[ReadItem, torch.Tensor]]:
        """Yield each item with the elements that it asks for, file by file; raises as
        :meth:`read_data`.
        """
        chunks = {
            MetadataIndex(name, chunk.box.offsets): (chunk, tensor.dtype)
            for name, tensor in self.manifest.tensors.items()
            for chunk in tensor.chunks
        }
        held: dict[str, list[tuple[FileEntry, int]]] = {name: [] for name in self.manifest.files}
        for name, tensor in self.manifest.tensors.items():
            for c in tensor.chunks:
                held[c.file.name].append(
                    (entry_of(name, tensor.dtype, tensor.shape, c.box), c.start)
                )
        by_file: dict[str, list[tuple[int, ReadItem]]] = {}
        for item in wanted:
            chunk, _ = chunks[item.storage_index]
            by_file.setdefault(chunk.file.name, []).append((chunk.start, item))
        for items in by_file.values():
            items.sort(key=lambda placed: placed[0])
            info = chunks[items[0][1].storage_index][0].file
            path = self.path / info.name if self.path.is_dir() else self.path
            with VerifiedFile(path, info, held[info.name]) as file:
                for _, item in items:
                    yield item, _read(file, item, *chunks[item.storage_index])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether it can be a directory or a file."""
        return Writer.validate_checkpoint_id(checkpoint_id)


def saved_tensors(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]]
) -> dict[str, SavedTensor]:
    """Return where all ranks have written every tensor."""
    places: dict[MetadataIndex, Place] = {
        result.index: result.storage_data for by_rank in results for result in by_rank
    }
    tensors = {}
    for name, given in metadata.state_dict_metadata.items():
        assert isinstance(given, TensorStorageMetadata)
        chunks = [
            Chunk(Box(tuple(c.offsets), tuple(c.sizes)), *places[MetadataIndex(name, c.offsets)])
            for c in given.chunks
        ]
        tensors[name] = SavedTensor(given.properties.dtype, tuple(given.size), chunks)
    return tensors


def _entry_of_item(item: WriteItem) -> FileEntry:
    data = item.tensor_data
    assert data is not None
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return entry_of(item.index.fqn, data.properties.dtype, tuple(data.size), box)


def entry_of(name: str, dtype: torch.dtype, shape: tuple[int, ...], box: Box) -> FileEntry:
    """Return the tensor of a file that a piece of a tensor becomes."""
    offsets = "" if box.sizes == shape else f"@{','.join(map(str, box.offsets))}"
    return FileEntry(name + offsets, dtype, box.sizes)


def _read(file: VerifiedFile, item: ReadItem, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of a chunk that an item asks for; the rows that they are in are read."""
    sizes, offsets, lengths = chunk.box.sizes, item.storage_offsets, item.lengths
    if not sizes:
        rows = torch.empty((), dtype=dtype, device="cpu")
        file.read_into(chunk.start, rows)
        return rows
    rows = torch.empty((lengths[0], *sizes[1:]), dtype=dtype, device="cpu")
    row_bytes = rows[:1].nbytes
    file.read_into(chunk.start + offsets[0] * row_bytes, rows)
    return part_of(rows, (0, *offsets[1:]), lengths)


def fill(reader: Reader, shares: Shares) -> None:
    """Fill the pieces of ``shares`` from a checkpoint that has all of them.

    Raises:
        InputError: where a file is missing or damaged, or an element is in none.
    """
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    items: list[ReadItem] = []
    for name, share in shares.items():
        chunks = [chunk_of(box) for box in share.pieces]
        items += create_read_items_for_chunk_list(name, saved[name], chunks)
    for item, values in reader.read(items):
        piece = piece_of(shares, item.dest_index)
        part_of(piece, item.dest_offsets, item.lengths).copy_(values)
