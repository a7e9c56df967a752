"""Descriptions: what ranks compare of the weights of a plan, and how a difference is reported.

Weights of one shape and recipe are described once, so thousands of them are compared by a number,
a name and a state each. Only digests travel while all ranks agree.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import Attempt, Communicator, lines_that_differ
from zerocast.errors import RankMismatchError, ZerocastError
from zerocast.numerics import NUMERICS_VERSION
from zerocast.recipes import recipe_fields
from zerocast.tensors import QuantizedStorage


def describe(spec: ShardSpec) -> dict[str, str]:
    """What the ranks that share a weight have in common, but for its name and state."""
    storage = spec.storage
    described = {"shape": str(tuple(storage.shape)), **_described(spec)}
    if len(storage.cast_planes) > 1:
        described["columnwise copy"] = "yes"  # amaxes and codes of its own, which are exchanged
    if storage.tp_shard is not None:
        described["tensor-parallel shard"] = str(storage.tp_shard)
    return described


def describe_whole(spec: ShardSpec) -> dict[str, str]:
    """What the ranks that hold shards of a weight have in common, but for its name and state."""
    storage, tp_shard = spec.storage, spec.storage.tp_shard
    assert tp_shard is not None
    described = {
        "shape": str(tuple(tp_shard.whole)),
        "sharded dimension": tp_shard.kind,
        **_described(spec),
    }
    if storage.has_columnwise:
        described["columnwise copy"] = "yes"  # amaxes of it are exchanged
    return described


def _described(spec: ShardSpec) -> dict[str, str]:
    storage = spec.storage
    described = {"dtype": str(storage.dtype), "recipe": type(storage.recipe).__name__}
    described |= recipe_fields(storage.recipe)
    if spec.amax_group is not None:
        described["amax group"] = spec.amax_group
    return described


def check_descriptions(
    comm: Communicator,
    describe: Callable[[ShardSpec], dict[str, str]],
    specs: Sequence[ShardSpec],
    options: str,
    error: ZerocastError | None,
) -> list[str]:
    """Compare what this rank's weights are with what those of the others are. Collective.

    Args:
        comm: the ranks.
        describe: one of the functions above.
        specs: this rank's weights, in order; of no matter where there is an ``error``.
        options: whatever else must be the same on every rank, readable.
        error: what is wrong with this rank's weights, if anything.

    Returns:
        What was compared of the weights, as texts.

    Raises:
        ZerocastError: on every rank, where one has an ``error``.
        RankMismatchError: on every rank, naming both sides of the first difference.
    """
    attempt, lines = Attempt(), ["[]"]
    with attempt:
        lines = _lines(describe, specs)
    common = json.dumps({"zerocast numerics version": str(NUMERICS_VERSION), "options": options})
    by_rank = lines_that_differ(comm, [common, *lines], error or attempt.error)
    if by_rank is None:
        return lines
    first, *others = map(_read, by_rank)
    rank, theirs = next((r, each) for r, each in enumerate(others, 1) if each != first)
    if len(theirs) != len(first):
        difference = f"rank 0 has {len(first) - 1} weights and rank {rank} has {len(theirs) - 1}"
    else:
        i = next(i for i, (a, b) in enumerate(zip(first, theirs, strict=True)) if a != b)
        a, b = _differing(first[i], theirs[i])
        called = f", which rank 0 calls {first[i]['name']}" if "name" in first[i] else ""
        place = "" if i == 0 else f" for weight {i - 1}{called}"
        difference = f"rank 0 has {a} where rank {rank} has {b}{place}"
        if sorted(map(str, theirs)) == sorted(map(str, first)):
            difference += "; they hold the same weights in another order"
    raise RankMismatchError(
        "every rank must give the same weights in the same order with the same recipes and copies: "
        f"{difference}."
    )


def _lines(
    describe: Callable[[ShardSpec], dict[str, str]], specs: Sequence[ShardSpec]
) -> list[str]:
    """All descriptions, each once; then of each weight the place of its own among them, its name
    and its state.
    """
    places: dict[str, int] = {}
    place_of: dict[tuple[Any, ...], int] = {}
    lines = []
    for spec in specs:
        storage = spec.storage
        made_from = storage.shape, storage.dtype, storage.has_columnwise, spec.amax_group
        alike = id(storage.recipe), id(storage.tp_shard), *made_from
        if alike not in place_of:
            place_of[alike] = places.setdefault(json.dumps(describe(spec)), len(places))
        name = {"name": spec.name} if spec.is_named else {}
        # Ranks of tensor parallelism that have whole matrices have states of their own.
        matrices = storage.tp_shard is not None and storage.tp_shard.has_whole_matrices(
            storage.recipe
        )
        is_own = describe is describe_whole and matrices
        lines.append(json.dumps([place_of[alike], name, {} if is_own else _state(storage)]))
    return [f"[{', '.join(places)}]", *lines]


def _state(storage: QuantizedStorage) -> dict[str, str]:
    """What casts have left in the weight and later casts go on from, as short texts."""
    state = {}
    for name in storage.form.state:
        buffer = storage.buffers[name].cpu()
        digest = hashlib.sha256(ctypes.string_at(buffer.data_ptr(), buffer.nbytes))
        state[name] = f"#{digest.hexdigest()[:8]}"
    return state


def _read(lines: Sequence[str]) -> list[dict[str, str]]:
    """What is common to all weights, then of each weight all that is known of it, of a rank's
    lines.
    """
    common, descriptions, *weights = map(json.loads, lines)
    return [common, *({**name, **descriptions[i], **state} for i, name, state in weights)]


def _differing(a: dict[str, str], b: dict[str, str]) -> tuple[str, str]:
    """The entries of both in which they differ; of two schemes no fields."""
    keys = [key for key in a | b if a.get(key) != b.get(key)]
    if "recipe" in keys:
        keys = keys[: keys.index("recipe") + 1]
    a_text, b_text = (
        ", ".join(f"{key}={each.get(key, 'none')}" for key in keys) for each in (a, b)
    )
    return a_text, b_text
