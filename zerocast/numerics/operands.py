"""Masters and operands: what the operations of a cast work on, one operand a tensor.

They hold tensors by reference, and geometry; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.layout import NOTHING, BlockGrid, Extent, Plane, SharedBlocks, ceil_div, round_up

NOMINALS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes of weights and of masters, by their numbers in compiled code: Nominal in tables.h."""


class Masters:
    """The shards that a step reads, FP32, BF16 or FP16: one slot a weight, re-bound to other
    tensors without preparing again.

    An optimizer that keeps its masters in place binds once. ``version`` counts the bindings, for a
    backend that keeps a copy of the table on its device.
    """

    def __init__(self, slots: int) -> None:
        self.tensors: list[torch.Tensor | None] = [None] * slots
        # Master in tables.h: the address of each tensor, 0 for an empty shard, and the number of
        # its dtype; on the host, whatever the default device is.
        self.table = torch.zeros(slots, 2, dtype=torch.int64, device="cpu")
        self.version = 0

    def bind(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Bind ``tensors`` for the next step: one a slot, contiguous, of the shard's size; None
        where empty. Each has any dtype of :data:`NOMINALS`.
        """
        assert len(tensors) == len(self.tensors)
        self.tensors = list(tensors)
        rows = [(0, 0) if t is None else (t.data_ptr(), NOMINALS[t.dtype]) for t in tensors]
        rows_of_slots = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self.table.copy_(rows_of_slots.view_as(self.table))
        self.version += 1

    def place(self, slot: int, table: torch.Tensor) -> int:
        """Return the address in ``table``, a copy of :attr:`table`, of the master of a slot."""
        return table.data_ptr() + slot * table.stride(0) * table.element_size()


@dataclass(frozen=True, slots=True)
class DelayedState:
    """The state of one tensor under :class:`Float8DelayedNumerics`, in the memory of that tensor.

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
    """The source of the random bits of a weight, beside the seed.

    Attributes:
        counter: int64 [2], the weight's own memory: the 32-bit hash of its name, and the step,
            which counts its casts: :meth:`Backend.compute_scale` adds one, and the cast that
            follows uses the sum (of which 32 bits enter the counter).
        origin, skip: of a tensor-parallel shard: the place of its first element in the flattened
            whole, and the elements of the whole between a row of the shard and the next. So element
            ``i`` of a shard with ``cols`` columns is ``index = i + origin + i // cols * skip`` of
            the whole. Both are even: no byte of codes is shared.
    """

    counter: torch.Tensor
    origin: int = 0
    skip: int = 0


@dataclass(frozen=True, slots=True)
class FourOverSixErrors:
    """The errors by which 4-over-6 decides, and the part of them that ranks exchange, for one
    weight.

    A row of blocks is *cut* where more than one rank owns elements of it. Every block of the others
    belongs to one rank, which chooses and writes ``choices``. In a cut row of blocks the rank that
    owns all elements of a block's row writes that row's errors; a block's row that ranks share is a
    *segment*, and each rank writes its own elements of it. All else is 0 before the exchange, so
    a SUM of int32 bit patterns puts everything together, exactly.

    Attributes:
        choices: uint8 [num_blocks rounded up to a multiple of 4]: 1 for map4, 0 for map6; or of
            the blocks alone that this rank keeps, from ``first_block`` on.
        cut: int64 [cuts] on the CPU, ascending: the rows of blocks that are cut.
        row_errors: FP32 [cuts, block_h, blocks_w, 2]: of each row of each block the summed errors
            of map4 and map6.
        segments: int64 [segments] on the CPU, ascending: the flat index of each segment's first
            element.
        elements: FP32 [segments, block_w], rounded; 0 where the matrix has no element.
        first_block: the number of the block that ``choices`` begin with.
    """

    choices: torch.Tensor
    cut: torch.Tensor
    row_errors: torch.Tensor
    segments: torch.Tensor
    elements: torch.Tensor
    first_block: int = 0

    @staticmethod
    def words(grid: BlockGrid, cuts: SharedBlocks, *, choices: bool = True) -> int:
        """Return the int32 entries of all exchanged tensors of one weight, with or without
        choices.
        """
        return sum(FourOverSixErrors._sizes(grid, cuts, choices))

    @classmethod
    def carve(
        cls, buffer: torch.Tensor, grid: BlockGrid, cuts: SharedBlocks, *, choices: bool = True
    ) -> FourOverSixErrors:
        """Return the candidates of one weight in ``buffer``, int32 [words]."""
        chosen, row_errors, elements = buffer.split(cls._sizes(grid, cuts, choices))
        return cls(
            chosen.view(torch.uint8),
            torch.tensor(cuts.rows, dtype=torch.int64, device="cpu"),
            row_errors.view(torch.float32).view(len(cuts.rows), grid.block_h, grid.blocks_w, 2),
            torch.tensor(cuts.segments, dtype=torch.int64, device="cpu"),
            elements.view(torch.float32).view(len(cuts.segments), grid.block_w),
        )

    def of_blocks(self, grid: BlockGrid, blocks: range) -> FourOverSixErrors:
        """Return the part for ``blocks``, whole rows of them, whose choices are not exchanged."""
        chosen = torch.zeros(
            round_up(len(blocks), 4), dtype=torch.uint8, device=self.row_errors.device
        )
        ends = torch.tensor([blocks.start, blocks.stop], dtype=torch.int64, device="cpu")
        rows = ends // max(grid.blocks_w, 1)  # a weight may have no columns
        cut = slice(*torch.searchsorted(self.cut, rows).tolist())
        elements = rows * grid.block_h * grid.cols
        segments = slice(*torch.searchsorted(self.segments, elements).tolist())
        return FourOverSixErrors(
            chosen, self.cut[cut], self.row_errors[cut],
            self.segments[segments], self.elements[segments], blocks.start,
        )  # fmt: skip

    @staticmethod
    def _sizes(grid: BlockGrid, cuts: SharedBlocks, choices: bool) -> list[int]:
        """Return the int32 entries of the choices, the row errors and the elements."""
        return [
            ceil_div(grid.num_blocks, 4) if choices else 0,
            len(cuts.rows) * grid.block_h * grid.blocks_w * 2,
            len(cuts.segments) * grid.block_w,
        ]


@dataclass(frozen=True, slots=True)
class PlaneBuffers:
    """One plane of a tensor, and its buffers; None for those that an operation does not use.

    Attributes:
        plane: where its codes come from, and how its scales are stored.
        block_amax: int32, of all blocks of ``plane.grid``, or of those that this rank keeps, from
            ``first_block`` on; of a plane that shares the rowwise codes, that of those.
        codes: uint8, contiguous, of the rows of ``plane.grid`` packed along its columns; of a cast
            they begin at :attr:`TensorOperand.codes_start`. Where a transpose ends a row with half
            a byte, the missing nibble is 0.
        scale_inv: the numerics' ``scale_dtype``, ``plane.scales.shape`` (or as many entries),
            contiguous.
        first_block: the number of the block that ``block_amax`` begins with.
        compact: the numerics' ``scale_dtype`` [plane.grid.num_blocks]: one scale a block, as ranks
            send them; ``scale_inv`` is made from it after the gather.
    """

    plane: Plane
    block_amax: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    scale_inv: torch.Tensor | None = None
    first_block: int = 0
    compact: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class CodeCopy:
    """Whole bytes of a weight's codes, and their place in the buffer that is sent.

    Attributes:
        codes: uint8 [bytes], contiguous.
        staged: their first byte in the buffer.
    """

    codes: torch.Tensor
    staged: int


@dataclass(frozen=True, slots=True)
class SharedByte:
    """A byte of a weight's codes of which two ranks send a nibble each, or one, the last one.

    Attributes:
        codes: uint8 [1].
        low, high: the bytes in the buffer that have its low and its high nibble; None where the
            weight's own stays.
    """

    codes: torch.Tensor
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The former and the present values of some elements.

    Attributes:
        held: the former values, of the dtype of ``values``.
        values: the present values: integers, flat and contiguous.
        first: the place of the first in the whole tensor.
    """

    held: torch.Tensor
    values: torch.Tensor
    first: int


@dataclass(frozen=True, slots=True)
class DigestedBytes:
    """A range of a tensor's bytes whose digest is taken.

    Attributes:
        values: of any dtype, contiguous.
        first: the place, in the whole tensor, of the first byte.
    """

    values: torch.Tensor
    first: int = 0


@dataclass(frozen=True, slots=True)
class TensorOperand:
    """One tensor as one rank sees it: the operand of every operation of a cast.

    A tensor whose columnwise plane is cast from the transposed tensor takes two operands: the
    second one has that plane alone, over the transposed matrix, with a separate master.

    Attributes:
        planes: the rowwise one first.
        slot: the place of its master in :class:`Masters`.
        extent: the elements of the whole tensor that this rank owns; may be empty, and start and
            end anywhere.
        round_to: float32, bfloat16 or float16, to which a master element is rounded first.
        codes_start: the element whose code is in the low bits of the first byte of ``codes``: 0 for
            the whole tensor, the extent's start rounded down to a whole byte for buffers of the
            shard.
        tensor_amax: int32 [1]; may be the same memory as the block amaxes where there is one block.
            None where scales depend on blocks alone and no amax is checked.
        amax: FP32 [1] that holds the tensor amax beside the scales, or None for numerics that
            stores none.
        delayed: the state of a tensor under :class:`Float8DelayedNumerics`.
        candidates: the candidates of a tensor under 4-over-6.
        rounding: the source of random bits of a tensor under stochastic rounding.
        advances: whether :meth:`Backend.compute_scale` updates ``delayed`` and ``rounding``. False
            where other code does.
        values: FP32 [M, K], contiguous: receives the decoded values of the first plane.
        whole: of the extent, the rows of blocks of all planes that one pass measures and casts
            (:meth:`Backend.partial_amax`), or chooses scales for and casts
            (:meth:`Backend.partial_select`).
    """

    planes: tuple[PlaneBuffers, ...]
    slot: int = 0
    extent: Extent = NOTHING
    round_to: torch.dtype = torch.float32
    codes_start: int = 0
    tensor_amax: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    delayed: DelayedState | None = None
    candidates: FourOverSixErrors | None = None
    rounding: Rounding | None = None
    advances: bool = True
    values: torch.Tensor | None = None
    whole: Extent = NOTHING

    @property
    def grid(self) -> BlockGrid:
        """The blocks of the first plane."""
        return self.planes[0].plane.grid

    @property
    def cast_planes(self) -> list[PlaneBuffers]:
        """The planes whose codes are cast."""
        return [each for each in self.planes if each.plane.is_cast]

    @property
    def scaled_planes(self) -> list[PlaneBuffers]:
        """The planes whose scales are made from amaxes."""
        return [each for each in self.planes if not each.plane.is_derived]


Operands = Sequence[TensorOperand]
"""The operands of one launch."""
