"""Do all ranks optimize the same weights in the same way?"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from zerocast.comm import Communicator, lines_that_differ
from zerocast.errors import RankMismatchError
from zerocast.optim.weights import Weight
from zerocast.recipes import describe_recipe
from zerocast.tensors import QuantizedTensor


def check_same_world(
    comm: Communicator, optimizer: str, param_groups: list[dict[str, Any]], weights: list[Weight]
) -> None:
    """Compare optimizer, options and weights of all ranks, once. Collective.

    Args:
        optimizer: what describes the optimizer and its own options.

    Raises:
        RankMismatchError: on every rank, naming both sides of the first disagreement.
    """
    lines = [optimizer]
    for g, group in enumerate(param_groups):
        options = {name: value for name, value in group.items() if _is_plain(value)}
        lines.append(f"param_groups[{g}] with {options}")
    lines += [
        f"{w.name}: {tuple(w.param.shape)} of {_stored(w)} in param_groups[{w.group}]"
        for w in weights
    ]

    everyone = lines_that_differ(comm, lines)
    if everyone is None:
        return
    for rank, theirs in enumerate(everyone):
        for first, other in zip_longest(everyone[0], theirs, fillvalue="nothing more"):
            if first != other:
                raise RankMismatchError(
                    "every rank must optimize the same weights in the same order with the same "
                    f"options: rank 0 has '{first}' where rank {rank} has '{other}'."
                )


def _stored(weight: Weight) -> str:
    if isinstance(weight.param, QuantizedTensor):
        return describe_recipe(weight.param.recipe)
    return str(weight.param.dtype)


def _is_plain(value: object) -> bool:
    """Whether equal values read equal on every rank; a function does not, nor does a tensor."""
    if isinstance(value, tuple):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)
