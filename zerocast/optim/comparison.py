"""Comparison: whether all ranks were given the same optimizer, options and weights.

What a cast depends on is compared by :mod:`zerocast.cast.consistency`; here stand the options of an
optimizer, and the weights that it steps without casting them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerocast.comm import Communicator, lines_that_differ
from zerocast.comm.agreement import check_same
from zerocast.errors import RankMismatchError
from zerocast.optim.param_groups import option_lines
from zerocast.optim.weights import Weight, value_digests
from zerocast.recipes import describe_recipe


def check_same_optimizer(
    comm: Communicator,
    optimizer: str,
    param_groups: Sequence[dict[str, Any]],
    weights: Sequence[Weight],
) -> None:
    """Compare optimizer, options and weights of all ranks, once. Collective.

    Weights may have other values on other ranks, but not each other's.

    Args:
        optimizer: what describes the optimizer and its own options.

    Raises:
        RankMismatchError: on every rank, naming both sides of the first disagreement.
    """
    recipes = {id(w.storage.recipe): w.storage.recipe for w in weights if w.storage is not None}
    texts = {key: describe_recipe(recipe) for key, recipe in recipes.items()}
    stored = [
        f"{w.name}: {tuple(w.param.shape)} of {_stored(w, texts)} in param_groups[{w.group}]"
        for w in weights
    ]
    named = all("param_names" in group for group in param_groups if group["params"])
    check_same(
        comm,
        [f"{optimizer}, {named=}", *option_lines(param_groups), *stored],
        "every rank must optimize the same weights in the same order with the same options",
    )
    if named:
        return
    # Without names two weights of one shape look alike, and only their values tell their order.
    values = value_digests(weights)
    lines = [f"{tuple(w.param.shape)} {v}" for w, v in zip(weights, values, strict=True)]
    everyone = lines_that_differ(comm, lines) or []
    for rank, theirs in enumerate(everyone):
        for i, (first, other) in enumerate(zip(everyone[0], theirs, strict=True)):
            # Ranks may start from other values, but hardly from those of another weight.
            if first != other and other in everyone[0]:
                there = weights[everyone[0].index(other)].name
                raise RankMismatchError(
                    "every rank must list the weights in the same order: what rank 0 gave as "
                    f"{there}, rank {rank} gave as {weights[i].name}; give "
                    "model.named_parameters(), whose names are compared."
                )


def _stored(weight: Weight, recipes: Mapping[int, str]) -> str:
    """How it is stored; ``recipes`` are the texts of all recipes."""
    storage = weight.storage
    if storage is None:
        return str(weight.param.dtype)
    columnwise = "with" if storage.has_columnwise else "without"
    group = "" if storage.amax_group is None else f", amax group {storage.amax_group}"
    return f"{recipes[id(storage.recipe)]}, {storage.dtype}, {columnwise} a columnwise copy{group},"
