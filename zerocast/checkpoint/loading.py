"""load: continues a training from a checkpoint, on any number of ranks."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerocast.checkpoint.manifest import DAMAGED, read_manifest
from zerocast.checkpoint.master_holders import listed, ranks_of, trainings_of
from zerocast.checkpoint.model_part import ModelPart
from zerocast.checkpoint.pending import wait_for
from zerocast.checkpoint.python_values import decode
from zerocast.checkpoint.runs import identity_of, run_of
from zerocast.checkpoint.training import Saved, check
from zerocast.comm import Attempt, Communicator, Group, announcing
from zerocast.comm.agreement import check_same, raise_together
from zerocast.errors import InputError, ZerocastError


@dataclass(frozen=True)
class Loaded:
    """What :func:`load` returns: what a user saved beside the training.

    Attributes:
        extra: the ``extra`` that was given to ``save``.
        of_rank: what this rank gave; None where another number of ranks saved, whose parts of the
            data and random numbers are not this rank's.
        steps: that were made, of a ZeroOptimizer; of several, the most.
        ranks: the number of ranks that saved.
    """

    extra: dict[str, Any]
    of_rank: dict[str, Any] | None
    steps: int
    ranks: int


def load(
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    model: torch.nn.Module | None = None,
    *,
    group: Group = None,
) -> Loaded:
    """Continue bit for bit from a checkpoint of :func:`zerocast.checkpoint.save`. Collective.

    Any number of ranks loads what any number has saved, a ZeroOptimizer what masters under FSDP2
    have saved, and the other way round. Each rank reads what it needs, and compares digests of all
    that it reads; nothing is unpickled. It takes memory for two to three of its shares, on the CPU.
    The training becomes that which was saved, so it may save there.

    Args:
        path: the directory or file.
        optimizer: made as that which was saved, of the same weights under the same recipes; a list
            of as many as were saved, in any order.
        model: as for ``save``.
        group: the ranks of a torch optimizer; all by default.

    Returns:
        What was saved beside the training.

    Raises:
        InputError: on every rank, where the checkpoint is missing, damaged, of another program or
            a newer format, or of another training than this one. Nothing has been changed.
        NonFiniteError: on every rank, where a master is not finite. Nothing has been changed.
        RankMismatchError: on every rank, where ranks see different checkpoints.
    """
    optimizers = listed(optimizer)
    comm = ranks_of(optimizers, group)
    with announcing([comm]):
        return _load(path, optimizers, model, group, comm)


def _load(
    path: str | os.PathLike[str],
    optimizers: Sequence[torch.optim.Optimizer],
    model: torch.nn.Module | None,
    group: Group,
    comm: Communicator,
) -> Loaded:
    """See :func:`load`; ``comm`` are the ranks."""
    wait_for(optimizers)
    attempt, digest = Attempt(), ""
    with attempt:
        manifest = read_manifest(Path(path))
        digest = manifest.digest
        trainings = trainings_of(optimizers, model, group, comm)
        part = ModelPart(model, [each.parameters for each in trainings], comm)
        saved = Saved(manifest.training, manifest.tensors)
        is_own = manifest.ranks == comm.size
        with _reading(path):
            said = saved.said["optimizers"]
            if len(said) != len(trainings):
                raise InputError(
                    f"as many optimizers must be loaded together as were saved, {len(said)}, got "
                    f"{len(trainings)}; give a list of all of them."
                )
            numbers = [each["identity"] for each in said]
            if manifest.run != run_of(numbers):
                raise ValueError("its run is another")
            for i, training in enumerate(trainings):
                check(training.described, saved.of(i))
                training.ask(saved.of(i))
            part.ask(saved, manifest.ranks)
            saved.want_values(f"value.of_rank.{comm.rank}." if is_own else None)
    required = f"every rank must see the same checkpoint at {path}"
    check_same(comm, [digest], required, attempt.error)
    with attempt:
        from zerocast.checkpoint.dcp_storage import Reader, fill

        with _reading(path):
            fill(Reader(path, manifest), saved.shares)
            tensors = {name: share.only for name, share in saved.shares.items()}
            of_rank = decode(saved.said["of_rank"][comm.rank], tensors) if is_own else None
            steps = max(each["steps"] for each in said)
            loaded = Loaded(saved.value("extra"), of_rank, steps, manifest.ranks)
            for i, training in enumerate(trainings):
                training.prepare(saved.of(i))
            part.check(saved)
        place = Path(os.path.realpath(path))
    raise_together(comm, attempt.error)
    for training, number in zip(trainings, numbers, strict=True):
        training.restore()
        identity_of(training.optimizer).number = number
    identity_of(trainings[0].optimizer).seen[place].add(manifest.saved)
    part.restore(saved)
    return loaded


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say that the checkpoint is at fault where it lacks what a training has."""
    try:
        yield
    except ZerocastError:
        raise
    except DAMAGED as error:
        raise InputError(
            f"the checkpoint at {path} is damaged, or holds tensors and no training "
            f"({type(error).__name__}: {error}); load an earlier checkpoint."
        ) from error
