"""Divides the writing of a checkpoint among ranks, and writes it through DCP: at once, or beside
the training.

Beside the training the threads of different ranks tell each other what they have written by small
files in the directory itself, since collectives belong to the training. Rank 0 puts the manifest in
place when all ranks have told it; a rank that fails says so there, and each rank's next call
raises.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from zerocast.checkpoint.dcp_storage import Place, Writer
from zerocast.checkpoint.files import DTYPES, FileInfo, write_file
from zerocast.checkpoint.pending import PendingSave
from zerocast.checkpoint.planners import SharePlanner
from zerocast.checkpoint.runs import Claim, identity_of, run_of
from zerocast.checkpoint.training import Contents
from zerocast.comm import Communicator, raising_together
from zerocast.errors import InputError, ZerocastError
from zerocast.numerics import NUMERICS_VERSION
from zerocast.safe_files import read_text


@dataclass
class Planned:
    """The parts of a checkpoint that are written.

    Attributes:
        claim: the save, its run, and the place that it replaces.
        said: what the checkpoint says beside its tensors.
        plans: the pieces that each rank writes, by rank; a piece that several ranks have is written
            by one.
        metadata: DCP's, of all tensors.
        planner: has this rank's pieces.
    """

    claim: Claim
    said: dict[str, Any]
    plans: list[SavePlan]
    metadata: Metadata
    planner: SharePlanner


def plan_save(
    path: Path,
    contents: Contents,
    of_rank: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    comm: Communicator,
    *,
    replace: bool,
) -> Planned:
    """Work out who writes what, and as which save of which run. Collective."""
    planner, identities = SharePlanner(contents.shares), [identity_of(each) for each in optimizers]
    claim = Claim(path, replace=replace, seen=identities[0].seen[path])
    head = claim.saved, [each.number for each in identities]
    told = head, contents.said["state"], of_rank, planner.create_local_plan()
    heads, states, of_ranks, locals_ = map(list, zip(*comm.all_gather_object(told), strict=True))
    claim.saved, numbers = heads[0]
    claim.run = run_of(numbers)
    for identity, number, said in zip(
        identities, numbers, contents.said["optimizers"], strict=True
    ):
        identity.number = said["identity"] = number
    state: dict[str, dict[str, Any]] = {}
    for by_name in states:
        for name, kinds in by_name.items():
            state.setdefault(name, {}).update(kinds)
    with raising_together(comm):  # whether the pieces of all ranks are every tensor once
        plans, metadata = planner.create_global_plan(locals_)
        for name, each in metadata.state_dict_metadata.items():
            assert isinstance(each, TensorStorageMetadata)
            if (dtype := each.properties.dtype) not in DTYPES:
                raise InputError(
                    f"{name} must be of a dtype that safetensors names, got {dtype}; convert it, "
                    f"or save its .view(torch.uint8)."
                )
    common = {**contents.said, "state": state, "of_rank": of_ranks}
    return Planned(claim, common, plans, metadata, planner)


def versions() -> dict[str, Any]:
    """Return the versions of what saves."""
    return {
        "zerocast": version("zerocast"),
        "numerics": NUMERICS_VERSION,
        "torch": torch.__version__,
    }


def write(planned: Planned, comm: Communicator) -> None:
    """Write a directory. Collective."""
    writer, plan = _writer(planned, comm)
    with writer.removing_files() if comm.rank == 0 else nullcontext():
        with raising_together(comm):
            results = writer.write(plan, planned.planner)
        everyone = comm.all_gather_object(results)
        with raising_together(comm):
            if comm.rank == 0:
                writer.finish(planned.metadata, everyone)


def write_beside(planned: Planned, comm: Communicator) -> PendingSave:
    """Copy this rank's part, and let a thread write it; rank 0's ends the checkpoint. Collective,
    until this returns.
    """
    writer, plan = _writer(planned, comm)
    planner = planned.planner
    written = {(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items}
    with raising_together(comm):  # where one has no memory for it
        planner.shares = {
            name: share.copied(box for box in share.pieces if (name, box.offsets) in written)
            for name, share in planner.shares.items()
        }

    def write_own() -> None:
        _tell(_note(planned.claim, comm.rank), lambda: writer.write(plan, planner))

    def finish(is_futile: threading.Event) -> None:
        if comm.rank == 0:
            with writer.removing_files():
                writer.finish(planned.metadata, _hear(planned.claim, comm, is_futile))

    return PendingSave(planned.claim.path, comm, write_own, finish)


def _writer(planned: Planned, comm: Communicator) -> tuple[Writer, SavePlan]:
    """Return what writes, and this rank's plan, with the directory made. Collective."""
    writer = Writer(planned.claim.path, planned.said, versions(), claim=planned.claim)
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
            _put_note(note, {"error": f"{type(error).__name__}: {error}"})
        raise
    places = [[r.index.fqn, list(r.index.offset or ()), r.storage_data.start] for r in results]
    file = asdict(results[0].storage_data.file) if results else None
    _put_note(note, {"file": file, "places": places})


def _hear(claim: Claim, comm: Communicator, is_futile: threading.Event) -> list[list[WriteResult]]:
    """Return what all ranks have written, once they have told it.

    Raises:
        ZerocastError: where one has failed, or does not tell it within the communicator's timeout;
            or where ``is_futile`` is set.
    """
    end, everyone, failed = time.monotonic() + comm.timeout, [], list[str]()
    for rank in range(comm.size):
        note, pause = _note(claim, rank), 0.001
        while not note.exists():
            is_late = rank == comm.rank or time.monotonic() > end  # its own has been written
            if is_late or is_futile.wait(pause):
                raise ZerocastError(
                    f"rank {rank} has not written its part of a checkpoint within {comm.timeout:g} "
                    f"s. Every rank must see the directory {claim.path}."
                )
            pause = min(2 * pause, 0.25)
        said = json.loads(read_text(note))
        if "error" in said:
            failed.append(f"rank {rank} could not write its part: {said['error']}.")
            continue
        everyone.append(
            [
                WriteResult(MetadataIndex(name, at), 0, Place(FileInfo(**said["file"]), start))
                for name, at, start in said["places"]
            ]
        )
    if failed:  # and no rank is writing any more
        raise ZerocastError(" ".join(failed))
    return everyone


def _note(claim: Claim, rank: int) -> Path:
    return claim.path / f"{claim.prefix}-rank{rank:05}.json"


def _put_note(note: Path, said: dict[str, Any]) -> None:
    """Write a note, which others see whole or not at all."""
    draft = note.with_suffix(".draft")
    write_file(draft, json.dumps(said).encode())
    draft.replace(note)
