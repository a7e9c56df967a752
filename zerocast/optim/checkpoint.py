"""What an optimizer saves of its shards, and how saved shards are cut anew.

A rank's state dict holds, for every weight that it owns a part of, the master of that part and the
inner optimizer's state of it. Codes are not saved: one cast derives them from the masters. So the
state dicts of all ranks together are the whole state, on any number of ranks::

    state         weight's place -> master (FP32, flat), start (its first element), inner state,
                  averages of the master
    recipe_state  weight's place -> what its recipe remembers, the same on every rank
    param_groups  the options, and the places of the weights, as torch's optimizers save them
    zero          optimizer, [elements, group] of every weight, rank, world_size, steps made, mode
                  of the inner optimizer, decays of the averages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.layout import Extent
from zerocast.optim.average import Average
from zerocast.optim.consistency import option_lines
from zerocast.optim.inner import InnerOptimizer, options
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.weights import Weight

StateDict = dict[str, Any]


KEYS = {"state", "recipe_state", "param_groups", "zero"}
"""Of every state dict."""


def save(
    shards: ShardedWeights,
    inner: InnerOptimizer,
    param_groups: Sequence[dict[str, Any]],
    averages: Sequence[Average],
    steps: int,
) -> StateDict:
    """This rank's state dict. Its tensors are the live ones."""
    weights = shards.weights
    groups = [
        options(group) | {"params": [i for i, weight in enumerate(weights) if weight.group == g]}
        for g, group in enumerate(param_groups)
    ]
    return {
        "state": {
            i: {
                **inner.state(i),
                **{average.key: average.part(i) for average in averages},
                "master": master,
                "start": shards.own[i].extent.start,
            }
            for i, master in inner.masters.items()
        },
        "recipe_state": shards.recipe_states(),
        "param_groups": groups,
        "zero": {
            **_identity(inner, weights),
            "rank": shards.comm.rank,
            "world_size": shards.comm.size,
            "steps": steps,
            "mode": inner.mode,
            "averages": [average.decay for average in averages],
        },
    }


def checked(given: object, shards: ShardedWeights, inner: InnerOptimizer) -> list[StateDict]:
    """The state dicts in ``given``, one or a sequence of them.

    Raises:
        InputError: where they are none, or of another optimizer or other weights.
    """
    saved: list[Any] = list(given) if isinstance(given, Sequence) else [given]
    if not saved:
        raise InputError("load_state_dict needs one state dict at least, got an empty sequence.")
    for state in saved:
        if not isinstance(state, Mapping) or not state.keys() >= KEYS:
            raise InputError(
                "load_state_dict needs what ZeroOptimizer.state_dict() returned, or a sequence of "
                f"that from all ranks, got a {type(state).__name__} that is not one."
            )
        for what, mine in _identity(inner, shards.weights).items():
            if state["zero"][what] != mine:
                raise InputError(
                    f"a state dict must be loaded into an optimizer of the same {what}: it was "
                    f"saved with {state['zero'][what]}, and this one has {mine}."
                )
        _check_recipe_state(state["recipe_state"], shards)
        groups = len(state["param_groups"])
        if groups != len(inner.optimizer.param_groups):
            raise InputError(
                f"a state dict must be loaded into an optimizer of as many param groups: it has "
                f"{groups}, and this one has {len(inner.optimizer.param_groups)}."
            )
    steps = [state["zero"]["steps"] for state in saved]
    if len(set(steps)) > 1:
        raise InputError(
            f"the state dicts of all ranks must be of the same step, got states of steps {steps}; "
            "load what all ranks saved after the same step."
        )
    return saved


def in_common(saved: StateDict) -> list[str]:
    """Texts of what every rank's state dict says alike."""
    zero = saved["zero"]
    lines = [f"{name} {zero[name]}" for name in ("steps", "mode", "averages")]
    return lines + option_lines(saved["param_groups"])


def check_own(saved: Sequence[StateDict], comm: Communicator) -> None:
    """Raise :class:`InputError` where the one state dict in ``saved`` is that of another rank.

    It may have the right sizes: who takes tensors of one name for copies of each other, as
    torch.distributed.checkpoint does, saves those of one rank and loads them on all.
    """
    zero = saved[0]["zero"]
    if len(saved) == 1 and zero["world_size"] == comm.size and zero["rank"] != comm.rank:
        raise InputError(
            f"each rank must load the state dict that it saved itself: rank {comm.rank} was given "
            f"that of rank {zero['rank']}. Save a file of each rank by torch.save; "
            f"torch.distributed.checkpoint keeps one rank's tensors of each name, so give it each "
            f"rank's state dict as bytes (of an io.BytesIO, by torch.save) under a name of its own."
        )


def load_recipe_states(saved: StateDict, shards: ShardedWeights) -> None:
    """Let the weights' recipes remember what they did when ``saved``, checked, was saved."""
    for i, state in shards.recipe_states().items():
        for name, tensor in state.items():
            tensor.copy_(saved["recipe_state"][i][name])


def _check_recipe_state(
    saved: Mapping[int, Mapping[str, torch.Tensor]], shards: ShardedWeights
) -> None:
    mine = shards.recipe_states()
    for i in mine.keys() | saved.keys():
        ours, theirs = (
            {name: tuple(tensor.shape) for name, tensor in states.get(i, {}).items()}
            for states in (mine, saved)
        )
        if ours != theirs:
            raise InputError(
                f"a state dict must be loaded into weights of the same recipes: that of "
                f"{shards.weights[i].name} remembers {ours or 'nothing'}, and the state dict has "
                f"{theirs or 'nothing'} for it."
            )


def cut(
    saved: Sequence[StateDict], shards: ShardedWeights, inner: InnerOptimizer
) -> dict[int, StateDict]:
    """The entries of ``state`` that this rank needs, put together from state dicts of any ranks.

    Raises:
        InputError: where they do not cover this rank's elements.
    """
    return {i: _cut_weight(saved, i, shards) for i in inner.masters}


def _identity(inner: InnerOptimizer, weights: Sequence[Weight]) -> StateDict:
    return {
        "optimizer": type(inner.optimizer).__name__,
        "weights": [[weight.param.numel(), weight.group] for weight in weights],
    }


def _cut_weight(saved: Sequence[StateDict], index: int, shards: ShardedWeights) -> StateDict:
    """One weight's entry.

    State in the master's shape is cut and joined with it; anything else (a step count) is that of
    the first piece.
    """
    wanted = shards.own[index].extent
    pieces = [state["state"][index] for state in saved if index in state["state"]]
    parts: list[tuple[StateDict, slice]] = []
    reached = wanted.start
    for piece in sorted(pieces, key=lambda piece: piece["start"]):
        held = Extent(piece["start"], piece["start"] + piece["master"].numel())
        common = held.intersect(Extent(reached, wanted.end))
        if common and common.start == reached:
            parts.append((piece, slice(common.start - held.start, common.end - held.start)))
            reached = common.end
    if reached < wanted.end:
        raise InputError(
            f"this rank owns elements {wanted} of {shards.weights[index].name}, and of those the "
            f"given state holds none from {reached} on; load on as many ranks as saved, each its "
            f"own state dict, or give every rank the sequence of all ranks' state dicts."
        )
    first = parts[0][0]
    shape = first["master"].shape
    entry: StateDict = {}
    for key, value in first.items():
        if isinstance(value, torch.Tensor) and value.shape == shape:
            entry[key] = torch.cat([piece[key][part] for piece, part in parts])
        else:
            entry[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return entry
