"""Saves the shards of an optimizer, and divides saved shards over other ranks.

A rank's state dict holds, for every weight of which it owns elements, their master and the inner
optimizer's state of them. Codes are not saved: one cast derives them from the masters. So the state
dicts of all ranks together are the whole state, on any number of ranks::

    state         weight's place -> master (FP32, flat), start (its first element), inner state,
                  averages of the master
    whole_state   weight's place -> inner state of a whole weight, saved by its owner, where weights
                  are not stepped in pieces
    recipe_state  weight's place -> the state of its recipe, the same on every rank
    param_groups  the options, and the places of the weights, as torch's optimizers save them
    zero          what every saved state says of itself
                  (:mod:`zerocast.optim.state_description`), and: shard, rank, world_size,
                  steps made, mode of the inner optimizer, decays of the averages,
                  due: the places of weights whose recipe_state is before the cast of these masters
                  (as masters of FSDP2 save it), and not after; digest: of the last four

:mod:`zerocast.checkpoint` saves and loads these dicts; so there is one form and one check.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch

from zerocast.arguments import why_no_memory
from zerocast.comm import Communicator
from zerocast.errors import InputError, UnsupportedError
from zerocast.layout import Extent
from zerocast.optim.average import AVERAGE, Average, average_key
from zerocast.optim.inner import InnerOptimizer
from zerocast.optim.param_groups import ParamGroups, option_lines, options
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.state_description import (
    check_described,
    check_numbers,
    check_values,
    describe,
    describe_weight,
    state_kinds,
)
from zerocast.sharded.state import check_state

StateDict = dict[str, Any]

KEYS = {"state", "whole_state", "recipe_state", "param_groups", "zero"}
"""The keys of every state dict."""

PROGRESS = "steps", "mode", "averages", "due"
"""What ``zero`` says that no other part of a state dict does."""


class EveryRank:
    """Stands in a state dict and lets ``torch.distributed.checkpoint`` refuse it: every rank has
    other values under the same names, which DCP takes for copies, and keeps those of one rank.

    Copies have it, too; files have an empty dictionary in its place.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()

    def __deepcopy__(self, memo: object) -> EveryRank:
        return self

    def __create_write_items__(self, fqn: str, value: object) -> NoReturn:
        raise UnsupportedError(
            "torch.distributed.checkpoint takes tensors of one name for copies, and would keep one "
            "rank's part of a ZeroOptimizer's state for all; call zerocast.checkpoint.save(path, "
            "optimizer), which goes through it and keeps every rank's."
        )


def save(
    shards: ShardedWeights,
    inner: InnerOptimizer,
    param_groups: ParamGroups,
    averages: Collection[Average],
    steps: int,
) -> StateDict:
    """Return this rank's state dict. Its tensors are the live ones."""
    groups = [options(group) | {"params": list[int]()} for group in param_groups]
    for i, weight in enumerate(shards.weights):
        groups[weight.group]["params"].append(i)
    progress = {
        "steps": steps,
        "mode": inner.mode,
        "averages": [average.decay for average in averages],
        "due": list[int](),
    }
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
            **description(shards, inner),
            "shard": shard_kind(shards),
            "rank": shards.comm.rank,
            "world_size": shards.comm.size,
            **progress,
            "digest": digest_of(progress),
            "every_rank": EveryRank(),
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
        if not isinstance(state, Mapping) or state.keys() != KEYS:
            raise InputError(
                "load_state_dict needs what ZeroOptimizer.state_dict() returned, or a sequence of "
                f"that from all ranks, got a {type(state).__name__} that is not one."
            )
        zero, own = state["zero"], description(shards, inner)
        for groups in (zero["groups"], len(state["param_groups"])):
            check_described({**zero, "groups": groups}, own)
        keys = {*own, "shard", "rank", "world_size", *PROGRESS, "digest"}
        if zero.keys() - {"every_rank"} != keys or zero["digest"] != digest_of(zero):
            raise InputError(
                "what a state dict says of its progress under zero must be as it was saved, got "
                f"{zero}; the state is damaged."
            )
        if state["zero"]["shard"] != shard_kind(shards):
            raise InputError(
                f"a state dict must be loaded into an optimizer of the same shard: it was saved "
                f"with {state['zero']['shard']}, and this one has {shard_kind(shards)}."
            )
        _check_places(state, len(shards.weights))
        _check_memory(state)
        present, given_states = shards.recipe_states(), state["recipe_state"]
        for i in present.keys() | given_states.keys():
            remedy = "load it into the optimizer of a model with the recipes that it had"
            weight, held = shards.weights[i], present.get(i, {})
            assert weight.storage is not None
            check_state(weight.name, weight.storage.recipe, held, given_states.get(i, {}), remedy)
    _check_origin([state["zero"] for state in saved], shards.comm)
    entries = {i: _reshard(saved, i, shards) for i in shards.held}
    whole = {i: _whole_state(saved, i, shards) for i in shards.whole or ()}
    _check_entries(entries, whole, saved[0], shards, inner)
    return saved[0], entries, whole


def _check_places(state: Mapping[str, Any], count: int) -> None:
    """Raise :class:`InputError` where a state dict has state of other places than ``count``."""
    due, parts = state["zero"]["due"], ("state", "whole_state", "recipe_state")
    if not isinstance(due, list):
        raise InputError(
            f"due of a state dict must be a list of places, got {due!r}; the state is damaged."
        )
    for what, places in (("due", due), *((part, state[part]) for part in parts)):
        if foreign := [i for i in places if type(i) is not int or not 0 <= i < count]:
            raise InputError(
                f"{what} of a state dict must be of the weights 0 to {count - 1}, got "
                f"{foreign[0]!r}; the state is damaged."
            )


def _check_memory(state: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` where a tensor of a state dict holds no values that can be read."""
    for part in ("state", "whole_state", "recipe_state"):
        for i, entry in state[part].items():
            for key, value in entry.items():
                if isinstance(value, torch.Tensor) and (problem := why_no_memory(value)):
                    raise InputError(
                        f"{key} of weight {i} in a state dict must be a plain tensor, got {problem}"
                    )


def _check_origin(zeros: Sequence[Mapping[str, Any]], comm: Communicator) -> None:
    """Raise :class:`InputError` unless state dicts that say ``zeros`` are this rank's own, or those
    of all ranks after one step.
    """
    steps = [zero["steps"] for zero in zeros]
    if len(set(steps)) > 1:
        raise InputError(
            f"the state dicts of all ranks must be of the same step, got states of steps {steps}; "
            "load what all ranks saved after the same step."
        )
    ranks, sizes = [zero["rank"] for zero in zeros], [zero["world_size"] for zero in zeros]
    size = sizes[0]
    if ranks == [comm.rank] and size == comm.size:
        return
    if set(sizes) != {size} or sorted(ranks) != list(range(size)):
        origin = ", ".join(f"{rank} of {size}" for rank, size in zip(ranks, sizes, strict=True))
        raise InputError(
            f"rank {comm.rank} of {comm.size} must load the state dict that it saved itself on as "
            f"many ranks, or the sequence of all ranks' state dicts, each once, got that of rank "
            f"{origin}; zerocast.checkpoint.save and load find the right elements by themselves."
        )


def _check_entries(
    entries: Mapping[int, StateDict],
    whole: Mapping[int, StateDict],
    saved: StateDict,
    shards: ShardedWeights,
    inner: InnerOptimizer,
) -> None:
    """Raise unless masters and states are such as a run has, under the saved options."""
    kinds: dict[tuple[int, int], dict[str, Any]] = {}
    averages = {average_key(decay) for decay in saved["zero"]["averages"]}
    for i, entry in entries.items():
        name, master = shards.weights[i].name, entry["master"]
        given = {key: value for key, value in entry.items() if key.startswith(AVERAGE)}
        if given.keys() != averages:
            raise InputError(
                f"the state of {name} must have the averages {sorted(averages)}, got "
                f"{sorted(given)}; the state is damaged."
            )
        check_values(name, master.shape, given, dict.fromkeys(given, master))
        for key, value in {f"the master of {name}": master, **given}.items():
            check_numbers(key, value, finite=True)
    for i, state in (entries if shards.whole is None else whole).items():
        weight, like = shards.weights[i], inner.masters[i]
        case = weight.group, like.dim()
        if case not in kinds:
            given = options(saved["param_groups"][weight.group])
            kinds[case] = state_kinds(inner.optimizer, given, like)
        own = {k: v for k, v in state.items() if k not in ("master", "start", *averages)}
        check_values(weight.name, like.shape, own, kinds[case])


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
    param_groups: ParamGroups,
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


def description(shards: ShardedWeights, inner: InnerOptimizer) -> StateDict:
    """Return what a state says of its optimizer."""
    shared: dict[str | None, list[str]] = {None: []}
    for weight in shards.weights:
        if weight.storage is not None and weight.storage.amax_group is not None:
            shared.setdefault(weight.storage.amax_group, []).append(weight.name)
    weights = []
    for weight in shards.weights:
        storage, plain = weight.storage, weight.param.dtype
        recipe, dtype = (storage.recipe, storage.dtype) if storage else (None, plain)
        together = shared[storage.amax_group if storage else None]
        weights.append(
            describe_weight(weight.name, weight.param.shape, weight.group, recipe, dtype, together)
        )
    return describe(inner.optimizer, len(inner.optimizer.param_groups), weights)


def digest_of(zero: Mapping[str, Any]) -> str:
    """Return a digest of the :data:`PROGRESS` in what a state says under ``zero``."""
    text = repr([zero[key] for key in PROGRESS])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def shard_kind(shards: ShardedWeights) -> str:
    """Return how weights are divided, as ``ZeroOptimizer(shard=...)`` says it."""
    return "element" if shards.whole is None else "matrix"


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
    for entry in entries:
        master, start = entry["master"], entry["start"]
        is_flat = (master.dtype, master.dim()) == (torch.float32, 1)
        most = shards.weights[index].param.numel()
        is_inside = type(start) is int and 0 <= start <= most - master.numel()
        if not is_flat or not is_inside:
            raise InputError(
                f"the master of {shards.weights[index].name} must be torch.float32, flat, and start"
                f" at an element, got {master.dtype} {list(master.shape)} from {start!r} on, of "
                f"{most}; the state is damaged."
            )
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
