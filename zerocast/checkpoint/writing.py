"""Divides the writing of a checkpoint among ranks, and writes it through DCP: at once, or beside
the training.

Beside the training the threads of different ranks tell each other what they have written by small
files in the directory itself, since collectives belong to the training. Rank 0 puts the manifest in
place when all ranks have told it; a rank that fails says so there, and each rank's next call
raises.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from zerocast.checkpoint.files import FileInfo, replace_file
from zerocast.checkpoint.pending import PendingSave
from zerocast.checkpoint.planners import SharePlanner
from zerocast.checkpoint.storage import Place, Writer
from zerocast.checkpoint.training import Contents
from zerocast.comm import Communicator, raising_together
from zerocast.errors import ZerocastError
from zerocast.numerics import NUMERICS_VERSION


@dataclass
class Planned:
    """The parts of a checkpoint that are written.

    Attributes:
        saved: the id of the save.
        said: what the checkpoint says beside its tensors.
        plans: the pieces that each rank writes, by rank; a piece that several ranks have is written
            by one.
        metadata: DCP's, of all tensors.
        planner: has this rank's pieces.
    """

    saved: str
    said: dict[str, Any]
    plans: list[SavePlan]
    metadata: Metadata
    planner: SharePlanner


def plan_save(contents: Contents, of_rank: Any, comm: Communicator) -> Planned:
    """Work out who writes what. Collective."""
    planner = SharePlanner(contents.shares)
    local = planner.create_local_plan()
    told = secrets.token_hex(8), contents.said["state"], of_rank, local
    tokens, states, of_ranks, locals_ = map(list, zip(*comm.all_gather_object(told), strict=True))
    state: dict[str, dict[str, Any]] = {}
    for by_name in states:
        for name, kinds in by_name.items():
            state.setdefault(name, {}).update(kinds)
    with raising_together(comm):  # whether the pieces of all ranks are every tensor once
        plans, metadata = planner.create_global_plan(locals_)
    said = {**contents.said, "state": state, "of_rank": of_ranks}
    return Planned(tokens[0], said, plans, metadata, planner)


def versions() -> dict[str, Any]:
    """Return the versions of what saves."""
    return {
        "zerocast": version("zerocast"),
        "numerics": NUMERICS_VERSION,
        "torch": torch.__version__,
    }


def write(path: Path, planned: Planned, comm: Communicator) -> None:
    """Write a directory. Collective."""
    writer, plan = _writer(path, planned, comm)
    with raising_together(comm):
        results = writer.write(plan, planned.planner)
    everyone = comm.all_gather_object(results)
    with raising_together(comm):
        if comm.rank == 0:
            writer.finish(planned.metadata, everyone)


def write_beside(path: Path, planned: Planned, comm: Communicator) -> PendingSave:
    """Copy this rank's part, and let a thread write it; rank 0's ends the checkpoint. Collective,
    until this returns.
    """
    writer, plan = _writer(path, planned, comm)
    planner = planned.planner
    written = {(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items}
    planner.shares = {
        name: share.copied(box for box in share.pieces if (name, box.offsets) in written)
        for name, share in planner.shares.items()
    }

    def write_own() -> None:
        _tell(_note(path, planned, comm.rank), lambda: writer.write(plan, planner))

    def finish(is_futile: threading.Event) -> None:
        if comm.rank == 0:
            writer.finish(planned.metadata, _hear(path, planned, comm, is_futile))

    return PendingSave(path, comm, write_own, finish)


def _writer(path: Path, planned: Planned, comm: Communicator) -> tuple[Writer, SavePlan]:
    """Return what writes, and this rank's plan, with the directory made. Collective."""
    writer = Writer(path, planned.said, versions(), planned.saved)
    with raising_together(comm):
        writer.set_up_storage_writer(comm.rank == 0)
        writer.prepare_local_plan(planned.plans[comm.rank])
    return writer, writer.prepare_global_plan(planned.plans)[comm.rank]


# --- messages between threads ---


def _tell(note: Path, write: Callable[[], list[WriteResult]]) -> None:
    """Write this rank's part, and tell rank 0 what it has written, or why it has not."""
    try:
        results = write()
    except Exception as error:
        with suppress(OSError):  # where nothing can be written, the next call raises
            replace_file(note, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        raise
    places = [[r.index.fqn, list(r.index.offset or ()), r.storage_data.start] for r in results]
    file = asdict(results[0].storage_data.file) if results else None
    replace_file(note, json.dumps({"file": file, "places": places}).encode())


def _hear(
    path: Path, planned: Planned, comm: Communicator, is_futile: threading.Event
) -> list[list[WriteResult]]:
    """Return what all ranks have written, once they have told it.

    Raises:
        ZerocastError: where one has failed, or does not tell it within the communicator's timeout;
            or where ``is_futile`` is set.
    """
    end, everyone = time.monotonic() + comm.timeout, []
    for rank in range(comm.size):
        note, pause = _note(path, planned, rank), 0.001
        while not note.exists():
            if time.monotonic() > end or is_futile.wait(pause):
                raise ZerocastError(
                    f"rank {rank} has not written its part of a checkpoint within {comm.timeout:g} "
                    f"s. Every rank must see the directory {path}."
                )
            pause = min(2 * pause, 0.25)
        said = json.loads(note.read_text())
        if "error" in said:
            raise ZerocastError(f"rank {rank} could not write its part: {said['error']}.")
        everyone.append(
            [
                WriteResult(MetadataIndex(name, at), 0, Place(FileInfo(**said["file"]), start))
                for name, at, start in said["places"]
            ]
        )
    return everyone


def _note(path: Path, planned: Planned, rank: int) -> Path:
    return path / f"{planned.saved}-rank{rank:05}.json"
