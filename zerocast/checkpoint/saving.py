"""save: a training's state onto the disk; a save that is killed leaves the one before it whole."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerocast.arguments import check_flag
from zerocast.checkpoint.boxes import Share
from zerocast.checkpoint.files import FileInfo
from zerocast.checkpoint.manifest import SUFFIX, check_place
from zerocast.checkpoint.model_part import ModelPart, digest_of
from zerocast.checkpoint.pending import PendingSave, hear, remember, told, wait_for
from zerocast.checkpoint.planned import Planned, plan_save
from zerocast.checkpoint.sources import ranks_of, training_of
from zerocast.checkpoint.training import Contents
from zerocast.checkpoint.values import encode
from zerocast.comm import Attempt, Communicator, Group, raise_together
from zerocast.comm.agreement import check_same
from zerocast.errors import InputError
from zerocast.numerics import NUMERICS_VERSION
from zerocast.optim.saved import check_numbers

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

    from zerocast.checkpoint.storage import Writer


def save(
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    of_rank: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    group: Group = None,
) -> PendingSave | None:
    """Save all that a training continues from, bit for bit, on any number of ranks. Collective.

    Masters, optimizer state and options, averages, what recipes remember, steps. A directory that
    holds a checkpoint already holds the new one afterwards; until the last rename of the save it
    holds the old one, whole, and so it does after a save that failed or was killed. Every rank
    writes its own part, so all of them must see the directory (a shared file system). A rank takes
    memory for one of its pieces, on the CPU, at a time.

    Args:
        path: a directory; or a file ending in ``.safetensors``, which rank 0 writes, gathering one
            tensor at a time.
        optimizer: a :class:`zerocast.optim.ZeroOptimizer`, or a torch optimizer of masters in
            ``model`` (``convert(..., weights="master")``, under FSDP2 or not).
        model: its buffers, frozen parameters and layers' recipe state are saved, too. Needed for
            a torch optimizer.
        extra: what else belongs to the run, the same on every rank: ``schedule.state_dict()``,
            ``scaler.state_dict()``, an epoch. None, bools, numbers, text, tensors, and lists,
            tuples, dicts of them.
        of_rank: likewise, what belongs to this rank: the state of its random generators, its place
            in the data.
        asynchronous: whether to return when everything is copied, and write beside the training.
            The next call with this optimizer waits for it and raises what went wrong; so does the
            result's ``wait()``. Only into a directory.
        group: of a torch optimizer the ranks; all by default.

    Returns:
        The save that goes on, if ``asynchronous``.

    Raises:
        InputError, UnsupportedError: on every rank, for a wrong argument on any, or a value that
            cannot be saved.
        NonFiniteError: on every rank, where a master is not finite: no run continues from it.
        UnfinishedStepError: on every rank, where the last step was left unfinished.
        ZerocastError: on every rank, where writing failed on any.
    """
    comm = ranks_of(optimizer, group)
    wait_for(optimizer)
    attempt, place = Attempt(), Path()
    with attempt:
        check_flag("asynchronous", asynchronous)
        place = Path(path)
        is_file = place.suffix == SUFFIX
        if is_file and (asynchronous or place.is_dir()):
            raise InputError(
                f"one file is written at once, where no directory is, got {place}; name a "
                f"directory for an asynchronous save."
            )
        if comm.rank == 0 and not is_file:
            check_place(place)
        training = training_of(optimizer, model, group, comm)
    raise_together(comm, attempt.error)

    contents = training.contents()
    with attempt:
        own = _put_values(contents, extra, of_rank, comm.rank)
        for name, share in contents.shares.items():
            if name.startswith("master."):
                for piece in share.pieces.values():
                    check_numbers(f"the {name.replace('.', ' of ', 1)}", piece, finite=True)
    common = {key: value for key, value in contents.said.items() if key != "state"}
    lines = [f"path {place}", *(f"{key} {json.dumps(value)}" for key, value in common.items())]
    lines += [
        f"{name} {digest_of(share.only)}"
        for name, share in contents.shares.items()
        if name.startswith("value.extra")
    ]
    check_same(comm, lines, "every rank must save the same", attempt.error)
    ModelPart(model, training.parameters, comm).put(contents)

    planned = plan_save(contents, own, comm)
    if is_file:
        from zerocast.checkpoint.one_file import write_one_file

        write_one_file(place, planned, versions(), comm, training.device)
    elif asynchronous:
        pending = _write_beside(place, planned, comm)
        remember(optimizer, pending)
        return pending
    else:
        _write(place, planned, comm)
    return None


def versions() -> dict[str, Any]:
    """Return the versions of what saves."""
    return {
        "zerocast": version("zerocast"),
        "numerics": NUMERICS_VERSION,
        "torch": torch.__version__,
    }


def _writer(path: Path, planned: Planned, comm: Communicator) -> tuple[Writer, SavePlan]:
    """Return what writes, and this rank's plan, with the directory made. Collective."""
    from zerocast.checkpoint.storage import Writer

    writer, attempt = Writer(path, planned.said, versions(), planned.saved), Attempt()
    with attempt:
        writer.set_up_storage_writer(comm.rank == 0)
        writer.prepare_local_plan(planned.plans[comm.rank])
    raise_together(comm, attempt.error)
    return writer, writer.prepare_global_plan(planned.plans)[comm.rank]


def _write(path: Path, planned: Planned, comm: Communicator) -> None:
    """Write the checkpoint. Collective."""
    writer, plan = _writer(path, planned, comm)
    attempt, results = Attempt(), []
    with attempt:
        results = writer.write(plan, planned.planner)
    raise_together(comm, attempt.error)
    everyone = comm.all_gather_object(results)
    with attempt:
        if comm.rank == 0:
            writer.finish(planned.metadata, everyone)
    raise_together(comm, attempt.error)


def _write_beside(path: Path, planned: Planned, comm: Communicator) -> PendingSave:
    """Copy this rank's part, and let a thread write it; rank 0's ends the checkpoint. Collective,
    until this returns.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.storage import WriteResult

    from zerocast.checkpoint.storage import Place

    writer, plan = _writer(path, planned, comm)
    planner, rank, saved = planned.planner, comm.rank, planned.saved
    written = {(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items}
    planner.shares = {
        name: share.copied(box for box in share.pieces if (name, box.offsets) in written)
        for name, share in planner.shares.items()
    }

    def result(name: str, offset: Any, info: FileInfo, start: int) -> WriteResult:
        return WriteResult(MetadataIndex(name, offset), 0, Place(info, start))

    def write() -> None:
        told(path, saved, rank, lambda: writer.write(plan, planner))

    def finish(is_futile: threading.Event) -> None:
        if rank == 0:
            writer.finish(planned.metadata, hear(path, saved, comm, result, is_futile))

    return PendingSave(path, comm, write, finish)


def _put_values(contents: Contents, extra: Any, of_rank: Any, rank: int) -> Any:
    """Add a user's values; return those of this rank, in JSON."""
    contents.put_value("extra", dict(extra or {}))
    tensors: dict[str, torch.Tensor] = {}
    own = encode(dict(of_rank or {}), f"value.of_rank.{rank}", tensors)
    contents.shares |= {name: Share.of(tensor) for name, tensor in tensors.items()}
    return own
