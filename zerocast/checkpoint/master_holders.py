"""Finds the holders of masters: ZeroOptimizers, or a model and its torch optimizers."""

from collections.abc import Sequence
from typing import Any

import torch

from zerocast.arguments import check_module
from zerocast.checkpoint.masters import MasterTraining
from zerocast.comm import Communicator, Group, as_communicator
from zerocast.errors import InputError
from zerocast.optim import ZeroOptimizer
from zerocast.optim.training_state import MasterHolder
from zerocast.optim.zero_training import ZeroTraining
from zerocast.sharded.placement import reshard


def listed(optimizer: Any) -> list[Any]:
    """Return a list of the given optimizers; ``optimizer`` is one or a list."""
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def ranks_of(optimizers: Sequence[Any], group: Group) -> Communicator:
    """Return the ranks that save or load together: those of a ZeroOptimizer, else ``group``."""
    for each in optimizers:
        if isinstance(each, ZeroOptimizer):
            return each.comm
    return as_communicator(group)


def trainings_of(
    optimizers: Sequence[Any], model: torch.nn.Module | None, group: Group, comm: Communicator
) -> list[MasterHolder]:
    """Return the holder of masters of each optimizer, sorted by their first weight names.

    Raises:
        InputError: if an optimizer is neither a ZeroOptimizer nor a torch optimizer with a
            ``model``, if none is given, or if two have different ranks or share a weight name.
    """
    if model is not None:
        check_module("model", model)
    if not optimizers:
        raise InputError("a checkpoint needs at least one optimizer, got an empty list.")
    found = [_training_of(each, model, group, comm) for each in optimizers]
    names = set[str]()
    for training in found:
        if training.comm != comm:
            raise InputError(
                "the optimizers of one checkpoint must have the same ranks, got two groups; give "
                "each group a separate checkpoint."
            )
        if twice := sorted(names & training.parameters.keys()):
            raise InputError(
                f"the weights of one checkpoint must have different names, and two optimizers have "
                f"{twice[0]!r}; give each its part of one model.named_parameters()."
            )
        names |= training.parameters.keys()
    return sorted(found, key=lambda training: min(training.parameters))


def _training_of(
    optimizer: object, model: torch.nn.Module | None, group: Group, comm: Communicator
) -> MasterHolder:
    if isinstance(optimizer, ZeroOptimizer):
        if group is not None:
            raise InputError("the ranks are those of the ZeroOptimizer; leave group out.")
        return ZeroTraining(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or model is None:
        raise InputError(
            "a checkpoint needs a zerocast.optim.ZeroOptimizer, or a torch optimizer and, as "
            f"model, the model whose masters it steps, got {type(optimizer).__name__} and "
            f"{type(model).__name__}."
        )
    reshard(model)
    return MasterTraining(model, optimizer, as_communicator(group))
