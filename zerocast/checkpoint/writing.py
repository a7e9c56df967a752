"""Divides the writing of a checkpoint among ranks, and writes it: synchronously or in threads.

Threads of different ranks exchange messages through small files in the checkpoint's directory,
since collectives are used by the training. Each rank reports what it has written, or its error.
Rank 0 puts the manifest in place when all ranks have reported; after an error, each rank's next
call raises.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch

from zerocast.checkpoint.files import DTYPES, FileInfo, write_file
from zerocast.checkpoint.manifest import Chunk, SavedTensor
from zerocast.checkpoint.parts import DirectorySave, Part, entry_of, write_part
from zerocast.checkpoint.pending import PendingSave
from zerocast.checkpoint.runs import Claim, identity_of, run_of
from zerocast.comm import Communicator, raising_together
from zerocast.errors import InputError, ZerocastError
from zerocast.numerics import NUMERICS_VERSION
from zerocast.optim.boxes import Box, Share, are_whole
from zerocast.safe_files import read_text

TensorPiece: TypeAlias = tuple[str, Box]
"""A tensor's name, and a box of its elements that one rank writes."""


@dataclass
class Planned:
    """A checkpoint that is planned and not yet written.

    Attributes:
        claim: the save, its run, and the place that it replaces.
        description: the description of the training for the manifest, in JSON values.
        kinds: the dtype and shape of every tensor.
        pieces: by rank, the pieces that it writes; a piece that several ranks have is written once.
        shares: this rank's share of each tensor.
    """

    claim: Claim
    description: dict[str, Any]
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    pieces: list[list[TensorPiece]]
    shares: dict[str, Share]


def plan_save(
    path: Path,
    description: dict[str, Any],
    shares: dict[str, Share],
    of_rank: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    comm: Communicator,
    *,
    replace: bool,
) -> Planned:
    """Plan which rank writes what, and agree on the ids of the run and the save. Collective."""
    identities = [identity_of(each) for each in optimizers]
    claim = Claim(path, replace=replace, seen=identities[0].seen[path])
    head = claim.saved, [each.number for each in identities]
    held = [(name, share.dtype, share.shape, list(share.pieces)) for name, share in shares.items()]
    heads, states, of_ranks, everyone = zip(
        *comm.all_gather_object((head, description["state"], of_rank, held)), strict=True
    )
    claim.saved, numbers = heads[0]
    claim.run = run_of(numbers)
    for identity, number, optimizer in zip(
        identities, numbers, description["optimizers"], strict=True
    ):
        identity.number = optimizer["identity"] = number
    state: dict[str, dict[str, Any]] = {}
    for by_name in states:
        for name, kinds in by_name.items():
            state.setdefault(name, {}).update(kinds)
    common = {**description, "state": state, "of_rank": list(of_ranks)}
    with raising_together(comm):
        kinds, pieces = _divided(everyone)
    return Planned(claim, common, kinds, pieces, shares)


def _divided(everyone: Sequence[Any]) -> tuple[dict[str, Any], list[list[TensorPiece]]]:
    """Return the kinds of tensors, and the pieces that each rank writes, balanced by bytes.

    Args:
        everyone: by rank, what it has of each tensor: name, dtype, shape, boxes.

    Raises:
        InputError: if the pieces of all ranks do not cover every tensor once, ranks differ in its
            dtype or shape, or its dtype cannot be saved.
    """
    kinds: dict[str, Any] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, held in enumerate(everyone):
        for name, dtype, shape, boxes in held:
            if dtype not in DTYPES:
                raise InputError(
                    f"{name} must be of a dtype that safetensors names, got {dtype}; convert it, "
                    f"or save its .view(torch.uint8)."
                )
            if kinds.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise InputError(
                    f"{name} must be one tensor on every rank, and is {kinds[name]} on one and "
                    f"{(dtype, shape)} on rank {rank}; save the same training on all."
                )
            for box in boxes:
                holders.setdefault(name, {}).setdefault(box, []).append(rank)
    loads, pieces = [0] * len(everyone), [list[TensorPiece]() for _ in everyone]
    for name, (dtype, shape) in kinds.items():
        boxes = holders.get(name, {})
        if not are_whole(shape, list(boxes)):
            raise InputError(
                f"the ranks must have each element of {name} {list(shape)} once, and have "
                f"{[tuple(box) for box in boxes]}; save with all ranks of its mesh."
            )
        for box, ranks in boxes.items():
            rank = min(ranks, key=loads.__getitem__)
            loads[rank] += math.prod(box.sizes) * dtype.itemsize
            pieces[rank].append((name, box))
    return kinds, pieces


def versions() -> dict[str, Any]:
    """Return the versions of zerocast, its numerics and torch."""
    return {
        "zerocast": version("zerocast"),
        "numerics": NUMERICS_VERSION,
        "torch": torch.__version__,
    }


def write(planned: Planned, comm: Communicator) -> None:
    """Write a checkpoint into a directory. Collective."""
    save = _begun(planned, comm)
    with save.removing_files() if comm.rank == 0 else nullcontext():
        with raising_together(comm):
            save.check_directory()
            own = _write_own(planned, save, comm.rank)
        parts = comm.all_gather_object(own)
        with raising_together(comm):
            if comm.rank == 0:
                save.end(comm.size, _tensors(planned, parts))


def write_beside(planned: Planned, comm: Communicator) -> PendingSave:
    """Copy this rank's part, and write it in a thread; rank 0's thread also writes the manifest.
    This call is collective; the threads use no collectives.
    """
    save = _begun(planned, comm)
    with (
        save.removing_files() if comm.rank == 0 else nullcontext(),
        raising_together(comm),  # a rank may have too little memory
    ):
        save.check_directory()
        planned.shares = _copied(planned.shares, planned.pieces[comm.rank])

    def write_own() -> None:
        _say(_note(planned.claim, comm.rank), lambda: _write_own(planned, save, comm.rank))

    def finish(is_futile: threading.Event) -> None:
        if comm.rank == 0:
            with save.removing_files():
                save.end(comm.size, _tensors(planned, _said(planned.claim, comm, is_futile)))

    return PendingSave(planned.claim.path, comm, write_own, finish)


def _begun(planned: Planned, comm: Communicator) -> DirectorySave:
    """Begin a save, and return it. Collective."""
    save = DirectorySave(planned.claim, versions(), planned.description)
    with raising_together(comm):
        if comm.rank == 0:
            save.begin()
    return save


def _copied(shares: dict[str, Share], pieces: Sequence[TensorPiece]) -> dict[str, Share]:
    """Return shares with copies of these pieces on the CPU."""
    found: dict[str, Share] = {}
    for name, box in pieces:
        copy = shares[name].pieces[box].detach().to("cpu", copy=True)
        found.setdefault(name, Share(shares[name].shape, {}, copy)).pieces[box] = copy
    return found


def _write_own(planned: Planned, save: DirectorySave, rank: int) -> Part:
    """Write this rank's part."""
    pieces, kinds = planned.pieces[rank], planned.kinds
    entries = [entry_of(name, *kinds[name], box) for name, box in pieces]
    values = (planned.shares[name].pieces[box] for name, box in pieces)
    return write_part(save.part(rank), entries, values)


def _tensors(planned: Planned, parts: Sequence[Part]) -> dict[str, SavedTensor]:
    """Return all tensors, with the places where ranks have written their pieces."""
    tensors = {name: SavedTensor(*kind, []) for name, kind in planned.kinds.items()}
    for pieces, part in zip(planned.pieces, parts, strict=True):
        for (name, box), start in zip(pieces, part.starts, strict=True):
            assert part.file is not None
            tensors[name].chunks.append(Chunk(box, part.file, start))
    return tensors


# --- messages between threads ---


def _say(note: Path, write: Callable[[], Part]) -> None:
    """Write this rank's part, and report to rank 0 what has been written, or the error."""
    try:
        part = write()
    except Exception as error:
        with suppress(OSError):  # if nothing can be written, the next call still raises
            _put_note(note, {"error": f"{type(error).__name__}: {error}"})
        raise
    file = None if part.file is None else asdict(part.file)
    _put_note(note, {"file": file, "starts": part.starts})


def _said(claim: Claim, comm: Communicator, is_futile: threading.Event) -> list[Part]:
    """Wait for the reports of all ranks, and return what they have written.

    Raises:
        ZerocastError: if a rank has failed, does not report within the communicator's timeout, or
            ``is_futile`` is set.
    """
    end, parts, failed = time.monotonic() + comm.timeout, list[Part](), list[str]()
    for rank in range(comm.size):
        note, pause = _note(claim, rank), 0.001
        while not note.exists():
            is_late = rank == comm.rank or time.monotonic() > end  # this rank wrote its note before
            if is_late or is_futile.wait(pause):
                raise ZerocastError(
                    f"rank {rank} has not written its part of a checkpoint within {comm.timeout:g} "
                    f"s. Every rank must see the directory {claim.path}."
                )
            pause = min(2 * pause, 0.25)
        content = json.loads(read_text(note))
        if "error" in content:
            failed.append(f"rank {rank} could not write its part: {content['error']}.")
            continue
        parts.append(Part(content["file"] and FileInfo(**content["file"]), content["starts"]))
    if failed:  # no rank is still writing
        raise ZerocastError(" ".join(failed))
    return parts


def _note(claim: Claim, rank: int) -> Path:
    return claim.path / f"{claim.prefix}-rank{rank:05}.json"


def _put_note(note: Path, content: dict[str, Any]) -> None:
    """Write a note atomically: other ranks see all of it or nothing."""
    draft = note.with_suffix(".draft")
    write_file(draft, json.dumps(content).encode())
    draft.replace(note)
