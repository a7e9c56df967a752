"""Backend: the contract that everybody fulfils who does the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from zerocast.ops.activations import ActivationTarget
from zerocast.ops.laws import Law, NVFP4Law
from zerocast.ops.operands import (
    CastShard,
    DequantizeTarget,
    Masters,
    ScaleTarget,
    SelectTarget,
    TransposeTarget,
)

Launch = Callable[[], None]
"""A prepared operation: runs it once on the buffers that it was prepared for."""


@runtime_checkable
class Backend(Protocol):
    """Who does the arithmetic. Each method prepares one operation for many weights and returns its
    launch.

    All tensors of one call lie on one device. Nothing is read or written before the launch. A
    launch with nothing to do (no weights, only empty shards) is a launch that does nothing. A
    backend says here, before the first launch, what it cannot do: by
    :class:`zerocast.errors.BackendError`.
    """

    name: str

    def partial_amax(self, shards: Sequence[CastShard], masters: Masters) -> Launch:
        """Raise ``block_amax`` and ``tensor_amax`` to the largest magnitudes of this rank's rounded
        elements.

        The buffers must be zero, or hold what earlier shards left: the launch takes maxima, it does
        not clear. Infinities are kept as ``INFINITY_BITS``, every NaN becomes ``NAN_BITS``. Work
        follows the shard.
        """
        ...

    def partial_select(
        self, law: NVFP4Law, shards: Sequence[CastShard], masters: Masters
    ) -> Launch:
        """4-over-6, this rank's part of the decision, from reduced amaxes: choices of its own
        blocks, errors and elements of the shared ones, in ``candidates``, whose exchanged tensors
        hold 0.
        """
        ...

    def select(self, law: NVFP4Law, targets: Sequence[SelectTarget]) -> Launch:
        """4-over-6: the choices in cut rows of blocks, from the exchanged ``candidates``. Segments'
        errors are made from their elements, into ``row_errors``.
        """
        ...

    def compute_scale(self, law: Law, targets: Sequence[ScaleTarget]) -> Launch:
        """Make the stored scales of whole weights from reduced amaxes; padding included, repeats
        included. What the law remembers of a weight is brought up to date.
        """
        ...

    def partial_cast(self, law: Law, shards: Sequence[CastShard], masters: Masters) -> Launch:
        """Round, scale and encode this rank's elements into ``codes``; every other nibble keeps its
        value.

        Under :class:`Float8DelayedLaw` it raises the amaxes, too, as :meth:`partial_amax` does, in
        the same pass over the masters.
        """
        ...

    def transpose(self, targets: Sequence[TransposeTarget]) -> Launch:
        """Make the columnwise codes and scales from the gathered rowwise ones; padding included."""
        ...

    def dequantize(self, law: Law, targets: Sequence[DequantizeTarget]) -> Launch:
        """Decode whole weights to FP32. A NaN scale decodes to NaN."""
        ...

    def activate(self, law: Law | None, target: ActivationTarget) -> Launch:
        """Compute, round and cast one tensor: its output, its codes and their scales at once.

        Codes are exact with respect to the rounded result. Without a law there are no planes, and
        the launch writes the output alone. Under :class:`Float8DelayedLaw` the stored scale is
        ``1 / scale``, NaN where the tensor amax is not finite, and nothing remembers anything.
        ``law`` must be one that :func:`can_activate`.
        """
        ...
