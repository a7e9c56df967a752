"""GradientReducer: the mean over ranks of whole gradients, on each rank for its own shards.

Gradients are copied into an FP32 buffer laid out as a matrix [ranks, columns] (see "Note: columns"
in :mod:`zerocast.optim.shards`), summed by a reduce-scatter and divided by the number of ranks. So
ranks with identical BF16 or FP16 gradients get exactly that gradient: up to 2^13 ranks the sums are
exact in FP32, and so is the quotient.

The buffer is bounded: a model whose gradients do not fit is reduced in several rounds, some columns
of all ranks each.

A weight that no rank has a gradient for is left out of the step, as torch leaves it out; one that
only some ranks have a gradient for counts as zero on the others. So that ranks know of each other,
every row of the matrix ends in flags, one entry a weight, 1 or 0, which the same reduce-scatter
sums. After these come notes: a few numbers that ranks exchange.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.errors import InputError
from zerocast.layout import Extent
from zerocast.optim.shards import Shard, ShardedWeights

BUFFER_ELEMENTS = 1 << 24
"""The largest gradient buffer, in FP32 elements: 64 MiB, past which messages move no faster."""

NOTES = 6
"""Numbers that travel with the gradients."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of one weight's gradient, or of the flags and notes, and their place in the buffer.

    Attributes:
        source: the weight's place; the number of weights for flags and notes.
        elements: those that are copied.
        place: a view of the buffer.
    """

    source: int
    elements: slice
    place: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Round:
    """One reduce-scatter.

    Attributes:
        pieces: what is copied into the buffer, for every rank.
        buffer: FP32, flat, [ranks * columns in this round].
        output: the same columns of :attr:`GradientReducer.reduced`.
    """

    pieces: list[_Piece]
    buffer: torch.Tensor
    output: torch.Tensor


class GradientReducer:
    """Reduces the gradients of all weights of an optimizer; the buffers live as long as it does.

    Args:
        shards: the weights and their owners.
        buffer_elements: the largest gradient buffer, in FP32 elements.

    Attributes:
        reduced: FP32 [columns + weights + NOTES]: the mean gradients of this rank's shards, then
            for each weight how many ranks, as a fraction, have a gradient for it, then the means of
            the notes.
    """

    def __init__(self, shards: ShardedWeights, buffer_elements: int = BUFFER_ELEMENTS) -> None:
        self._shards = shards
        size, rank, device = shards.comm.size, shards.comm.rank, shards.masters.device
        width = shards.num_columns + len(shards.weights) + NOTES
        step = min(width, max(1, buffer_elements // size))
        buffer = torch.zeros(size * step, dtype=torch.float32, device=device)
        # A single round leaves its result where this rank's row lies.
        self.reduced = buffer.view(size, step)[rank] if step == width else buffer.new_zeros(width)
        self._kept: list[tuple[weakref.ref[torch.Tensor], int] | None] | None = None
        # Flags and notes are as one more weight, whole on every rank.
        flags = Shard(Extent(0, width - shards.num_columns), slice(shards.num_columns, width))
        owned = [[*shards.shards(r), flags] for r in range(size)]
        self._rounds = [
            self._plan_round(owned, buffer, start, min(start + step, width))
            for start in range(0, width, step)
        ]

    def _plan_round(
        self, owned: Sequence[Sequence[Shard]], buffer: torch.Tensor, start: int, end: int
    ) -> _Round:
        """Plan the round of columns ``start`` to ``end``."""
        rows = buffer[: len(owned) * (end - start)].view(len(owned), end - start)
        pieces = []
        for row, shards in zip(rows, owned, strict=True):
            for i, shard in enumerate(shards):
                first, last = max(start, shard.columns.start), min(end, shard.columns.stop)
                if first < last:
                    offset = shard.extent.start - shard.columns.start
                    elements = slice(first + offset, last + offset)
                    pieces.append(_Piece(i, elements, row[first - start : last - start]))
        return _Round(pieces, rows.view(-1), self.reduced[start:end])

    def reduce_mean(self, notes: Sequence[float] = (0.0,) * NOTES) -> None:
        """Fill :attr:`reduced`, of gradients and ``notes``. Collective: one reduce-scatter a
        round.
        """
        comm, device = self._shards.comm, self.reduced.device
        gradients = [_flat(grad) for grad in self._grads()]
        flags = [float(gradient is not None) for gradient in gradients]
        sources = [*gradients, torch.tensor([*flags, *notes], dtype=torch.float32, device=device)]
        for each in self._rounds:
            for piece in each.pieces:
                source = sources[piece.source]
                if source is None:
                    piece.place.zero_()
                else:
                    piece.place.copy_(source[piece.elements])
            comm.reduce_scatter_sum(each.output, each.buffer)
        if comm.size > 1:
            self.reduced.div_(comm.size)

    def keep(self) -> None:
        """Keep what was reduced just now for the next step, with the gradients it came from."""
        self._kept = [
            None if grad is None else (weakref.ref(grad), grad._version) for grad in self._grads()
        ]

    def drop(self) -> None:
        """Forget what was kept: the next step reduces the gradients."""
        self._kept = None

    @property
    def kept(self) -> bool:
        """Whether the next step uses what was reduced earlier."""
        return self._kept is not None

    def changed(self) -> InputError | None:
        """Return the error for a gradient that is no longer the one that was reduced and kept."""
        for weight, kept in zip(self._shards.weights, self._kept or (), strict=True):
            grad = weight.param.grad
            version = None if grad is None else grad._version
            if grad is not (kept and kept[0]()) or version != (kept and kept[1]):
                return InputError(
                    f"a step uses the gradients that clip_grad_norm_ has reduced, and that of "
                    f"{weight.name} has changed since; call optimizer.clip_grad_norm_ last before "
                    "optimizer.step(), or optimizer.zero_grad() where no step followed it."
                )
        return None

    def notes(self) -> list[float]:
        """Return the mean over ranks of each note."""
        return self.reduced[-NOTES:].tolist()

    def gradients(self) -> list[torch.Tensor | None]:
        """Return each weight's mean gradient on this rank's shard, a view; None where no rank has
        a gradient.
        """
        # Asked only where this rank lacks one, for on a GPU the answer waits for the reduction.
        missing = any(grad is None for grad in self._grads())
        present = self.reduced[self._shards.num_columns : -NOTES].tolist() if missing else None
        return [
            self.reduced[shard.columns] if present is None or present[i] else None
            for i, shard in enumerate(self._shards.own)
        ]

    def _grads(self) -> list[torch.Tensor | None]:
        return [weight.param.grad for weight in self._shards.weights]

    def scale_(self, factor: torch.Tensor) -> None:
        """Multiply the mean gradients by ``factor``, FP32 []."""
        self.reduced[: self._shards.num_columns].mul_(factor)

    def norm(self, norm_type: float) -> torch.Tensor:
        """Return the norm of all mean gradients: FP32 [], the same on all ranks. Collective."""
        comm = self._shards.comm
        shards = [self.reduced[shard.columns] for shard in self._shards.own if shard.extent]
        if math.isinf(norm_type):
            largest = self.reduced.new_zeros(1)
            for shard in shards:
                largest = torch.maximum(largest, shard.abs().max())  # NaN stays NaN
            bits = largest.view(torch.int32)  # order like the magnitudes, and NaN is the largest
            comm.all_reduce_max_(bits)
            return bits.view(torch.float32)[0]
        total = torch.zeros(1, dtype=torch.float64, device=self.reduced.device)
        for shard in shards:
            total += torch.linalg.vector_norm(shard, norm_type, dtype=torch.float64) ** norm_type
        comm.all_reduce_sum_(total)
        return total[0].pow(1 / norm_type).float()


def _flat(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    return (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)
