"""An update of masters, then what a cast measures of them: for backends that have no pass over the
masters that does both.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerocast.numerics import (
    AdamWUpdate,
    Backend,
    Float8DelayedNumerics,
    LaunchUpdates,
    Masters,
    Numerics,
    TensorOperand,
)


def update_then_cast(
    backend: Backend, numerics: Numerics, operands: Sequence[TensorOperand], masters: Masters
) -> LaunchUpdates:
    """:meth:`Backend.adamw_cast` in two passes over the masters."""
    if isinstance(numerics, Float8DelayedNumerics):
        cast = backend.partial_cast(numerics, operands, masters)
    elif any(operand.whole for operand in operands):
        cast = backend.partial_amax_cast(numerics, operands, masters)
    else:
        cast = backend.partial_amax(operands, masters)
    slots = [operand.slot for operand in operands]

    def launch(updates: Sequence[AdamWUpdate | None]) -> None:
        backend.adamw([each for slot in slots if (each := updates[slot]) is not None])()
        cast()

    return launch
