"""What a recipe remembers of a master, and how it travels with checkpoints.

Delayed scaling remembers amaxes and scales, stochastic rounding counts its casts. Both move on with
every cast, and loading a checkpoint makes one, for codes are not saved. So what is saved is the
state *before* the cast of the masters beside it: as it is where that cast is due, rewound by
:meth:`Recipe.rewind` where it has been made. A run that goes on from there repeats the cast, or
makes the one that was due, to the same codes and the same state, bit for bit, on any number of
ranks.

NOT here: where in a state dict it stands, and how, which is the layer's affair
(:mod:`zerocast.nn.linear`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zerocast.errors import InputError
from zerocast.recipes import Recipe

State = dict[str, torch.Tensor]
"""By the names of :attr:`Recipe.state`; the same on every rank."""


def fresh_state(recipe: Recipe) -> State:
    """What ``recipe`` remembers before the first cast, on the CPU."""
    specs = recipe.own_buffers()
    with torch.inference_mode(False):  # else only inference could ever write it
        return {name: specs[name].allocate(torch.device("cpu")) for name in recipe.state}


def state_before_cast(recipe: Recipe, state: Mapping[str, torch.Tensor], *, is_due: bool) -> State:
    """A copy of ``state`` from which the cast of the masters as they are starts; ``is_due`` says
    whether that is still to be made.
    """
    copy = {name: tensor.clone() for name, tensor in state.items()}
    if copy and not is_due:
        recipe.rewind(copy)
    return copy


def check_state(name: str, own: State, given: Mapping[str, torch.Tensor]) -> None:
    """Raise :class:`InputError` where ``given`` is not what the recipe of weight ``name``, whose
    state is ``own``, remembers.
    """
    ours, theirs = (
        {key: f"{tensor.dtype} {list(tensor.shape)}" for key, tensor in state.items()}
        for state in (own, given)
    )
    if ours != theirs:
        raise InputError(
            f"what a recipe remembers must be loaded into a weight of the same recipe: that of "
            f"{name} remembers {_say(ours)}, and the state dict has {_say(theirs)} for it; convert "
            f"with the recipe that it was saved under, or take the layer's 'weight_state' out of "
            f"the state dict to start anew."
        )


def _say(state: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {what}" for name, what in sorted(state.items())) or "nothing"
