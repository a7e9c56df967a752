"""Do all ranks optimize the same weights in the same way?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

from zerocast.comm import Communicator, lines_that_differ
from zerocast.errors import RankMismatchError
from zerocast.optim.weights import Weight, value_digests
from zerocast.recipes import describe_recipe
from zerocast.tensors import QuantizedTensor


def check_consistency(
    comm: Communicator,
    optimizer: str,
    param_groups: list[dict[str, Any]],
    weights: Sequence[Weight],
) -> None:
    """Compare optimizer, options and weights of all ranks, once. Collective.

    Weights may have other values on other ranks, but not each other's.

    Args:
        optimizer: what describes the optimizer and its own options.

    Raises:
        RankMismatchError: on every rank, naming both sides of the first disagreement.
    """
    lines = [optimizer]
    lines += option_lines(param_groups)
    lines += [
        f"{w.name}: {tuple(w.param.shape)} of {_stored(w)} in param_groups[{w.group}]"
        for w in weights
    ]

    everyone = lines_that_differ(comm, lines)
    if everyone is None:
        _check_order(comm, weights)
    else:
        raise_first_difference(
            everyone,
            "every rank must optimize the same weights in the same order with the same options",
        )


def _check_order(comm: Communicator, weights: Sequence[Weight]) -> None:
    """Refuse weights that a rank lists in another order, where their values tell: without names
    two of one shape look alike.
    """
    values = value_digests([weight.param for weight in weights])
    lines = [f"{tuple(w.param.shape)} {v}" for w, v in zip(weights, values, strict=True)]
    everyone = lines_that_differ(comm, lines)
    if everyone is None:
        return
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


def raise_first_difference(everyone: list[list[str]], required: str) -> NoReturn:
    """Raise :class:`RankMismatchError` that says what is ``required``, and names both sides of the
    first difference between ranks' lines.
    """
    first, rank, other = next(
        (first, rank, other)
        for rank, theirs in enumerate(everyone)
        for first, other in zip_longest(everyone[0], theirs, fillvalue="nothing more")
        if first != other
    )
    raise RankMismatchError(f"{required}: rank 0 has '{first}' where rank {rank} has '{other}'.")


def _stored(weight: Weight) -> str:
    if not isinstance(weight.param, QuantizedTensor):
        return str(weight.param.dtype)
    storage = weight.param.quantized_storage
    columnwise = "with" if storage.has_columnwise else "without"
    group = "" if storage.amax_group is None else f", amax group {storage.amax_group}"
    recipe = describe_recipe(storage.recipe)
    return f"{recipe}, {storage.dtype}, {columnwise} a columnwise copy{group},"


def option_lines(param_groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each param group a text of the options that can be compared between ranks."""
    return [f"param_groups[{g}] with {plain_options(p)}" for g, p in enumerate(param_groups)]


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a param group that can be compared between ranks."""
    return {name: value for name, value in group.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    """Whether equal values read equal on every rank; a function does not, nor does a tensor."""
    if isinstance(value, tuple):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)
