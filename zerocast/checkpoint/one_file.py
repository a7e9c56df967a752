"""Writes a checkpoint into one safetensors file, whose tensors are whole."""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch

from zerocast.checkpoint.files import (
    BLOCK,
    DigestingWriter,
    FileEntry,
    FileInfo,
    header_of,
    make_directory,
    remove_files,
    sync_directory,
)
from zerocast.checkpoint.manifest import KEY, Chunk, Manifest, SavedTensor
from zerocast.checkpoint.writing import Planned, versions
from zerocast.comm import Attempt, Communicator, raise_together, raising_together
from zerocast.optim.boxes import Box


def write_one_file(planned: Planned, comm: Communicator, device: torch.device) -> None:
    """Write the checkpoint on rank 0, gathering one tensor at a time. Collective.

    Args:
        planned: the checkpoint.
        comm: the ranks.
        device: the device of the tensors that collectives take.
    """
    entries = [FileEntry(name, *kind) for name, kind in planned.kinds.items()]
    boxes: dict[str, list[list[Box]]] = {e.key: [[] for _ in planned.pieces] for e in entries}
    for rank, pieces in enumerate(planned.pieces):
        for name, box in pieces:
            boxes[name][rank].append(box)
    claim, path = planned.claim, planned.claim.path
    draft = path.with_name(f".{claim.prefix}.draft")
    sizes = [entry.num_bytes for entry in entries]

    def beginning(digests: list[str]) -> bytes:
        """Return the file's header with the manifest; its length does not depend on the digests."""
        start, end = 0, -1
        while start != end:  # the manifest, before the data, contains where the data begins
            start = end if end > 0 else 0
            info = FileInfo(path.name, start + sum(sizes), start, digests)
            tensors, at = {}, start
            for entry in entries:
                chunk = Chunk(Box((0,) * len(entry.shape), entry.shape), info, at)
                tensors[entry.key] = SavedTensor(entry.dtype, entry.shape, [chunk])
                at += entry.num_bytes
            manifest = Manifest(
                claim.saved, claim.run, comm.size, versions(), tensors, planned.description
            )
            head, _ = header_of(entries, {KEY: manifest.to_text()})
            end = len(head)
        return head

    attempt, file = Attempt(), None
    count = math.ceil(sum(sizes) / BLOCK)
    with ExitStack() as opened:
        with raising_together(comm):
            if comm.rank == 0:
                make_directory(path.parent)
                claim.take()
                remove_files(path.parent.glob(f".{claim.run}-*.draft"))  # of killed saves
                file = opened.enter_context(DigestingWriter(draft))
                file.skip(len(beginning(["0" * 16] * count)))
        for entry in entries:
            values = _gather(entry, boxes[entry.key], planned, comm, device, attempt)
            with attempt:
                if file is not None:
                    file.write_tensor(_joined(entry, boxes[entry.key], values))
            del values
        with attempt:
            if file is not None and attempt.error is None:
                file.write_beginning(beginning(file.finish().digests))
                claim.check([draft])
                draft.replace(path)
                sync_directory(path.parent)
        raise_together(comm, attempt.error)


def _gather(
    entry: FileEntry,
    boxes: list[list[Box]],
    planned: Planned,
    comm: Communicator,
    device: torch.device,
    attempt: Attempt,
) -> torch.Tensor:
    """Return the elements of all pieces, rank by rank. Collective.

    It first raises on every rank any rank's error in ``attempt``, from earlier tensors or from the
    allocation here.
    """
    counts = [sum(math.prod(box.sizes) for box in own) for own in boxes]
    with attempt:
        values = torch.empty(sum(counts), dtype=entry.dtype, device=device)
        start = sum(counts[: comm.rank])
        for box in boxes[comm.rank]:
            piece = planned.shares[entry.key].pieces[box].reshape(-1)
            values[start : start + piece.numel()].copy_(piece)
            start += piece.numel()
    raise_together(comm, attempt.error)
    comm.all_gather_(values, counts)
    return values


def _joined(entry: FileEntry, boxes: list[list[Box]], values: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor on the CPU from the result of :func:`_gather`."""
    whole, start = torch.empty(entry.shape, dtype=entry.dtype, device="cpu"), 0
    for box in (box for own in boxes for box in own):
        target = box.of(whole)
        target.copy_(values[start : start + target.numel()].view(target.shape))
        start += target.numel()
    return whole
