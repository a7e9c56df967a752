"""Operands made by hand; and all operations of a backend on one weight under any numerics, its
elements cut into any shards: what they write, to be compared byte for byte.

The exchanges between ranks are restated on one process: a maximum over the shards' amaxes, a sum
over what 4-over-6 exchanges. One set of codes receives every shard's cast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.formats import byte_span, packed_columns
from zerocast.layout import BlockGrid, Extent, Plane, ScaleLayout, SharedBlocks, Source
from zerocast.numerics import (
    INFINITY_BITS,
    Backend,
    DelayedState,
    Float8DelayedNumerics,
    FourOverSixErrors,
    Masters,
    Numerics,
    NVFP4Numerics,
    PlaneBuffers,
    Rounding,
    TensorOperand,
)

Written = dict[str, torch.Tensor]


def plane(
    scales: ScaleLayout | BlockGrid,
    block_amax: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    source: Source = Source.MASTER,
) -> PlaneBuffers:
    """A plane under these blocks, or scales, and its buffers."""
    layout = ScaleLayout(scales) if isinstance(scales, BlockGrid) else scales
    block = layout.grid.block_h, layout.grid.block_w
    name = "rowwise" if source is Source.MASTER else "columnwise"
    return PlaneBuffers(Plane(name, source, block, layout), block_amax, codes, scale_inv)


def operand(
    scales: ScaleLayout | BlockGrid,
    block_amax: torch.Tensor | None = None,
    tensor_amax: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    *,
    second: PlaneBuffers | None = None,
    **others: Any,
) -> TensorOperand:
    """A tensor with this rowwise plane, and where it has one a second."""
    planes = (plane(scales, block_amax, codes, scale_inv), *([second] if second else []))
    return TensorOperand(planes, tensor_amax=tensor_amax, **others)


def masters_of(*tensors: torch.Tensor | None) -> Masters:
    """One slot for each."""
    masters = Masters(len(tensors))
    masters.bind(tensors)
    return masters


@dataclass(frozen=True)
class Scheme:
    """A weight: its numerics, its blocks and stored scales, and those of a second plane.

    Attributes:
        second: how the scales of a second plane are stored; its grid is the plane's. None
            without one.
        source: where its codes come from: cast from the master, shared with the rowwise plane, or
            transposed from it.
    """

    numerics: Numerics
    layout: ScaleLayout
    second: ScaleLayout | None = None
    source: Source = Source.MASTER
    round_to: torch.dtype = torch.bfloat16

    @property
    def grid(self) -> BlockGrid:
        """The rowwise blocks."""
        return self.layout.grid

    @property
    def whole(self) -> Extent:
        """All elements."""
        return Extent(0, self.grid.numel)

    @property
    def code_shape(self) -> tuple[int, int]:
        """Rows of whole bytes."""
        return self.grid.rows, packed_columns(self.numerics.fmt, self.grid.cols)

    def codes(self, extent: Extent | None = None) -> torch.Tensor:
        """What codes hold before the cast, those of ``extent`` alone where it is given."""
        if extent is None:
            return _filled(self.code_shape[0] * self.code_shape[1])
        first, last = byte_span(self.numerics.fmt, extent.start, extent.end)
        return _filled(last - first)

    def operand(self, codes: torch.Tensor, extent: Extent, *, own_codes: bool = False,
                amaxes: torch.Tensor | None = None, **others: Any) -> TensorOperand:  # fmt: skip
        """The rowwise plane, with amaxes of zero; with ``own_codes`` they begin with the extent."""
        grid = self.grid
        amax = torch.zeros(grid.amax_slots, dtype=torch.int32) if amaxes is None else amaxes
        start = extent.start - extent.start % (8 // self.numerics.fmt.bits) if own_codes else 0
        return operand(self.layout, amax[: grid.num_blocks], amax[-1:], codes, extent=extent,
                       round_to=self.round_to, codes_start=start, **others)  # fmt: skip


def per_tensor(rows: int, cols: int, numerics: Numerics) -> Scheme:
    """FP8 under one scale a tensor, with the transposed codes under the same scale."""
    grid = BlockGrid(rows, cols, rows, cols)
    return Scheme(numerics, ScaleLayout(grid), ScaleLayout(grid.transposed()), Source.ROWWISE)


def nvfp4(rows: int, cols: int, numerics: NVFP4Numerics | None = None, height: int = 16) -> Scheme:
    """Blocks of 16x16 with the transposed copy, or of 1x16 without."""
    grid = BlockGrid(rows, cols, height, 16)
    layouts = [
        ScaleLayout(g, row_repeat=g.block_h, row_multiple=128, col_multiple=4)
        for g in ([grid, grid.transposed()] if height == 16 else [grid])
    ]
    return Scheme(numerics or NVFP4Numerics(), *layouts, source=Source.ROWWISE)


def run_operations(
    backend: Backend,
    scheme: Scheme,
    masters: Sequence[torch.Tensor],
    extents: Sequence[Extent],
    *,
    own_codes: bool = False,
) -> Written:
    """Cast each of ``masters``, FP32 [numel] or the elements of the extents, in turn into one
    weight; what all that wrote, by name. With ``own_codes`` the one extent's are in a buffer of
    their own.
    """
    weight = _Weight(scheme, extents, own_codes)
    written: Written = {}
    for step, master in enumerate(masters):
        weight.cast(backend, master)
        values = weight.values(backend)
        written |= {f"{name} after cast {step}": t.clone() for name, t in values.items()}
    return written


class _Weight:
    """The buffers of one weight, as if every rank held the same ones."""

    def __init__(self, scheme: Scheme, extents: Sequence[Extent], own_codes: bool) -> None:
        self.scheme, self.own_codes = scheme, own_codes
        self.extents = [e for e in extents if e] or [*extents]
        numerics, grid, second = scheme.numerics, scheme.grid, scheme.second
        self.codes = scheme.codes(self.extents[0] if own_codes else None)
        self.scale_inv = torch.empty(scheme.layout.shape, dtype=numerics.scale_dtype)
        self.amax = torch.empty(1) if isinstance(numerics, NVFP4Numerics) else None
        self.second_codes = self.second_scales = None
        if second is not None:
            self.second_scales = torch.empty(second.shape, dtype=numerics.scale_dtype)
            if scheme.source is not Source.SHARED:
                columns = packed_columns(numerics.fmt, second.grid.cols)
                self.second_codes = _filled(second.grid.rows * columns).view(-1, columns)
        self.is_cast = second is not None and scheme.source is Source.MASTER
        self.delayed = self.rounding = None
        if isinstance(numerics, Float8DelayedNumerics):
            self.delayed = DelayedState(torch.ones(1), torch.ones(1), torch.zeros(5))
        if isinstance(numerics, NVFP4Numerics) and numerics.stochastic_rounding:
            self.rounding = Rounding(torch.tensor([0xDEADBEEF, 2**32 - 1]))
        self.chooses = isinstance(numerics, NVFP4Numerics) and numerics.four_over_six is not None
        self.cuts = SharedBlocks.of(grid, self.extents)

    def cast(self, backend: Backend, master: torch.Tensor) -> None:
        """The steps of a cast, every shard's in turn."""
        numerics, grid = self.scheme.numerics, self.scheme.grid
        blocks = grid.num_blocks + (self.scheme.second.grid.num_blocks if self.is_cast else 0)
        slots = 1 if blocks == 1 else blocks + 1
        amaxes = [torch.zeros(slots, dtype=torch.int32) for _ in self.extents]
        words = FourOverSixErrors.words(grid, self.cuts) if self.chooses else 0
        exchanged = [torch.zeros(words, dtype=torch.int32) for _ in self.extents]
        masters = Masters(len(self.extents))
        masters.bind([master[e.start : e.end] if e else None for e in self.extents])
        shards = [self._operand(i, amaxes[i], exchanged[i]) for i in range(len(self.extents))]
        if self.delayed is not None:
            backend.partial_cast(numerics, shards, masters)()
        else:
            backend.partial_amax(shards, masters)()
        reduced = torch.stack(amaxes).amax(dim=0)
        for amax in amaxes:
            amax.copy_(reduced)
        if self.chooses:
            backend.partial_select(numerics, shards, masters)()
            total = torch.stack(exchanged).sum(dim=0, dtype=torch.int32)
            for words_of_one in exchanged:
                words_of_one.copy_(total)
            backend.select(numerics, shards)()
        first = shards[0]
        backend.compute_scale(numerics, [first])()
        if self.delayed is None:
            backend.partial_cast(numerics, shards, masters)()
        self.reduced, self.candidates = reduced, first.candidates

    def values(self, backend: Backend) -> Written:
        """Everything that is stored, and what it decodes to."""
        scheme = self.scheme
        written = {"amaxes": self.reduced, "codes": self.codes, "scale_inv": self.scale_inv}
        if self.amax is not None:
            written["amax"] = self.amax
        if not self.own_codes:
            codes = self.codes.view(scheme.code_shape)
            written["values"] = self._decoded(backend, scheme.layout, codes, self.scale_inv)
            if scheme.second is not None:
                written |= self._second(backend, codes)
        if self.delayed is not None:
            written |= {
                "scale": self.delayed.scale,
                "cast_scale": self.delayed.cast_scale,
                "amax_history": self.delayed.amax_history,
            }
        if self.rounding is not None:
            written["rounding counter"] = self.rounding.counter
        if self.candidates is not None:
            written["choices"] = self.candidates.choices
            if int(self.reduced[-1]) < INFINITY_BITS:  # else nobody reads them
                written["row errors"] = self.candidates.row_errors
                written["elements"] = self.candidates.elements
        return written

    def _second(self, backend: Backend, codes: torch.Tensor) -> Written:
        scheme = self.scheme
        if scheme.source is Source.ROWWISE:
            made = plane(scheme.second, None, self.second_codes, self.second_scales, scheme.source)
            both = operand(scheme.layout, codes=codes, scale_inv=self.scale_inv, second=made)
            backend.transpose(scheme.numerics, [both])()
        own = codes if self.second_codes is None else self.second_codes
        return {
            "columnwise codes": own,
            "columnwise scale_inv": self.second_scales,
            "columnwise values": self._decoded(backend, scheme.second, own, self.second_scales),
        }

    def _decoded(
        self, backend: Backend, layout: ScaleLayout, codes: torch.Tensor, scale_inv: torch.Tensor
    ) -> torch.Tensor:
        values = torch.empty(layout.grid.rows, layout.grid.cols)
        whole = operand(layout, codes=codes, scale_inv=scale_inv, amax=self.amax, values=values)
        backend.dequantize(self.scheme.numerics, [whole])()
        return values

    def _operand(self, i: int, amax: torch.Tensor, exchanged: torch.Tensor) -> TensorOperand:
        scheme, blocks = self.scheme, self.scheme.grid.num_blocks
        second = candidates = None
        if self.is_cast:
            second = plane(scheme.second, amax[blocks:-1], self.second_codes.view(-1),
                           self.second_scales)  # fmt: skip
        elif scheme.source is Source.SHARED:
            second = plane(scheme.second, amax[:blocks], None, self.second_scales, Source.SHARED)
        if self.chooses:
            candidates = FourOverSixErrors.carve(exchanged, scheme.grid, self.cuts)
        return scheme.operand(
            self.codes, self.extents[i], own_codes=self.own_codes, amaxes=amax,
            scale_inv=self.scale_inv, second=second, slot=i, amax=self.amax,
            delayed=self.delayed, candidates=candidates, rounding=self.rounding,
        )  # fmt: skip


def _filled(size: int) -> torch.Tensor:
    """Bytes that differ from their neighbours."""
    return (torch.arange(size) * 37 % 251).to(torch.uint8)
