"""load: resumes a training from a checkpoint, on any number of ranks."""

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
from zerocast.checkpoint.parts import fill
from zerocast.checkpoint.pending import wait_for
from zerocast.checkpoint.python_values import decode
from zerocast.checkpoint.runs import identity_of, run_of
from zerocast.comm import Attempt, Communicator, Group, announcing
from zerocast.comm.agreement import check_same, raise_together
from zerocast.errors import InputError, ZerocastError
from zerocast.optim.training_state import TrainingState, Wanted


@dataclass(frozen=True)
class Loaded:
    """The result of :func:`load`: values that a user saved beside the training.

    Attributes:
        extra: the ``extra`` that was given to ``save``.
        of_rank: the ``of_rank`` that this rank gave; None if another number of ranks saved, since
            their random states and positions in the data do not fit this rank.
        steps: the steps made by a ZeroOptimizer; the most of several, 0 for torch optimizers.
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
    """Resume bit for bit from a checkpoint of :func:`zerocast.checkpoint.save`. Collective.

    Any number of ranks can load what any number saved. A ZeroOptimizer can load what masters under
    FSDP2 saved, and vice versa. Each rank reads what it needs, and checks the digests of all that
    it reads; nothing is unpickled. This takes CPU memory for two to three of its shares. The
    optimizers become those of the saved run, so they may save to the same place.

    Args:
        path: the directory or file.
        optimizer: an optimizer made like the saved one, of the same weights with the same recipes;
            or a list of as many as were saved, in any order.
        model: as for ``save``.
        group: the ranks of a torch optimizer; all by default.

    Returns:
        The values that were saved beside the training.

    Raises:
        InputError: on every rank, if the checkpoint is missing, damaged, of another program,
            another format or another training than this one. Nothing has been changed.
        NonFiniteError: on every rank, if a master is not finite. Nothing has been changed.
        RankMismatchError: on every rank, if ranks see different checkpoints.
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
    """Load as :func:`load` does; ``comm`` has the ranks."""
    wait_for(optimizers)
    attempt, digest, states = Attempt(), "", list[TrainingState]()
    with attempt:
        manifest = read_manifest(Path(path))
        digest = manifest.digest
        trainings = trainings_of(optimizers, model, group, comm)
        part = ModelPart(model, [each.parameters for each in trainings], comm)
        description, wanted = manifest.training, Wanted(manifest.tensors)
        is_own = manifest.ranks == comm.size
        with _reading(path):
            if len(description["optimizers"]) != len(trainings):
                raise InputError(
                    f"all {len(description['optimizers'])} saved optimizers must be loaded "
                    f"together, got {len(trainings)}; give a list of all of them."
                )
            numbers = [each["identity"] for each in description["optimizers"]]
            if manifest.run != run_of(numbers):
                raise ValueError("its run number differs")
            for training, given in zip(trainings, description["optimizers"], strict=True):
                state = TrainingState(given, [], _kinds(description["state"]), wanted.shares)
                training.check_load(given, "zerocast.checkpoint.load")
                training.ask(state, wanted)
                states.append(state)
            part.ask(description, wanted, manifest.ranks)
            values = ["value.options.", "value.extra."]
            values += [f"value.of_rank.{comm.rank}."] if is_own else []
            for name in manifest.tensors:
                if name.startswith(tuple(values)):
                    wanted.ask_whole(name)
    required = f"every rank must see the same checkpoint at {path}"
    check_same(comm, [digest], required, attempt.error)
    with attempt:
        with _reading(path):
            fill(Path(path), manifest, wanted.shares)
            tensors = {name: share.local for name, share in wanted.shares.items()}
            of_rank = decode(description["of_rank"][comm.rank], tensors) if is_own else None
            steps = max(each["steps"] for each in description["optimizers"])
            loaded = Loaded(decode(description["extra"], tensors), of_rank, steps, manifest.ranks)
            for training, state in zip(trainings, states, strict=True):
                state.groups = decode(state.description["options"], tensors)
                training.check(state)
            part.check(description, wanted.shares)
        place = Path(os.path.realpath(path))
    raise_together(comm, attempt.error)
    for training, state, number in zip(trainings, states, numbers, strict=True):
        training.restore(state)
        identity_of(training.optimizer).number = number
    identity_of(trainings[0].optimizer).seen[place].add(manifest.saved)
    part.restore(description, wanted.shares)
    return loaded


def _kinds(saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the kinds of optimizer state by weight and key, with values decoded from JSON."""
    return {
        name: {
            key: {"value": decode(kind["value"], {})} if isinstance(kind, dict) else kind
            for key, kind in kinds.items()
        }
        for name, kinds in saved.items()
    }


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise :class:`InputError` for errors that a damaged checkpoint, or one without a training,
    causes in the context.
    """
    try:
        yield
    except ZerocastError:
        raise
    except DAMAGED as error:
        raise InputError(
            f"the checkpoint at {path} is damaged, or holds tensors and no training state "
            f"({type(error).__name__}: {error}); load an earlier checkpoint."
        ) from error
