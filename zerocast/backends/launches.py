"""Combines launches into one, for every backend."""

from __future__ import annotations

from collections.abc import Callable

from zerocast.backends.reference import ReferenceBackend
from zerocast.numerics import Launch, Numerics, Operands


def nothing(*given: object) -> None:
    """Do nothing: the launch of an operation on no elements."""


def in_sequence(first: Launch, second: Launch) -> Launch:
    """Return the launch of both, one after the other."""

    def launch() -> None:
        first()
        second()

    return launch


def with_empty_shards(
    compute_scale: Callable[[Numerics, Operands], Launch],
    numerics: Numerics,
    operands: Operands,
) -> Launch:
    """Return the launch of ``compute_scale`` for ``operands`` that have elements, and of the
    reference for those that have none: tensor-parallel shards that share amaxes.

    Compiled code divides its work by stored scales, of which such a shard may have none. The work
    is tiny, so plain torch does it.
    """
    empty = [operand for operand in operands if not operand.grid.numel]
    if not empty:
        return compute_scale(numerics, operands)
    compiled = compute_scale(numerics, [operand for operand in operands if operand.grid.numel])
    return in_sequence(compiled, ReferenceBackend().compute_scale(numerics, empty))
