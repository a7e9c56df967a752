"""What an optimizer saves of its shards, and how saved shards are divided over other ranks.

A rank's state dict holds, for every weight of which it owns elements, their master and the inner
optimizer's state of them. Codes are not saved: one cast derives them from the masters. So the state
dicts of all ranks together are the whole state, on any number of ranks::

    state         weight's place -> master (FP32, flat), start (its first element), inner state,
                  averages of the master
    whole_state   weight's place -> inner state of a whole weight, saved by its owner, where weights
                  are not stepped in pieces
    recipe_state  weight's place -> the state of its recipe, the same on every rank
    param_groups  the options, and the places of the weights, as torch's optimizers save them
    zero          optimizer, shard, [elements, group] of every weight, rank, world_size, steps made,
                  mode of the inner optimizer, decays of the averages
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.layout import Extent
from zerocast.optim.average import Average
from zerocast.optim.inner import InnerOptimizer
from zerocast.optim.param_groups import option_lines, options
from zerocast.optim.shards import ShardedWeights
from zerocast.sharded.state import check_state

StateDict = dict[str, Any]

KEYS = {"state", "whole_state", "recipe_state", "param_groups", "zero"}
"""The keys of every state dict."""


def save(
    shards: ShardedWeights,
    inner: InnerOptimizer,
    param_groups: Sequence[dict[str, Any]],
    averages: Collection[Average],
    steps: int,
) -> StateDict:
    """Return this rank's state dict. Its tensors are the live ones."""
    groups = [options(group) | {"params": list[int]()} for group in param_groups]
    for i, weight in enumerate(shards.weights):
        groups[weight.group]["params"].append(i)
    return {
        "state": {
            i: {
                **(inner.state(i) if shards.whole is None else {}),
                **{average.key: average.shard(i) for average in averages},
                "master": master,
                "start": shards.own[i].extent.start,
            }
            for i, master in shards.held.items()
        },
        "whole_state": {i: inner.state(i) for i in shards.whole or ()},
        "recipe_state": shards.recipe_states(),
        "param_groups": groups,
        "zero": {
            **_identity(shards, inner),
            "rank": shards.comm.rank,
            "world_size": shards.comm.size,
            "steps": steps,
            "mode": inner.mode,
            "averages": [average.decay for average in averages],
        },
    }


def read(
    given: object, shards: ShardedWeights, inner: InnerOptimizer
) -> tuple[StateDict, dict[int, StateDict], dict[int, StateDict]]:
    """Check the state dicts in ``given``, one or a sequence of them. Return the first, which has
    all that they have in common, the entries of ``state`` for this rank's elements, and those of
    ``whole_state`` for the weights that it owns.

    Raises:
        InputError: where they are not state dicts, or of another optimizer or other weights; where
            they do not cover this rank's elements, or one alone is that of another rank.
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
        number = "number of param groups"
        ours = _identity(shards, inner) | {number: len(inner.optimizer.param_groups)}
        theirs = state["zero"] | {number: len(state["param_groups"])}
        for what in ours:
            if theirs[what] != ours[what]:
                raise InputError(
                    f"a state dict must be loaded into an optimizer of the same {what}: it was "
                    f"saved with {theirs[what]}, and this one has {ours[what]}."
                )
        present, given_states = shards.recipe_states(), state["recipe_state"]
        for i in present.keys() | given_states.keys():
            remedy = "load it into the optimizer of a model with the recipes that it had"
            name = shards.weights[i].name
            check_state(name, present.get(i, {}), given_states.get(i, {}), remedy)
    steps = [state["zero"]["steps"] for state in saved]
    if len(set(steps)) > 1:
        raise InputError(
            f"the state dicts of all ranks must be of the same step, got states of steps {steps}; "
            "load what all ranks saved after the same step."
        )
    entries = {i: _reshard(saved, i, shards) for i in shards.held}
    # Another rank's state dict may have the right sizes: torch.distributed.checkpoint, which takes
    # tensors of one name for copies of each other, saves those of one rank and loads them on all.
    zero, comm = saved[0]["zero"], shards.comm
    if len(saved) == 1 and zero["world_size"] == comm.size and zero["rank"] != comm.rank:
        raise InputError(
            f"each rank must load the state dict that it saved itself: rank {comm.rank} was given "
            f"that of rank {zero['rank']}. Save a file of each rank by torch.save; "
            f"torch.distributed.checkpoint keeps one rank's tensors of each name, so give it each "
            f"rank's state dict as bytes (of an io.BytesIO, by torch.save) under a name of its own."
        )
    return saved[0], entries, {i: _whole_state(saved, i, shards) for i in shards.whole or ()}


def common_lines(saved: StateDict) -> list[str]:
    """Return texts of what the state dicts of all ranks have in common."""
    lines = [f"{name} {saved['zero'][name]}" for name in ("steps", "mode", "averages")]
    return lines + option_lines(saved["param_groups"])


def restore(
    saved: StateDict,
    entries: dict[int, StateDict],
    whole: dict[int, StateDict],
    shards: ShardedWeights,
    inner: InnerOptimizer,
    param_groups: Sequence[dict[str, Any]],
    averages: Collection[Average],
) -> None:
    """Set masters, averages, options, inner state and the state of recipes to what :func:`read`
    returned.
    """
    for i, entry in entries.items():
        shards.master(i).copy_(entry.pop("master"))
        del entry["start"]
    for average in averages:
        average.load(entries)
    loaded = copy.deepcopy(saved["param_groups"])  # the rate may be a tensor, written in place
    for group, theirs in zip(param_groups, loaded, strict=True):
        group.update(options(theirs))
    states = entries if shards.whole is None else whole
    inner.load_state(states, saved["zero"]["mode"], param_groups)
    for i, state in shards.recipe_states().items():
        for name, tensor in state.items():
            tensor.copy_(saved["recipe_state"][i][name])


def _identity(shards: ShardedWeights, inner: InnerOptimizer) -> StateDict:
    return {
        "optimizer": type(inner.optimizer).__name__,
        "shard": "element" if shards.whole is None else "matrix",
        "weights": [[weight.param.numel(), weight.group] for weight in shards.weights],
    }


def _whole_state(saved: Sequence[StateDict], index: int, shards: ShardedWeights) -> StateDict:
    """Return the inner state of a weight that this rank owns, out of the owner's state dict."""
    for state in saved:
        if index in state["whole_state"]:
            return copy.deepcopy(state["whole_state"][index])
    raise InputError(
        f"this rank owns {shards.weights[index].name}, and the given state holds no state of the "
        "optimizer for it; load on as many ranks as saved, each its own state dict, or give every "
        "rank the sequence of all ranks' state dicts."
    )


def _reshard(saved: Sequence[StateDict], index: int, shards: ShardedWeights) -> StateDict:
    """Put one weight's entry for this rank's elements together from the state dicts of any ranks.

    State in the master's shape is divided and joined as the master is; anything else (a step count)
    is that of the first piece.
    """
    wanted = shards.own[index].extent
    pieces: list[tuple[StateDict, slice]] = []
    reached = wanted.start
    entries = [state["state"][index] for state in saved if index in state["state"]]
    for entry in sorted(entries, key=lambda entry: entry["start"]):
        held = Extent(entry["start"], entry["start"] + entry["master"].numel())
        common = held.intersect(Extent(reached, wanted.end))
        if common and common.start == reached:
            pieces.append((entry, slice(common.start - held.start, common.end - held.start)))
            reached = common.end
    if reached < wanted.end:
        raise InputError(
            f"this rank owns elements {wanted} of {shards.weights[index].name}, and of those the "
            f"given state holds none from {reached} on; load on as many ranks as saved, each its "
            f"own state dict, or give every rank the sequence of all ranks' state dicts."
        )
    first = pieces[0][0]
    joined: StateDict = {}
    for key, value in first.items():
        if isinstance(value, torch.Tensor) and value.shape == first["master"].shape:
            joined[key] = torch.cat([entry[key][elements] for entry, elements in pieces])
        else:
            joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return joined
