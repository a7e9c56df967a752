"""Operands made by hand; and all operations of a backend on weights under any numerics, their
elements cut into any shards: what they write, to be compared byte for byte.

The exchanges between ranks are restated on one process: a maximum over the shards' amaxes, a sum
over what 4-over-6 exchanges. One set of codes receives every shard's cast.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from tests.support.values import draw_values
from zerocast.layout import (
    BlockGrid,
    Extent,
    Plane,
    ScaleLayout,
    SharedBlocks,
    Source,
    round_up,
    whole_rows,
)
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
    byte_span,
    packed_columns,
)
from zerocast.recipes import Recipe
from zerocast.tensors.cast_steps import launches_of
from zerocast.tensors.pipeline import CastPipeline

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
        history: the amaxes that delayed scaling remembers at first, newest first.
        place: of a tensor-parallel shard in the whole, for random bits: its origin, and what its
            rows skip.
    """

    numerics: Numerics
    layout: ScaleLayout
    second: ScaleLayout | None = None
    source: Source = Source.MASTER
    round_to: torch.dtype = torch.bfloat16
    history: tuple[float, ...] = (0.0,) * 5
    place: tuple[int, int] = (0, 0)

    @property
    def grid(self) -> BlockGrid:
        """The rowwise blocks."""
        return self.layout.grid

    @property
    def whole(self) -> Extent:
        """All elements."""
        return Extent(0, self.grid.numel)

    @property
    def shares_scale(self) -> bool:
        """Whether transposed codes have no scale but the tensor's one."""
        is_one = self.source is Source.ROWWISE and self.grid.num_blocks == 1
        return is_one and self.numerics.fmt.bits == 8

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

    def amaxes(self) -> list[torch.Tensor]:
        """Zeros: for the blocks of each plane that is cast, and for the tensor unless that is one
        block. Each is an allocation of its own, whose bounds a sanitizer knows.
        """
        sizes = [self.grid.num_blocks]
        if self.second is not None and self.source is Source.MASTER:
            sizes.append(self.second.grid.num_blocks)
        if sizes != [1]:
            sizes.append(1)
        return [torch.zeros(size, dtype=torch.int32) for size in sizes]

    def operand(self, codes: torch.Tensor, extent: Extent, *, own_codes: bool = False,
                amaxes: Sequence[torch.Tensor] = (), **others: Any) -> TensorOperand:  # fmt: skip
        """The rowwise plane, with amaxes of zero; with ``own_codes`` they begin with the extent."""
        amaxes = amaxes or self.amaxes()
        start = extent.start - extent.start % (8 // self.numerics.fmt.bits) if own_codes else 0
        return operand(self.layout, amaxes[0], amaxes[-1], codes, extent=extent,
                       round_to=self.round_to, codes_start=start, **others)  # fmt: skip


def scheme_of(recipe: Recipe, rows: int, cols: int) -> Scheme:
    """A weight under a recipe, with its columnwise plane unless that takes a cast of its own."""
    columnwise = recipe.columnwise_source is not Source.TRANSPOSED_MASTER
    first, *others = recipe.planes((rows, cols), columnwise=columnwise)
    second = others[0] if others else first
    return Scheme(recipe.numerics, first.scales, second.scales if others else None, second.source)


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


class Weight:
    """The buffers of one weight, as if every rank held the same ones, and its shards.

    Args:
        scheme: how it is cast.
        extents: by rank; empty ones are left out, unless all are.
        own_codes: whether the codes of the one extent are in buffers of their own.
        alone: whether each shard of a master is an allocation of its own, instead of lying among
            elements that are not the rank's.
        amax_kind: of :data:`tests.support.values.KINDS`: amaxes that are drawn, in place of those
            of the masters.
    """

    def __init__(self, scheme: Scheme, extents: Sequence[Extent], *, own_codes: bool = False,
                 alone: bool = False, amax_kind: str | None = None) -> None:  # fmt: skip
        self.scheme, self.own_codes, self.alone = scheme, own_codes, alone
        self.extents = [e for e in extents if e] or [*extents]
        numerics, second = scheme.numerics, scheme.second
        self.codes = scheme.codes(self.extents[0] if own_codes else None)
        self.scale_inv = _unwritten(scheme.layout.shape, numerics.scale_dtype)
        self.amax = self.delayed = self.rounding = self.second_codes = self.second_scales = None
        self.is_cast = second is not None and scheme.source is Source.MASTER
        if isinstance(numerics, NVFP4Numerics):
            self.amax = _unwritten((1,))
            if numerics.stochastic_rounding:
                self.rounding = Rounding(torch.tensor([0xDEADBEEF, 2**32 - 1]), *scheme.place)
        if isinstance(numerics, Float8DelayedNumerics):
            history = torch.tensor(scheme.history)
            self.delayed = DelayedState(torch.ones(1), torch.ones(1), history)
        if self.is_cast:
            self.second_codes = self.codes.clone()
        elif second is not None and scheme.source is Source.ROWWISE:
            columns = packed_columns(numerics.fmt, second.grid.cols)
            self.second_codes = _filled(second.grid.rows * columns)
        if second is not None and not scheme.shares_scale:
            self.second_scales = _unwritten(second.shape, numerics.scale_dtype)
        self.chooses = isinstance(numerics, NVFP4Numerics) and numerics.four_over_six is not None
        self.cuts = SharedBlocks.of(scheme.grid, self.extents)
        self.amaxes = [scheme.amaxes() for _ in self.extents]
        self.drawn_amaxes = None
        if amax_kind is not None:
            drawn = [draw_values(amax_kind, len(a), len(a)) for a in self.amaxes[0]]
            self.drawn_amaxes = [values.abs().view(torch.int32) for values in drawn]
            self.drawn_amaxes[-1].fill_(torch.cat(self.drawn_amaxes).max())
        words = FourOverSixErrors.words(scheme.grid, self.cuts) if self.chooses else 0
        self.exchanged = torch.zeros(len(self.extents), words, dtype=torch.int32)

    def masters(self, whole: torch.Tensor) -> list[torch.Tensor | None]:
        """The ranks' shards of a master."""
        shards = [whole[e.start : e.end] if e else None for e in self.extents]
        return [None if s is None else s.clone() for s in shards] if self.alone else shards

    def begin(self, slots: Iterator[int]) -> list[TensorOperand]:
        """The ranks' operands of a cast, with amaxes of zero; their masters are in these slots."""
        for amax in chain(*self.amaxes):
            amax.zero_()
        self.exchanged.zero_()
        self.errors: Written = {}
        self.operands = [self._operand(i, next(slots)) for i in range(len(self.extents))]
        return self.operands

    def reduce_amaxes(self) -> None:
        """Give every rank the maximum of all."""
        reduced = self.drawn_amaxes
        if reduced is None:
            by_plane = zip(*self.amaxes, strict=True)
            reduced = [torch.stack(of_ranks).amax(dim=0) for of_ranks in by_plane]
        for amaxes in self.amaxes:
            for amax, largest in zip(amaxes, reduced, strict=True):
                amax.copy_(largest)

    def exchange_errors(self) -> None:
        """Give every rank the sum of what all wrote under 4-over-6. Keep what each wrote, and how
        many ranks wrote an entry at most.
        """
        for i, shard in enumerate(self.operands):
            self._keep_errors(f"of rank {i}", shard.candidates)
        self.most_writers = int(self.exchanged.view(torch.uint8).ne(0).sum(dim=0).max())
        total = self.exchanged.sum(dim=0, dtype=torch.int32)
        self.exchanged.copy_(total.expand_as(self.exchanged))

    def written(self, backend: Backend) -> Written:
        """Everything that is stored, and what it decodes to."""
        scheme, numerics, second = self.scheme, self.scheme.numerics, self.scheme.second
        stored = {
            "amaxes": torch.cat(self.amaxes[0]), "amax": self.amax,
            "codes": self.codes, "scale_inv": self.scale_inv,
            "columnwise codes": self.second_codes, "columnwise scale_inv": self.second_scales,
        }  # fmt: skip
        if self.delayed is not None:
            stored |= {
                "scale": self.delayed.scale,
                "cast_scale": self.delayed.cast_scale,
                "amax_history": self.delayed.amax_history,
            }
        if self.rounding is not None:
            stored["rounding counter"] = self.rounding.counter
        if self.chooses:
            self._keep_errors("in all", self.operands[0].candidates)
            stored |= self.errors
        if not self.own_codes:
            stored["values"] = self._decoded(backend, scheme.layout, self.codes, self.scale_inv)
        if second is not None and not self.own_codes:
            if scheme.source is Source.ROWWISE:
                made = plane(second, None, self.second_codes, self.second_scales, scheme.source)
                both = operand(scheme.layout, None, None, self.codes, self.scale_inv, second=made)
                backend.transpose(numerics, [both])()
            codes = self.codes if self.second_codes is None else self.second_codes
            scale_inv = self.scale_inv if self.second_scales is None else self.second_scales
            stored["columnwise values"] = self._decoded(backend, second, codes, scale_inv)
        return {name: tensor.clone() for name, tensor in stored.items() if tensor is not None}

    def _keep_errors(self, where: str, candidates: FourOverSixErrors) -> None:
        self.errors[f"choices {where}"] = candidates.choices.clone()
        if int(self.amaxes[0][-1]) < INFINITY_BITS:  # else nobody reads them
            self.errors[f"row errors {where}"] = candidates.row_errors.nan_to_num(-1.0)
            self.errors[f"elements {where}"] = candidates.elements.clone()

    def _decoded(
        self, backend: Backend, layout: ScaleLayout, codes: torch.Tensor, scale_inv: torch.Tensor
    ) -> torch.Tensor:
        numerics, grid = self.scheme.numerics, layout.grid
        grid = replace(grid, cols=round_up(grid.cols, 8 // numerics.fmt.bits))
        values = _unwritten((grid.rows, grid.cols))
        whole = operand(
            replace(layout, grid=grid), codes=codes.view(grid.rows, -1), scale_inv=scale_inv,
            amax=self.amax, values=values,
        )  # fmt: skip
        backend.dequantize(numerics, [whole])()
        return values

    def _operand(self, rank: int, slot: int) -> TensorOperand:
        scheme, amaxes = self.scheme, self.amaxes[rank]
        second = candidates = None
        if self.is_cast:
            second = plane(scheme.second, amaxes[1], self.second_codes, self.second_scales)
        elif scheme.source is Source.SHARED:
            second = plane(scheme.second, amaxes[0], None, self.second_scales, Source.SHARED)
        if self.chooses:
            candidates = FourOverSixErrors.carve(self.exchanged[rank], scheme.grid, self.cuts)
        return scheme.operand(
            self.codes, self.extents[rank], own_codes=self.own_codes, amaxes=amaxes,
            scale_inv=self.scale_inv, second=second, slot=slot, amax=self.amax,
            delayed=self.delayed, candidates=candidates, rounding=self.rounding,
        )  # fmt: skip


def run_operations(backend: Backend, scheme: Scheme, masters: Sequence[torch.Tensor],
                   extents: Sequence[Extent], *, reads_once: bool = False,
                   **options: Any) -> Written:  # fmt: skip
    """Cast each of ``masters`` in turn into one weight, the only one of its launches; what all that
    wrote, by name. The options are those of :class:`Weight`.
    """
    weight = Weight(scheme, extents, **options)
    return run_together(backend, [weight], [[m] for m in masters], reads_once=reads_once)


def run_together(
    backend: Backend,
    weights: Sequence[Weight],
    steps: Sequence[Sequence[torch.Tensor]],
    *,
    reads_once: bool = False,
) -> Written:
    """Cast in one launch an operation into weights of the same numerics; what all that wrote.

    Args:
        steps: of each cast in turn the masters [numel], one a weight, whatever ranks own of them.
        reads_once: whether whole rows of blocks are measured and cast in one pass, or chosen for
            and cast.
    """
    written: Written = {}
    for step, wholes in enumerate(steps):
        _cast(backend, weights, wholes, reads_once)
        for i, weight in enumerate(weights):
            values = weight.written(backend).items()
            written |= {f"{name} of weight {i} after cast {step}": t for name, t in values}
    return written


def _cast(
    backend: Backend, weights: Sequence[Weight], wholes: Sequence[torch.Tensor], reads_once: bool
) -> None:
    """The operations, each of every shard of every weight; slots are in another order."""
    numerics = weights[0].scheme.numerics
    owned = [m for w, whole in zip(weights, wholes, strict=True) for m in w.masters(whole)]
    masters = masters_of(*reversed(owned))
    slots = reversed(range(len(owned)))
    shards = [shard for weight in weights for shard in weight.begin(slots)]
    if reads_once:
        grids = [[each.plane.grid for each in shard.cast_planes] for shard in shards]
        shards = [
            replace(s, whole=whole_rows(g, s.extent)) if backend.reads_once(numerics, g) else s
            for s, g in zip(shards, grids, strict=True)
        ]
    scaled = [weight.operands[0] for weight in weights]
    runs = dict(launches_of(backend, numerics, shards, masters, scaled))
    runs["reduce_amax"] = lambda: [weight.reduce_amaxes() for weight in weights]
    if weights[0].chooses:
        runs["reduce_candidates"] = lambda: [weight.exchange_errors() for weight in weights]
    CastPipeline(**runs).run()


def _filled(size: int) -> torch.Tensor:
    """Bytes that differ from their neighbours, all 256 of them."""
    return (torch.arange(size) * 37 % 257).to(torch.uint8)


def _unwritten(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor every byte of which is wrong."""
    return torch.full((*shape, dtype.itemsize), 0xA5, dtype=torch.uint8).view(dtype).view(shape)
