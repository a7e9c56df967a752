"""save: writes a training's state to the disk; a killed save leaves the previous one whole."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerocast.arguments import check_flag
from zerocast.checkpoint.manifest import SUFFIX
from zerocast.checkpoint.master_holders import listed, ranks_of, trainings_of
from zerocast.checkpoint.model_part import ModelPart, digest_of
from zerocast.checkpoint.one_file import write_one_file
from zerocast.checkpoint.pending import PendingSave, remember, wait_for
from zerocast.checkpoint.python_values import encode
from zerocast.checkpoint.writing import plan_save, write, write_beside
from zerocast.comm import Attempt, Communicator, Group, announcing, raising_together
from zerocast.comm.agreement import check_same
from zerocast.errors import InputError
from zerocast.optim.boxes import Share
from zerocast.optim.state_description import check_numbers
from zerocast.optim.training_state import TrainingState


def save(
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    model: torch.nn.Module | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    of_rank: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    replace: bool = False,
    group: Group = None,
) -> PendingSave | None:
    """Save all that a training needs to resume bit for bit on any number of ranks. Collective.

    It saves masters, optimizer state and options, averages, recipe state and the number of steps. A
    checkpoint of the same run in the directory is replaced. The old one stays whole until the last
    rename of the save, and after a save that failed or was killed. A checkpoint of another run
    (other optimizers, or a job that has not loaded it) is refused. Every rank writes its part, so
    all ranks must share the directory (a shared file system). A rank takes memory for two pieces of
    tensors at a time.

    Args:
        path: a directory; or a file ending in ``.safetensors``, which rank 0 writes, gathering one
            tensor at a time.
        optimizer: a :class:`zerocast.optim.ZeroOptimizer`, or a torch optimizer of masters in
            ``model`` (``convert(..., weights="master")``, under FSDP2 or not); or a list of these,
            on the same ranks, with weights of different names.
        model: a model whose buffers, frozen parameters and layers' recipe state are also saved;
            needed for a torch optimizer.
        extra: other values of the run, the same on every rank: ``schedule.state_dict()``,
            ``scaler.state_dict()``, an epoch. They may be None, bools, numbers, text, tensors, and
            lists, tuples and dicts of these.
        of_rank: likewise, values of this rank: the state of its random generators, its position in
            the data.
        asynchronous: whether to return once this rank's part is copied to the CPU, and write it in
            a thread. The next call with any of the optimizers waits for it and raises its error,
            as does the result's ``wait()``. Only into a directory.
        replace: whether to replace a checkpoint of another run at ``path``, with the files of its
            killed saves; if ``path`` is a file, any file.
        group: the ranks of a torch optimizer; all by default.

    Returns:
        The pending save, if ``asynchronous``.

    Raises:
        InputError, UnsupportedError: on every rank, for a wrong argument on any, a value that
            cannot be saved, or a place with anything else than a checkpoint of this run.
        NonFiniteError: on every rank, if a master is not finite, since no run can resume from it.
        UnfinishedStepError: on every rank, if the last step was left unfinished.
        ZerocastError: on every rank, if writing failed on any, or another job has saved into the
            same place meanwhile. All files of this save are then removed.
    """
    optimizers = listed(optimizer)
    comm = ranks_of(optimizers, group)
    with announcing([comm]):
        return _save(
            Path(path), optimizers, model, extra, of_rank, asynchronous=asynchronous,
            replace=replace, group=group, comm=comm,
        )  # fmt: skip


def _save(
    given: Path,
    optimizers: Sequence[torch.optim.Optimizer],
    model: torch.nn.Module | None,
    extra: Any,
    of_rank: Any,
    *,
    asynchronous: bool,
    replace: bool,
    group: Group,
    comm: Communicator,
) -> PendingSave | None:
    """Save as :func:`save` does; ``comm`` has the ranks."""
    wait_for(optimizers)
    with raising_together(comm):
        check_flag("asynchronous", asynchronous)
        check_flag("replace", replace)
        is_file = given.suffix == SUFFIX
        if is_file and (asynchronous or given.is_dir()):
            raise InputError(
                f"one file must not be a directory or be saved asynchronously, got {given}; for an "
                "asynchronous save give a directory."
            )
        place = Path(os.path.realpath(given))  # links may change before a thread writes
        trainings = trainings_of(optimizers, model, group, comm)

    states = list[TrainingState]()
    for training in trainings:
        training.prepare_save("zerocast.checkpoint.save")
        states.append(training.state())
    attempt, lines, description, shares, own = Attempt(), list[str](), {}, dict[str, Share](), None
    with attempt:
        description = _put_states(states, shares)
        description["extra"] = _encoded(dict(extra or {}), "value.extra", shares)
        own = _encoded(dict(of_rank or {}), f"value.of_rank.{comm.rank}", shares)
        for name, share in shares.items():
            if name.startswith("master."):
                for piece in share.pieces.values():
                    check_numbers(f"the {name.replace('.', ' of ', 1)}", piece, finite=True)
        common = {key: value for key, value in description.items() if key != "state"}
        lines = [f"path {given}", f"{asynchronous=}", f"{replace=}"]
        lines += [f"{key} {json.dumps(value)}" for key, value in common.items()]
        lines += [
            f"{name} {digest_of(share.local)}"
            for name, share in shares.items()
            if name.startswith("value.extra")
        ]
    check_same(comm, lines, "every rank must save the same", attempt.error)
    ModelPart(model, [each.parameters for each in trainings], comm).put(description, shares)

    planned = plan_save(
        place,
        description,
        shares,
        own,
        [each.optimizer for each in trainings],
        comm,
        replace=replace,
    )
    if is_file:
        write_one_file(planned, comm, trainings[0].device)
    elif asynchronous:
        pending = write_beside(planned, comm)
        remember(optimizers, pending)
        return pending
    else:
        write(planned, comm)
    return None


def _put_states(states: Sequence[TrainingState], shares: dict[str, Share]) -> dict[str, Any]:
    """Return the states of all optimizers as JSON values, and add their tensors to ``shares``.

    ``optimizers`` has the description and options of each. ``state`` has, by weight and key, the
    kinds of optimizer state of the weights that this rank holds.
    """
    description: dict[str, Any] = {"optimizers": [], "state": {}}
    for i, each in enumerate(states):
        shares |= each.shares
        given = _encoded(each.groups, f"value.options.{i}", shares)
        description["optimizers"].append({**each.description, "options": given})
        for name, kinds in each.kinds.items():
            description["state"][name] = {
                key: {"value": _encoded_state(name, key, kind["value"])}
                if isinstance(kind, dict)
                else kind
                for key, kind in kinds.items()
            }
    return description


def _encoded(value: Any, name: str, shares: dict[str, Share]) -> Any:
    """Return Python values and tensors as JSON values, and add the tensors to ``shares``."""
    tensors: dict[str, torch.Tensor] = {}
    made = encode(value, name, tensors)
    shares |= {key: Share.of(tensor) for key, tensor in tensors.items()}
    return made


def _encoded_state(name: str, key: str, value: Any) -> Any:
    """Return as JSON values the optimizer state of a weight under ``key``, which has no tensor.

    Raises:
        InputError: if it contains a tensor.
    """
    inside: dict[str, torch.Tensor] = {}
    made = encode(value, f"state.{name}.{key}", inside)
    if inside:
        raise InputError(
            "what an optimizer keeps of a weight must be tensors, numbers or text, got tensors in "
            f"a {type(value).__name__} under {key!r} of {name}, which loading would not find; keep "
            "each tensor under a separate key."
        )
    return made
