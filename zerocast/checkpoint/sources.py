"""Finds what holds the masters that are saved or loaded: a ZeroOptimizer, or a model under
FSDP2.
"""

from typing import TypeAlias

import torch

from zerocast.arguments import check_module
from zerocast.checkpoint.masters import MasterTraining
from zerocast.checkpoint.zero import ZeroTraining
from zerocast.comm import Communicator, Group, as_communicator
from zerocast.errors import InputError
from zerocast.optim import ZeroOptimizer
from zerocast.sharded.placement import reshard

Training: TypeAlias = MasterTraining | ZeroTraining
"""An optimizer whose state is saved and loaded:

    described, parameters, device   what it says of itself (:mod:`zerocast.optim.saved`), the
                                    weights that it steps, by name, and where its masters are
    contents()                      what this rank saves. Collective; raises ZerocastError on every
                                    rank where its masters are not those of a whole step
    ask(saved)                      asks for what this rank needs
    prepare(saved)                  makes of what was read what ``restore`` continues from; raises
                                    ZerocastError where it is such as no run has
    restore()                       continues from what was prepared. Collective; raises
                                    ZerocastError on every rank where it is such as no run has, and
                                    then nothing has been changed
"""


def ranks_of(optimizer: object, group: Group) -> Communicator:
    """Return the ranks that save or load together."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.comm
    return as_communicator(group)


def training_of(
    optimizer: object, model: torch.nn.Module | None, group: Group, comm: Communicator
) -> Training:
    """Return the training of an optimizer, or of a model and its torch optimizer.

    Raises:
        InputError: for anything else.
    """
    if model is not None:
        check_module("model", model)
    if isinstance(optimizer, ZeroOptimizer):
        if group is not None:
            raise InputError("the ranks are those of the ZeroOptimizer; leave group out.")
        return ZeroTraining(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or model is None:
        raise InputError(
            f"a training is saved and loaded by its zerocast.optim.ZeroOptimizer, or by a torch "
            f"optimizer and, as model, the model whose masters it steps, got "
            f"{type(optimizer).__name__} and {type(model).__name__}."
        )
    reshard(model)
    return MasterTraining(model, optimizer, comm)
