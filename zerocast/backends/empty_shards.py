"""Computes the scales of empty tensor-parallel shards, which share amaxes and have no element.

Compiled code divides its work by stored scales, of which such a shard may have none. There is next
to nothing to do, so plain torch does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerocast.backends.reference import ReferenceBackend
from zerocast.numerics import Launch, Numerics, TensorOperand


def with_empty_shards(
    compute_scale: Callable[[Numerics, Sequence[TensorOperand]], Launch],
    numerics: Numerics,
    operands: Sequence[TensorOperand],
) -> Launch:
    """The launch of ``compute_scale`` for ``operands`` that have elements, and of the reference for
    those that have none.
    """
    empty = [operand for operand in operands if not operand.grid.numel]
    if not empty:
        return compute_scale(numerics, operands)
    compiled = compute_scale(numerics, [operand for operand in operands if operand.grid.numel])
    plain = ReferenceBackend().compute_scale(numerics, empty)

    def launch() -> None:
        compiled()
        plain()

    return launch
