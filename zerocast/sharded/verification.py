"""verify: checks that all ranks hold the same bytes of some weights.

A rank cannot detect missing codes of other ranks: without an all-gather it holds old codes for
their elements, which still decode to valid numbers. So the ranks compare a digest
(:func:`zerocast.tensors.digest.digest`) of every buffer.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from zerocast.arguments import why_no_memory
from zerocast.comm import Attempt, Group, as_communicator, lines_that_differ
from zerocast.errors import InputError, RankMismatchError
from zerocast.recipes import describe_recipe
from zerocast.sharded import MasterWeight
from zerocast.sharded.placement import is_sharded, to_local
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.digest import digests
from zerocast.tensors.wrapped_names import named_parameters

Weights: TypeAlias = (
    "torch.Tensor | torch.nn.Module | Iterable[torch.Tensor | tuple[str, torch.Tensor]]"
)
"""The types that :func:`verify` accepts."""

_WEIGHTS_NAMED = 5
"""The number of weights that a message describes; the others are counted."""

_IS = "is"
"""The field of a line that describes the weight itself; other lines describe its buffers."""

_NOT_GATHERED = (
    "The codes differ and the scales do not: the all-gather of the codes was left out, or ran "
    "before the cast, or the weight was written on some ranks. Call plan.all_gather() after every "
    "plan.cast(); or gather the codes and then call zerocast.post_all_gather_processing."
)
_NOT_SHARED = (
    "More than codes differs: some ranks have cast, loaded, copied or stepped, and others have "
    "not. Do it on all ranks of the group, or broadcast the weight."
)
_OTHER_WEIGHTS = (
    "Give the same weights in the same order on every rank of the group. Ranks that hold different "
    "parts of a weight have nothing to compare: under tensor parallelism give the data-parallel "
    "group; under FSDP2 call module.unshard() on every module that was given to fully_shard, then "
    "verify, then module.reshard()."
)


def verify(weights: Weights, group: Group = None) -> None:
    """Check that every rank holds the same bytes of ``weights``. Collective.

    The ranks compare codes, scales, amaxes, recipe state and derived copies; of a stale copy they
    compare only that it is stale. Of masters and plain weights (norms, biases, those of
    :class:`zerocast.optim.ZeroOptimizer`) they compare the values. The call waits for a pending
    all-gather. It costs one all-reduce of 40 bytes and one pass over the weights. Call it after the
    all-gather, for example in the first steps of a new program.

    Under FSDP2 ranks hold different rows of a weight until it is gathered. Unshard the modules
    first, so that the gathered codes are compared.

    Args:
        weights: a weight; an iterable of weights, or of (name, weight) pairs; or a module, which
            stands for its parameters. The same on every rank, in the same order.
        group: the ranks that hold the same weights, as for :class:`zerocast.CastPlan`. Under tensor
            parallelism give the data-parallel group.

    Raises:
        InputError: on every rank, if any rank was given anything other than weights.
        RankMismatchError: on every rank, if ranks hold different bytes, or were given different
            weights. The message names weights, buffers and ranks, and the likely cause.
    """
    comm = as_communicator(group)
    lines: list[str] = []
    attempt = Attempt()
    with attempt:
        lines = _lines(_named(weights))
    by_rank = lines_that_differ(comm, lines, attempt.error)
    if by_rank is not None:
        raise RankMismatchError(_message(by_rank))


def _named(weights: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the weights with their names, or with their indices if they have no names."""
    if isinstance(weights, torch.nn.Module):
        return list(named_parameters(weights))
    if isinstance(weights, torch.Tensor):
        weights = [weights]
    if not isinstance(weights, Iterable) or isinstance(weights, str | bytes):
        raise InputError(
            f"verify takes a weight, an iterable of weights or of (name, weight) pairs, or a "
            f"module, got {type(weights).__name__}."
        )
    named = []
    for i, each in enumerate(weights):
        is_pair = isinstance(each, tuple) and len(each) == 2
        name, weight = each if is_pair else (f"weights[{i}]", each)
        if not isinstance(weight, torch.Tensor):
            raise InputError(
                f"verify takes tensors, or pairs of a name and a tensor, got "
                f"{type(weight).__name__} as {name}."
            )
        named.append((str(name), weight))
    return named


def _lines(weights: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the lines that ranks compare, [name, field, value] in JSON: a description of each
    weight, and a digest of each of its buffers.
    """
    described = [
        (name, field, value)
        for name, weight in weights
        for field, value in _described(name, weight).items()
    ]
    found = iter(digests(value for *_, value in described if isinstance(value, torch.Tensor)))
    return [
        json.dumps([name, field, value if isinstance(value, str) else str(next(found))])
        for name, field, value in described
    ]


def _described(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor | str]:
    """Return a description of ``weight``, under the key :data:`_IS`, and its buffers by name: plain
    tensors, or "stale".
    """
    place = f" at {_coordinate(weight)} of {weight.placements}" if is_sharded(weight) else ""
    local = to_local(weight)
    description = f"{tuple(local.shape)} {local.dtype}"
    if isinstance(local, QuantizedTensor):
        storage = local.quantized_storage
        stale = storage.derived_names if storage.is_stale else ()
        tp_shard = "" if storage.tp_shard is None else f", {storage.tp_shard}"
        return {_IS: f"{description} {describe_recipe(storage.recipe)}{tp_shard}{place}"} | {
            field: "stale" if field in stale else buffer
            for field, buffer in storage.buffers.items()
        }
    if isinstance(local, MasterWeight):
        local = local.value
    if (problem := why_no_memory(local)) is not None:
        raise InputError(
            "verify takes quantized weights, masters and tensors with allocated storage, got as "
            f"{name} {problem}, or leave it out."
        )
    return {_IS: description + place, "values": local}


def _coordinate(weight: Any) -> list[int]:
    """Return this rank's coordinates in the mesh dimensions that divide ``weight``, a DTensor."""
    return [
        weight.device_mesh.get_local_rank(i)
        for i, placement in enumerate(weight.placements)
        if not placement.is_replicate()
    ]


def _message(by_rank: Sequence[Sequence[str]]) -> str:
    """Return a message with the differing weights, buffers and ranks, and the likely cause."""
    ranks = [[json.loads(line) for line in lines] for lines in by_rank]
    required = "every rank of the group must hold the same bytes of the weights, but "
    given = [[(name, value) for name, field, value in each if field == _IS] for each in ranks]
    for rank, theirs in enumerate(given):
        pairs = itertools.zip_longest(given[0], theirs, fillvalue=["nothing"])
        for i, (a, b) in enumerate(pairs):
            if a != b:
                return (
                    f"{required}weight {i} of {len(given[0])} on rank 0 is {', '.join(a)}, and "
                    f"weight {i} of {len(theirs)} on rank {rank} is {', '.join(b)}. "
                    f"{_OTHER_WEIGHTS}"
                )
    found: dict[str, dict[str, str]] = {}
    values = [{(name, field): value for name, field, value in lines} for lines in ranks]
    for name, field in dict.fromkeys(key for each in values for key in each):
        held = [each.get((name, field), "missing") for each in values]
        if len(set(held)) > 1:
            found.setdefault(name, {})[field] = _who_holds_what(held)
    reports = [
        f"{name}: {', '.join(f'{field} ({who})' for field, who in fields.items())}"
        for name, fields in itertools.islice(found.items(), _WEIGHTS_NAMED)
    ]
    more = len(found) - len(reports)
    others = f"; and {more} weights more" if more else ""
    fields = {field for each in found.values() for field in each}
    codes = {"rowwise_data", "columnwise_data"}
    only_codes = bool(fields & codes) and fields <= codes | {"columnwise_scale_inv"}
    return (
        f"{required}these differ: {'; '.join(reports)}{others}. "
        f"{_NOT_GATHERED if only_codes else _NOT_SHARED}"
    )


def _who_holds_what(held: Sequence[str]) -> str:
    """Return a description of the groups of ranks with equal ``held[rank]``."""
    ranks_of: dict[str, list[str]] = {}
    for rank, value in enumerate(held):
        ranks_of.setdefault(value, []).append(str(rank))
    if len(ranks_of) == len(held) > 2:
        return "different on every rank"
    return " against ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for ranks in ranks_of.values()
    )
