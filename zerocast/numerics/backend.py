"""Backend: the contract of the classes that do the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from zerocast.layout import BlockGrid
from zerocast.numerics.adamw_numbers import AdamWUpdate
from zerocast.numerics.fused_ops import FusedOperand
from zerocast.numerics.numerics import Numerics, NVFP4Numerics
from zerocast.numerics.operands import (
    CodeCopy,
    Comparison,
    DigestedBytes,
    Masters,
    Operands,
    SharedByte,
)

Launch = Callable[[], None]
"""A prepared operation: runs it once on the buffers that it was prepared for."""

LaunchOn = Callable[[torch.Tensor], None]
"""A prepared operation on one further buffer, uint8 and contiguous, passed to each launch."""

LaunchUpdates = Callable[[Sequence[AdamWUpdate | None]], None]
"""A prepared operation that updates masters. Each launch takes the updates, by slot of
:class:`Masters`; None where a master is read as it is."""


ChangedRuns = tuple[int, int, torch.Tensor, torch.Tensor]
"""The changed elements of a comparison, as they travel: entries, elements, data, digest.

The data are uint8: of each run the elements left out before it (uint16) and its length (uint8),
then the elements of all runs. A longer gap or run takes several entries. Runs of elements of 1, 2,
and 4 or more bytes that are less than 4, 2 and 1 apart are one. The digest, int64 [], is what the
changes add to the digest of the whole tensor, modulo 2^64.
"""


@runtime_checkable
class Backend(Protocol):
    """A class that does the arithmetic. Each method prepares one operation for many weights and
    returns its launch.

    All tensors of one call are on one device. Nothing is read or written before the launch. A
    launch with nothing to do (no weights, only empty shards) is a launch that does nothing. A
    method raises :class:`zerocast.errors.BackendError`, before the first launch, for what the
    backend cannot do.
    """

    name: str

    def partial_amax(
        self, operands: Operands, masters: Masters, numerics: Numerics | None = None
    ) -> Launch:
        """Raise ``tensor_amax``, where there is one, and the block amaxes of planes that are cast
        to the largest magnitudes of this rank's rounded elements.

        The buffers must be zero, or hold the maxima of earlier shards: the launch takes maxima, it
        does not clear. Infinities are kept as ``INFINITY_BITS``, every NaN becomes ``NAN_BITS``.
        The work is proportional to the shard.

        With ``numerics``, the same read of the masters also writes the codes of the elements in
        ``whole``. A block's scale must depend on its own amax alone, and no other rank may hold
        elements of a block in ``whole``. Without ``numerics``, ``whole`` is ignored.
        """

    def reads_once(self, numerics: Numerics, grids: Sequence[BlockGrid]) -> bool:
        """Say whether :meth:`partial_amax` casts ``whole`` of planes in these blocks.

        There is one grid for each plane that is cast, and scales belong to blocks alone. Under
        4-over-6, say whether :meth:`partial_select` casts ``whole``.
        """

    def adamw(self, updates: Sequence[AdamWUpdate]) -> Launch:
        """Make one step of AdamW on each of some tensors, element by element."""

    def adamw_cast(self, numerics: Numerics, operands: Operands, masters: Masters) -> LaunchUpdates:
        """Do :meth:`adamw` on masters, and on the updated ones what :meth:`partial_amax` does,
        or under :class:`Float8DelayedNumerics` what :meth:`partial_cast` does. Masters that are
        updated are FP32.
        """

    def partial_select(
        self, numerics: NVFP4Numerics, operands: Operands, masters: Masters
    ) -> Launch:
        """Write this rank's share of the decisions of 4-over-6, from reduced amaxes, into
        ``candidates``, whose exchanged tensors hold 0: choices of its own blocks, errors and
        elements of the shared ones. Write the codes of the elements in ``whole``, in the same read
        of the masters.
        """

    def select(self, numerics: NVFP4Numerics, operands: Operands) -> Launch:
        """Write the choices of 4-over-6 in cut rows of blocks, from the exchanged ``candidates``.
        Segments' errors are made from their elements, into ``row_errors``.
        """

    def compute_scale(self, numerics: Numerics, operands: Operands) -> Launch:
        """Make ``amax`` and the stored scales of all planes that are not derived, of whole weights,
        from reduced amaxes; padding and repeats included. A plane without ``scale_inv`` is skipped.
        The state of a weight that ``advances`` is updated.
        """

    def expand_scales(self, numerics: Numerics, operands: Operands) -> Launch:
        """Make the stored scales of all planes, of whole weights, from their ``compact`` ones;
        padding included, repeats included.
        """

    def partial_cast(self, numerics: Numerics, operands: Operands, masters: Masters) -> Launch:
        """Round, scale and encode this rank's elements, except those in ``whole``, into the codes
        of planes that are cast; every other nibble keeps its value.

        Under :class:`Float8DelayedNumerics` it raises the amaxes, too, as :meth:`partial_amax`
        does, in the same pass over the masters.
        """

    def transpose(self, numerics: Numerics, operands: Operands) -> Launch:
        """Make codes and scales of the second plane, which is derived, from the gathered ones of
        the first; padding included. If it has no ``scale_inv``, one scale serves both.
        """

    def dequantize(self, numerics: Numerics, operands: Operands) -> Launch:
        """Decode the first planes of whole weights to ``values``. A NaN scale decodes to NaN."""

    def stage_codes(self, copies: Sequence[CodeCopy]) -> LaunchOn:
        """Copy codes into the buffer that is sent."""

    def store_codes(self, copies: Sequence[CodeCopy], shared: Sequence[SharedByte]) -> LaunchOn:
        """Copy codes from that buffer into the weights, and combine shared bytes."""

    def digest(self, ranges: Sequence[DigestedBytes], sums: torch.Tensor) -> Launch:
        """Add to each of ``sums``, int64 [len(ranges)], the digest of a range of bytes, modulo
        2^64; see "Digests" in docs/numerics.md.
        """

    def changed_runs(self, comparisons: Sequence[Comparison]) -> list[ChangedRuns]:
        """Find the elements whose bytes differ from those that are held, and hold them.

        This is no launch: the sizes of the results are known when it has run.
        """

    def fused_op(self, target: FusedOperand) -> Launch:
        """Compute the function or the norm of one tensor, and write it, rounded once; every NaN is
        the canonical one. The result is cast like any other tensor.
        """
