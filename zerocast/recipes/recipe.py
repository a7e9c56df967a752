"""Recipe: how an amax becomes a scale, and where codes and scales of a weight are stored.

A recipe is a frozen configuration, hashable and comparable, so weights of equal recipes are cast by
the same launches. It composes the operations of :mod:`zerocast.ops` into the steps of a cast and
knows no backend; a backend knows no recipe. A scheme states its law, its grid, its two scale
layouts and its buffers; the base class makes the operands and the steps of them.

The columnwise copy of a weight is one of three things:

    derived        made from the gathered rowwise codes, after the all-gather: a transpose
    independent    quantized from the master over blocks of its own (``columnwise_grid``), gathered
                   beside the rowwise codes and stored as they are, [M, K]
    of the transpose   the rowwise cast of the transposed tensor, stored [K, M]: blocks of one
                   dimension, for activations and gradients, which nobody shards
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from zerocast.errors import InputError
from zerocast.formats import packed_columns
from zerocast.layout import BlockGrid, ScaleLayout, round_up
from zerocast.ops import (
    Backend,
    Candidates,
    CastShard,
    ColumnwiseScales,
    DelayedState,
    DequantizeTarget,
    Launch,
    Law,
    Masters,
    NVFP4Law,
    Rounding,
    ScaleTarget,
    SelectTarget,
    TransposeTarget,
)

Role = Literal["input", "weight", "output", "grad_output", "grad_input"]
"""What a tensor is to a layer's GEMMs: three of the forward, two of the backward."""

NOMINAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a quantized weight can present itself as."""

Buffers = Mapping[str, torch.Tensor]
"""A weight's stored tensors, by the names that :meth:`Recipe.buffers` gives."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One stored tensor of a weight: its shape and dtype, and what an unfilled one holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """A scaling scheme: how weights are quantized, and by :meth:`for_role` every other tensor.

    Attributes:
        round_master: round each FP32 master element to the weight's nominal dtype before the amax
            and the cast, as TransformerEngine and Megatron do; so a cast equals "cast to BF16, then
            quantize". False quantizes straight from FP32.
    """

    round_master: bool = True

    # --- what a scheme states ---

    @property
    @abstractmethod
    def law(self) -> Law:
        """The arithmetic."""

    @abstractmethod
    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise :class:`InputError` where this scheme cannot hold a weight of ``shape``."""

    @abstractmethod
    def grid(self, shape: Sequence[int]) -> BlockGrid:
        """The blocks of a weight of ``shape``, seen as the matrix [product of the leading
        dimensions, last].
        """

    @abstractmethod
    def scale_layout(self, shape: Sequence[int]) -> ScaleLayout:
        """How the rowwise scales are stored."""

    @abstractmethod
    def columnwise_scale_layout(self, shape: Sequence[int]) -> ScaleLayout:
        """How the columnwise scales are stored: over the transposed grid, or where the columnwise
        copy is independent over its own (or over :meth:`grid`, whose scales serve both planes).
        """

    @abstractmethod
    def buffers(self, shape: Sequence[int], *, columnwise: bool) -> dict[str, BufferSpec]:
        """Every tensor that a weight of ``shape`` stores, by name; with or without the columnwise
        copy.

        The names are the attributes of the weight: ``rowwise_data``, ``rowwise_scale_inv``,
        ``columnwise_data``, ``columnwise_scale_inv``, ``amax``, and those of :attr:`state`.
        """

    # --- what a scheme may state ---

    def for_role(self, role: Role) -> Recipe:
        """The recipe that quantizes *its weights* as this one quantizes tensors of ``role``."""
        return self

    def columnwise_grid(self, shape: Sequence[int]) -> BlockGrid | None:
        """The blocks of an independent columnwise copy, over the same matrix; None for the other
        kinds.
        """
        return None

    @property
    def state(self) -> tuple[str, ...]:
        """The buffers that casts remember things in: saved with masters, never gathered."""
        return ()

    @property
    def casts_before_reduction(self) -> bool:
        """Whether the codes do not depend on the amax of what is cast (delayed scaling): then one
        pass casts and takes the amax.
        """
        return False

    @property
    def scales_tensor(self) -> bool:
        """Whether an amax of the whole tensor enters every scale, so that weights can share it."""
        return False

    @property
    def chooses_scales(self) -> bool:
        """Whether blocks choose between two scales (4-over-6), which takes one more exchange."""
        return False

    @property
    def casts_transpose(self) -> bool:
        """Whether the columnwise copy is the rowwise cast of the transposed tensor."""
        return False

    # --- what follows from it ---

    @cached_property
    def has_one_block(self) -> bool:
        """Whether the tensor is one block, whatever its shape: then its amax is the tensor's."""
        return all(reaches_across(self.grid, dim) for dim in (0, 1))

    def transposed_grid(self, shape: Sequence[int]) -> BlockGrid:
        """The blocks of the transposed tensor, where that is cast. Its rows are whole bytes: of
        4-bit codes an odd one ends with a zero more.
        """
        rows, cols = self._matrix(shape)
        return self.grid((cols, round_up(rows, 8 // self.law.fmt.bits)))

    def gathered(self, shape: Sequence[int], *, columnwise: bool) -> tuple[str, ...]:
        """The buffers that an all-gather moves: codes, [M, K]."""
        if columnwise and self.columnwise_grid(shape) is not None:
            return ("rowwise_data", "columnwise_data")
        return ("rowwise_data",)

    def derived(self, shape: Sequence[int], *, columnwise: bool) -> tuple[str, ...]:
        """The buffers that post-all-gather processing rebuilds."""
        if self.casts_transpose or self.columnwise_grid(shape) is not None:
            return ()
        names = ("columnwise_data", "columnwise_scale_inv")
        return tuple(name for name in names if name in self.buffers(shape, columnwise=columnwise))

    def rewind(self, buffers: Buffers) -> None:
        """Put :attr:`state` back so that one more cast of the same masters gives the present codes,
        as a loaded checkpoint needs; that cast then advances it anew.
        """
        delayed, rounding = self.delayed_state(buffers), self.rounding(buffers)
        if delayed is not None:
            delayed.scale.copy_(delayed.cast_scale)
        if rounding is not None:
            rounding.counter[1] -= 1

    def round_to(self, dtype: torch.dtype) -> torch.dtype:
        """What a master element is rounded to first, for a weight of nominal dtype ``dtype``."""
        return dtype if self.round_master else torch.float32

    def scale_target(
        self,
        shape: Sequence[int],
        buffers: Buffers,
        block_amax: torch.Tensor,
        tensor_amax: torch.Tensor,
        columnwise_amax: torch.Tensor | None = None,
        candidates: Candidates | None = None,
    ) -> ScaleTarget:
        """A weight's scales, as the operand of :meth:`compute_scale`.

        ``columnwise_amax``, int32, are the block amaxes of an independent columnwise copy.
        """
        columnwise = None
        name = "columnwise_scale_inv"
        if (
            name in buffers
            and not self.casts_transpose
            and name not in self.derived(shape, columnwise=True)
        ):
            columnwise = ColumnwiseScales(
                self.columnwise_scale_layout(shape),
                block_amax if columnwise_amax is None else columnwise_amax,
                buffers[name],
            )
        return ScaleTarget(
            self.scale_layout(shape),
            block_amax,
            tensor_amax,
            buffers["rowwise_scale_inv"],
            buffers.get("amax"),
            columnwise,
            self.delayed_state(buffers),
            candidates,
            self.rounding(buffers),
        )

    def delayed_state(self, buffers: Buffers) -> DelayedState | None:
        """What a weight remembers under delayed scaling."""
        if "amax_history" not in buffers:
            return None
        return DelayedState(*(buffers[name] for name in ("scale", "cast_scale", "amax_history")))

    def rounding(self, buffers: Buffers) -> Rounding | None:
        """What a weight remembers under stochastic rounding."""
        counter = buffers.get("rounding_counter")
        return None if counter is None else Rounding(counter)

    def transpose_target(self, shape: Sequence[int], buffers: Buffers) -> TransposeTarget:
        """A weight's codes and its columnwise copy, as the operand of
        :meth:`post_all_gather_processing`.
        """
        return TransposeTarget(
            self.law.fmt,
            self.scale_layout(shape),
            buffers["rowwise_data"],
            buffers["rowwise_scale_inv"],
            self.columnwise_scale_layout(shape),
            buffers["columnwise_data"],
            buffers.get("columnwise_scale_inv"),
        )

    def dequantize_target(
        self,
        shape: Sequence[int],
        buffers: Buffers,
        out: torch.Tensor,
        *,
        columnwise: bool = False,
    ) -> DequantizeTarget:
        """A weight's codes, and the FP32 tensor that receives their values: [M, K]; with
        ``columnwise`` the columnwise codes', as they are stored: [M, K] where they are independent
        of the rowwise ones, [K, M] otherwise.
        """
        scale_inv = buffers.get("rowwise_scale_inv")
        if columnwise:
            scale_inv = buffers.get("columnwise_scale_inv", scale_inv)
            layout = self.columnwise_scale_layout(shape)
            codes = buffers["columnwise_data" if "columnwise_data" in buffers else "rowwise_data"]
        else:
            layout, codes = self.scale_layout(shape), buffers["rowwise_data"]
        assert scale_inv is not None
        return DequantizeTarget(layout, codes, scale_inv, buffers.get("amax"), out)

    # --- the steps, in terms of operations ---

    def partial_amax(
        self, backend: Backend, shards: Sequence[CastShard], masters: Masters
    ) -> Launch:
        """Step 1, before the all-reduce."""
        return backend.partial_amax(shards, masters)

    def partial_select(
        self, backend: Backend, shards: Sequence[CastShard], masters: Masters
    ) -> Launch:
        """4-over-6, between steps 1 and 2: this rank's part of the choice between two scales."""
        assert isinstance(self.law, NVFP4Law)
        return backend.partial_select(self.law, shards, masters)

    def select(self, backend: Backend, targets: Sequence[SelectTarget]) -> Launch:
        """4-over-6, after the exchange of candidates; the same on every rank."""
        assert isinstance(self.law, NVFP4Law)
        return backend.select(self.law, targets)

    def compute_scale(self, backend: Backend, targets: Sequence[ScaleTarget]) -> Launch:
        """Step 2, after the all-reduce; the same on every rank."""
        return backend.compute_scale(self.law, targets)

    def partial_cast(
        self, backend: Backend, shards: Sequence[CastShard], masters: Masters
    ) -> Launch:
        """Step 3, this rank's codes."""
        return backend.partial_cast(self.law, shards, masters)

    def post_all_gather_processing(
        self, backend: Backend, targets: Sequence[TransposeTarget]
    ) -> Launch:
        """Step 4, after the all-gather: the derived columnwise copies."""
        return backend.transpose(targets)

    # --- helpers for the schemes ---

    def _matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """[product of the leading dimensions, last dimension]."""
        return math.prod(shape[:-1]), shape[-1]

    def _code_buffers(self, shape: Sequence[int], *, columnwise: bool) -> dict[str, BufferSpec]:
        """The rowwise codes in the weight's own shape, and the columnwise ones as the transposed
        matrix.
        """
        rows, cols = self._matrix(shape)
        fmt = self.law.fmt
        specs = {"rowwise_data": BufferSpec((*shape[:-1], packed_columns(fmt, cols)), torch.uint8)}
        if columnwise:
            specs["columnwise_data"] = BufferSpec((cols, packed_columns(fmt, rows)), torch.uint8)
        return specs


def reaches_across(grid_of: Callable[[Sequence[int]], BlockGrid], dim: int) -> bool:
    """Whether the blocks that a scheme's ``grid_of`` a shape gives reach across the matrix, from
    its first to its last row (``dim`` 0) or column (1), however many there are.
    """
    small, large = grid_of((1, 1)), grid_of((2, 2))
    return small.block_w != large.block_w if dim else small.block_h != large.block_h


def describe_recipe(recipe: Recipe) -> str:
    """The recipe as a text that is the same on every rank: without addresses of functions, which
    are a process's own.
    """
    return re.sub(r" at 0x[0-9a-f]+", "", str(recipe))


def require_elements(name: str, shape: Sequence[int], dims: str) -> None:
    """Raise :class:`InputError` for a weight without elements; ``dims`` says what ``name``
    accepts.
    """
    if not shape or min(shape) < 1:
        raise InputError(
            f"{name} needs a weight of {dims} with at least one element, got shape {tuple(shape)}."
        )
