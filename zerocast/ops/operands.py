"""What the operations of a cast work on: masters, shards, and the targets of scales, copies and
values.

They hold tensors by reference, and geometry; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.formats import ElementFormat
from zerocast.layout import BlockGrid, Cuts, Extent, ScaleLayout, ceil_div

NOMINALS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes of weights and of masters, by their numbers in compiled code: Nominal in tables.h."""


class Masters:
    """The shards that a step reads, FP32, BF16 or FP16: one slot a weight, re-bound to other
    tensors without preparing anew.

    An optimizer that keeps its masters in place binds once. ``version`` counts the bindings, for a
    backend that keeps a copy of the table on its device.
    """

    def __init__(self, slots: int) -> None:
        self.tensors: list[torch.Tensor | None] = [None] * slots
        # Master in tables.h: the address of each tensor, 0 for an empty shard, and the number of
        # its dtype; on the host whatever the default device is.
        self.table = torch.zeros(slots, 2, dtype=torch.int64, device="cpu")
        self.version = 0

    def bind(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Let the next step read ``tensors``: of a dtype of :data:`NOMINALS`, which may be another
        for each, contiguous, one a slot, of the shard's size; None where empty.
        """
        assert len(tensors) == len(self.tensors)
        self.tensors = list(tensors)
        rows = [(0, 0) if t is None else (t.data_ptr(), NOMINALS[t.dtype]) for t in tensors]
        rows_of_slots = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self.table.copy_(rows_of_slots.view_as(self.table))
        self.version += 1

    def place(self, slot: int, table: torch.Tensor) -> int:
        """Where in ``table``, a copy of :attr:`table`, compiled code finds the master of a slot."""
        return table.data_ptr() + slot * table.stride(0) * table.element_size()


@dataclass(frozen=True, slots=True)
class ColumnwiseShard:
    """The second plane of a weight whose columnwise codes are quantized independently.

    Its codes are stored as the rowwise ones are, [M, K]: element ``i`` of the weight has its code
    at ``i - CastShard.codes_start``.

    Attributes:
        grid: the blocks of this plane, over the same matrix.
        block_amax: int32 [grid.num_blocks].
        codes: uint8, flat and contiguous.
    """

    grid: BlockGrid
    block_amax: torch.Tensor
    codes: torch.Tensor


@dataclass(frozen=True, slots=True)
class DelayedState:
    """What :class:`Float8DelayedLaw` remembers of one tensor; the tensor's own memory.

    Attributes:
        scale: FP32 [1], what the next cast multiplies by; 1 at first.
        cast_scale: FP32 [1], what the latest cast multiplied by.
        amax_history: FP32 [history length], newest first; 0 at first.
    """

    scale: torch.Tensor
    cast_scale: torch.Tensor
    amax_history: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rounding:
    """Where the random words of a weight come from, beside the seed.

    Attributes:
        counter: int64 [2], the weight's own memory: the 32-bit hash of its name, and the step,
            which counts its casts: :meth:`Backend.compute_scale` adds one, and the cast that
            follows uses the sum (of which 32 bits enter the counter).
        origin, skip: of a part of a weight: the place of its first element in the flattened whole,
            and the elements of the whole between a row of the part and the next. So element ``i``
            of a part with ``cols`` columns is ``index = i + origin + i // cols * skip`` of the
            whole. Both are even: no byte of codes is cut.
    """

    counter: torch.Tensor
    origin: int = 0
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Candidates:
    """What 4-over-6 decides by, and what ranks exchange of it, for one weight.

    A row of blocks is *cut* where more than one rank owns elements of it. Every block of the others
    belongs to one rank, which chooses and writes ``choices``. In a cut row of blocks the rank that
    owns all elements of a block's row writes that row's errors; a block's row that ranks share is a
    *segment*, and each rank writes its own elements of it. All else is 0 before the exchange, so
    a SUM of int32 bit patterns puts everything together, exactly.

    Attributes:
        choices: uint8 [num_blocks rounded up to a multiple of 4]: 1 for map4, 0 for map6.
        cut: int64 [cuts] on the CPU, ascending: the rows of blocks that are cut.
        row_errors: FP32 [cuts, block_h, blocks_w, 2]: of each row of each block the summed errors
            of map4 and map6.
        segments: int64 [segments] on the CPU, ascending: the flat index of each segment's first
            element.
        elements: FP32 [segments, block_w], rounded; 0 where the matrix has no element.
    """

    choices: torch.Tensor
    cut: torch.Tensor
    row_errors: torch.Tensor
    segments: torch.Tensor
    elements: torch.Tensor

    @staticmethod
    def words(grid: BlockGrid, cuts: Cuts) -> int:
        """int32 entries that all exchanged tensors of one weight take."""
        return sum(Candidates._sizes(grid, cuts))

    @classmethod
    def carve(cls, buffer: torch.Tensor, grid: BlockGrid, cuts: Cuts) -> Candidates:
        """The candidates of one weight in ``buffer``, int32 [words]."""
        choices, row_errors, elements = buffer.split(cls._sizes(grid, cuts))
        return cls(
            choices.view(torch.uint8),
            torch.tensor(cuts.rows, dtype=torch.int64, device="cpu"),
            row_errors.view(torch.float32).view(len(cuts.rows), grid.block_h, grid.blocks_w, 2),
            torch.tensor(cuts.segments, dtype=torch.int64, device="cpu"),
            elements.view(torch.float32).view(len(cuts.segments), grid.block_w),
        )

    @staticmethod
    def _sizes(grid: BlockGrid, cuts: Cuts) -> list[int]:
        """int32 entries of the choices, the row errors and the elements."""
        return [
            ceil_div(grid.num_blocks, 4),
            len(cuts.rows) * grid.block_h * grid.blocks_w * 2,
            len(cuts.segments) * grid.block_w,
        ]


@dataclass(frozen=True, slots=True)
class CastShard:
    """One weight as one rank sees it: what :meth:`Backend.partial_amax` and
    :meth:`Backend.partial_cast` work on.

    Attributes:
        slot: the place of its master in :class:`Masters`.
        extent: the elements of the whole weight that this rank owns; may be empty, start and end
            anywhere.
        grid: the blocks of the whole weight.
        round_to: float32, bfloat16 or float16; a master element is rounded to it before anything
            else is done.
        block_amax: int32 [grid.num_blocks], the weight's part of the buffer that is reduced.
        tensor_amax: int32 [1]; may be the same memory as ``block_amax`` where the grid is one
            block.
        codes: uint8, flat and contiguous: the weight's codes, or a buffer for this shard's only.
        codes_start: the element whose code is in the low bits of ``codes[0]``: 0 for the whole
            weight, the extent's start rounded down to a whole byte for a shard's own buffer.
        columnwise: the second plane, where it is quantized independently.
        delayed: of a weight under :class:`Float8DelayedLaw`.
        candidates: of a weight under 4-over-6.
        rounding: of a weight under stochastic rounding.
    """

    slot: int
    extent: Extent
    grid: BlockGrid
    round_to: torch.dtype
    block_amax: torch.Tensor
    tensor_amax: torch.Tensor
    codes: torch.Tensor
    codes_start: int = 0
    columnwise: ColumnwiseShard | None = None
    delayed: DelayedState | None = None
    candidates: Candidates | None = None
    rounding: Rounding | None = None


@dataclass(frozen=True, slots=True)
class ColumnwiseScales:
    """The scales of a second plane that is quantized independently.

    Attributes:
        layout, block_amax, scale_inv: as in :class:`ScaleTarget`; ``layout.grid`` is that of
            :class:`ColumnwiseShard`, or the rowwise one where one block amax serves both planes.
    """

    layout: ScaleLayout
    block_amax: torch.Tensor
    scale_inv: torch.Tensor


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """Where one weight's scales go: what :meth:`Backend.compute_scale` works on.

    Attributes:
        layout: how block scales are stored, padding included.
        block_amax: int32 [layout.grid.num_blocks], reduced.
        tensor_amax: int32 [1], reduced.
        scale_inv: the law's ``scale_dtype``, ``layout.shape`` (or [1] for one block), contiguous.
            Wholly written.
        amax: FP32 [1] that receives the tensor amax, or None for a law that stores none.
        columnwise: the second plane's scales, where it is quantized independently.
        delayed, candidates, rounding: as in :class:`CastShard`.
    """

    layout: ScaleLayout
    block_amax: torch.Tensor
    tensor_amax: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor | None = None
    columnwise: ColumnwiseScales | None = None
    delayed: DelayedState | None = None
    candidates: Candidates | None = None
    rounding: Rounding | None = None


@dataclass(frozen=True, slots=True)
class SelectTarget:
    """One weight's exchanged errors: what :meth:`Backend.select` works on.

    Attributes:
        grid, block_amax, tensor_amax: as in :class:`CastShard`, amaxes reduced.
        candidates: reduced; ``choices`` of cut rows of blocks are written.
    """

    grid: BlockGrid
    block_amax: torch.Tensor
    tensor_amax: torch.Tensor
    candidates: Candidates


@dataclass(frozen=True, slots=True)
class TransposeTarget:
    """One weight's gathered codes and the columnwise copy: what :meth:`Backend.transpose` works on.

    Attributes:
        fmt: the codes' format.
        layout: how the rowwise scales are stored; ``layout.grid`` is the matrix [M, K].
        codes: uint8 [M, K * bits / 8], contiguous.
        scale_inv: the rowwise scales, ``layout.shape``.
        columnwise_layout: how the columnwise scales are stored; its grid is
            ``layout.grid.transposed()``.
        columnwise_codes: uint8 [K, ceil(M * bits / 8)], wholly written; a missing last nibble is 0.
        columnwise_scale_inv: ``columnwise_layout.shape``, wholly written. None where one plane of
            scales serves both.
    """

    fmt: ElementFormat
    layout: ScaleLayout
    codes: torch.Tensor
    scale_inv: torch.Tensor
    columnwise_layout: ScaleLayout
    columnwise_codes: torch.Tensor
    columnwise_scale_inv: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DequantizeTarget:
    """One weight's codes and the values they mean: what :meth:`Backend.dequantize` works on.

    Attributes:
        layout, codes, scale_inv: as in :class:`TransposeTarget`.
        amax: FP32 [1], or None for a law that stores none.
        out: FP32 [M, K], contiguous, wholly written.
    """

    layout: ScaleLayout
    codes: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor | None
    out: torch.Tensor
