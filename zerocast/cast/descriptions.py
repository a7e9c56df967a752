"""Descriptions: what ranks compare of the weights of a plan, and how a difference is reported.

Weights of equal shape and recipe share one description, so thousands of them are compared by a
number, a name and a state each. If all ranks agree, only digests are sent.
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
    """Return what the ranks that share a weight have in common, except its name and state."""
    storage = spec.storage
    described = {"shape": str(tuple(storage.shape)), **_described(spec)}
    if len(storage.cast_planes) > 1:
        described["columnwise copy"] = "yes"  # its separate amaxes and codes are exchanged
    if storage.tp_shard is not None:
        described["tensor-parallel shard"] = str(storage.tp_shard)
    return described


def describe_whole(spec: ShardSpec) -> dict[str, str]:
    """Return what the ranks that hold shards of a weight have in common, except name and state."""
    storage, tp_shard = spec.storage, spec.storage.tp_shard
    assert tp_shard is not None
    described = {
        "shape": str(tuple(tp_shard.whole)),
        "sharded dimension": tp_shard.kind,
        **_described(spec),
    }
    if storage.has_columnwise:
        described["columnwise copy"] = "yes"  # its amaxes are exchanged
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
    """Compare this rank's weights with those of the other ranks. Collective.

    Args:
        comm: the ranks.
        describe: one of the functions above.
        specs: this rank's weights, in order; ignored with an ``error``.
        options: readable text of whatever else must be the same on every rank.
        error: what is wrong with this rank's weights, or None.

    Returns:
        What was compared of the weights, as texts.

    Raises:
        ZerocastError: on every rank, if one has an ``error``.
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
    """Return the distinct descriptions; then per weight the index of one, name and state."""
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
        # Tensor-parallel ranks with whole matrices may have different states.
        matrices = storage.tp_shard is not None and storage.tp_shard.has_whole_matrices(
            storage.recipe
        )
        is_own = describe is describe_whole and matrices
        lines.append(json.dumps([place_of[alike], name, {} if is_own else _state(storage)]))
    return [f"[{', '.join(places)}]", *lines]


def _state(storage: QuantizedStorage) -> dict[str, str]:
    """Return the state that casts leave in the weight for later casts, as short texts."""
    state = {}
    for name in storage.form.state:
        buffer = storage.buffers[name].cpu()
        digest = hashlib.sha256(ctypes.string_at(buffer.data_ptr(), buffer.nbytes))
        state[name] = f"#{digest.hexdigest()[:8]}"
    return state


def _read(lines: Sequence[str]) -> list[dict[str, str]]:
    """Parse a rank's lines: return what is common to all weights, then each weight's entries."""
    common, descriptions, *weights = map(json.loads, lines)
    return [common, *({**name, **descriptions[i], **state} for i, name, state in weights)]


def _differing(a: dict[str, str], b: dict[str, str]) -> tuple[str, str]:
    """Return the entries in which both differ; for different schemes without their fields."""
    keys = [key for key in a | b if a.get(key) != b.get(key)]
    if "recipe" in keys:
        keys = keys[: keys.index("recipe") + 1]
    a_text, b_text = (
        ", ".join(f"{key}={each.get(key, 'none')}" for key in keys) for each in (a, b)
    )
    return a_text, b_text
