"""All operations of a backend on one weight under any numerics, its elements cut into any shards:
what they write, to be compared byte for byte.

The exchanges between ranks are restated on one process: a maximum over the shards' amaxes, a sum
over what 4-over-6 exchanges. One set of codes receives every shard's cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.support.operations import operand, plane
from zerocast.formats import packed_columns
from zerocast.layout import BlockGrid, Extent, ScaleLayout, SharedBlocks, Source
from zerocast.numerics import (
    INFINITY_BITS,
    Backend,
    DelayedState,
    Float8DelayedNumerics,
    FourOverSixErrors,
    Masters,
    Numerics,
    NVFP4Numerics,
    Rounding,
    TensorOperand,
)


@dataclass(frozen=True)
class Scheme:
    """A weight: its numerics, its blocks and stored scales, and those of a second plane.

    Attributes:
        columnwise: how the scales of a second plane are stored; its grid is the plane's. None
            without one.
        one_copy: whether the rowwise codes and amaxes serve the second plane, too.
    """

    numerics: Numerics
    layout: ScaleLayout
    columnwise: ScaleLayout | None = None
    one_copy: bool = False
    round_to: torch.dtype = torch.bfloat16

    @property
    def grid(self) -> BlockGrid:
        """The rowwise blocks."""
        return self.layout.grid


Written = dict[str, torch.Tensor]


def run_scheme(
    backend: Backend, scheme: Scheme, masters: Sequence[torch.Tensor], extents: Sequence[Extent]
) -> Written:
    """Cast each of ``masters``, FP32 [numel], in turn into one weight; what all that wrote, by
    name.
    """
    weight = _Weight(scheme, extents)
    written: Written = {}
    for step, master in enumerate(masters):
        weight.cast(backend, master)
        values = weight.values(backend)
        written |= {f"{name} after cast {step}": t.clone() for name, t in values.items()}
    return written


class _Weight:
    """The buffers of one weight, as if every rank held the same ones."""

    def __init__(self, scheme: Scheme, extents: Sequence[Extent]) -> None:
        self.scheme, self.extents = scheme, [e for e in extents if e]
        numerics, grid = scheme.numerics, scheme.grid
        size = grid.rows * packed_columns(numerics.fmt, grid.cols)
        self.codes = _filled(size)
        self.scale_inv = torch.empty(scheme.layout.shape, dtype=numerics.scale_dtype)
        self.amax = torch.empty(1) if isinstance(numerics, NVFP4Numerics) else None
        self.columnwise_codes = self.columnwise_scale_inv = None
        self.columnwise_grid = None
        if scheme.columnwise is not None:
            shape = scheme.columnwise.shape
            self.columnwise_scale_inv = torch.empty(shape, dtype=numerics.scale_dtype)
            if not scheme.one_copy:
                self.columnwise_codes = _filled(size)
                self.columnwise_grid = scheme.columnwise.grid
        self.delayed = self.rounding = None
        if isinstance(numerics, Float8DelayedNumerics):
            self.delayed = DelayedState(torch.ones(1), torch.ones(1), torch.zeros(5))
        if isinstance(numerics, NVFP4Numerics) and numerics.stochastic_rounding:
            self.rounding = Rounding(torch.tensor([0xDEADBEEF, 2**32 - 1]))
        self.chooses = isinstance(numerics, NVFP4Numerics) and numerics.four_over_six is not None
        self.cuts = SharedBlocks.of(grid, self.extents)

    def cast(self, backend: Backend, master: torch.Tensor) -> None:
        """The steps of a cast, every shard's in turn."""
        numerics = self.scheme.numerics
        blocks = self.scheme.grid.num_blocks
        seconds = self.columnwise_grid.num_blocks if self.columnwise_grid else 0
        amaxes = [torch.zeros(blocks + seconds + 1, dtype=torch.int32) for _ in self.extents]
        words = FourOverSixErrors.words(self.scheme.grid, self.cuts) if self.chooses else 0
        exchanged = [torch.zeros(words, dtype=torch.int32) for _ in self.extents]
        masters = Masters(len(self.extents))
        masters.bind([master[e.start : e.end].clone() for e in self.extents])
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
        scheme, grid = self.scheme, self.scheme.grid
        shape = grid.rows, packed_columns(scheme.numerics.fmt, grid.cols)
        rowwise = torch.empty(grid.rows, grid.cols)
        whole = operand(scheme.layout, codes=self.codes.view(shape), scale_inv=self.scale_inv,
                        amax=self.amax, values=rowwise)  # fmt: skip
        backend.dequantize(scheme.numerics, [whole])()
        written = {
            "amaxes": self.reduced,
            "codes": self.codes,
            "scale_inv": self.scale_inv,
            "values": rowwise,
        }
        if self.amax is not None:
            written["amax"] = self.amax
        if scheme.columnwise is not None:
            columnwise = torch.empty(grid.rows, grid.cols)
            codes = self.codes if self.columnwise_codes is None else self.columnwise_codes
            whole = operand(scheme.columnwise, codes=codes.view(shape),
                            scale_inv=self.columnwise_scale_inv, values=columnwise)  # fmt: skip
            backend.dequantize(scheme.numerics, [whole])()
            written |= {
                "columnwise codes": codes,
                "columnwise scale_inv": self.columnwise_scale_inv,
                "columnwise values": columnwise,
            }
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

    def _operand(self, i: int, amax: torch.Tensor, exchanged: torch.Tensor) -> TensorOperand:
        scheme, blocks = self.scheme, self.scheme.grid.num_blocks
        second = candidates = None
        if scheme.columnwise is not None:
            source = Source.SHARED if scheme.one_copy else Source.MASTER
            second = plane(scheme.columnwise, amax[:blocks] if scheme.one_copy else amax[blocks:-1],
                           self.columnwise_codes, self.columnwise_scale_inv, source)  # fmt: skip
        if self.chooses:
            candidates = FourOverSixErrors.carve(exchanged, scheme.grid, self.cuts)
        return operand(
            scheme.layout, amax[:blocks], amax[-1:], self.codes, self.scale_inv, second=second,
            slot=i, extent=self.extents[i], round_to=scheme.round_to, amax=self.amax,
            delayed=self.delayed, candidates=candidates, rounding=self.rounding,
        )  # fmt: skip


def _filled(size: int) -> torch.Tensor:
    """Bytes that differ from their neighbours."""
    return (torch.arange(size) * 37 % 251).to(torch.uint8)
