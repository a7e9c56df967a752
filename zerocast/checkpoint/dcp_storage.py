"""Storage classes that let ``torch.distributed.checkpoint`` (DCP) write and read checkpoints.

DCP's standard storage pickles its metadata and every value except tensors. Unpickling runs code
that a file names. It also overwrites metadata in place and without a digest. Its safetensors
storage (``HuggingFaceStorageWriter``) finds a tensor in a file by name, so it silently drops one of
two pieces that a rank has of a tensor. So :class:`Writer` and :class:`Reader` implement DCP's two
storage interfaces with the files of :mod:`zerocast.checkpoint`, for ``dcp.save`` and ``dcp.load``.
``zerocast.checkpoint.save`` and ``load`` do not use DCP.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zerocast.checkpoint.files import FileEntry
from zerocast.checkpoint.manifest import Chunk, Manifest, SavedTensor, read_manifest
from zerocast.checkpoint.parts import DirectorySave, Reading, entry_of, read, write_part
from zerocast.checkpoint.runs import Claim
from zerocast.errors import UnsupportedError
from zerocast.optim.boxes import Box


class Writer(StorageWriter):
    """A DCP storage that writes a checkpoint into a directory that all ranks share.

    Args:
        path: the directory; created if it does not exist.
        replace: whether to replace a checkpoint of another writer.
    """

    def __init__(self, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        self._save = DirectorySave(Claim(Path(os.path.realpath(path)), replace=replace), {}, {})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new save, into the directory ``checkpoint_id`` if one is given."""
        claim = self._save.claim
        path = claim.path if checkpoint_id is None else Path(os.path.realpath(checkpoint_id))
        self._save = DirectorySave(Claim(path, claim.replace, run=claim.run), {}, {})

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Create the directory, and remove files that killed saves of this run left in it.

        Raises:
            InputError: if other files, or the checkpoint of another run, are in it.
        """
        self.reset()  # DCP gives one writer several saves
        if is_coordinator:
            self._save.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged.

        Raises:
            UnsupportedError: if it has a value that DCP would pickle.
        """
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                raise UnsupportedError(
                    f"{item.index.fqn} is not a tensor, and would be pickled; pass such values to "
                    "zerocast.checkpoint.save as extra."
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add to each rank's plan the name of its file."""
        names = [self._save.part(rank).name for rank in range(len(plans))]
        return [
            dataclasses.replace(plan, storage_data=name)
            for plan, name in zip(plans, names, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file to the disk, and return a completed future."""
        entries = [_entry_of_item(item) for item in plan.items]
        values: Any = (planner.resolve_data(item) for item in plan.items)
        part = write_part(self._save.path / (plan.storage_data or ""), entries, values)
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                WriteResult(item.index, entry.num_bytes, (part.file, start))
                for item, entry, start in zip(plan.items, entries, part.starts, strict=True)
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put the manifest in place, and remove the files of the checkpoint that it replaces.

        Raises:
            ZerocastError: if another job has saved here meanwhile; its save is kept.
        """
        places = {result.index: result.storage_data for each in results for result in each}
        given: dict[str, Any] = metadata.state_dict_metadata
        tensors = {
            name: SavedTensor(
                each.properties.dtype,
                tuple(each.size),
                [Chunk(_box_of(c), *places[MetadataIndex(name, c.offsets)]) for c in each.chunks],
            )
            for name, each in given.items()
        }
        with self._save.removing_files():
            self._save.end(len(results), tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether ``checkpoint_id`` can be a directory."""
        return "://" not in os.fspath(checkpoint_id)


class Reader(StorageReader):
    """A DCP storage that reads a checkpoint, from a directory or one file.

    Args:
        path: the directory or file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read the checkpoint ``checkpoint_id`` from now on, if it is given."""
        if checkpoint_id is not None:
            self.path, self._manifest = Path(checkpoint_id), None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the checkpoint.

        Raises:
            InputError: see :func:`zerocast.checkpoint.manifest.read_manifest`.
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
                [ChunkStorageMetadata(*map(torch.Size, chunk.box)) for chunk in tensor.chunks],
            )
            for name, tensor in self.manifest.tensors.items()
        }
        return Metadata(described)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Do nothing: the manifest is read when it is first used."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the elements that the plan asks for, and return a completed future.

        Raises:
            InputError: if a file is missing or damaged.
        """
        chunks = {
            MetadataIndex(name, chunk.box.offsets): chunk
            for name, tensor in self.manifest.tensors.items()
            for chunk in tensor.chunks
        }
        targets = [planner.resolve_tensor(item) for item in plan.items]
        wanted = []
        for item, target in zip(plan.items, targets, strict=True):
            chunk = chunks[item.storage_index]
            starts = zip(chunk.box.offsets, item.storage_offsets, strict=True)
            box = Box(tuple(map(sum, starts)), tuple(item.lengths))
            wanted.append(Reading(item.storage_index.fqn, box, chunk, target))
        read(self.path, self.manifest, wanted)
        for item, target in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether ``checkpoint_id`` can be a directory or a file."""
        return Writer.validate_checkpoint_id(checkpoint_id)


def _box_of(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _entry_of_item(item: WriteItem) -> FileEntry:
    data = item.tensor_data
    assert data is not None
    return entry_of(item.index.fqn, data.properties.dtype, data.size, _box_of(data.chunk))
