"""AllGatherInput: what a rank keeps of a weight between casts, and sends in FSDP2's all-gathers.

FSDP2 gives each of D ranks ceil(M / D) rows of a weight [M, K], the last ones fewer or none, and
gathers equal chunks: a rank with fewer rows fills up. If M does not divide by D it asks that what
is sent present itself in the padded shape [ceil(M / D), K], also if an element is half a byte, and
splits all that was gathered into rows of K bytes. So then a rank's chunk is rounded up until D of
them are whole rows of bytes, which with 4-bit codes may leave some bytes unused between the chunks.

Of a stack [E, ..., M, K] the rows are the E entries of its first dimension.

Scales are sent beside the codes, as many by every rank as by the first one, which has most. If a
block has more rows than a rank, every rank makes all scales of the plane, and none is sent: parts
of equal size would be sent for blocks that few ranks own, for columns that have one scale each
(row-wise FP8) one for each column and rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from zerocast.layout import CutBlocks, Extent, Owners, chunk, round_up
from zerocast.numerics import byte_span
from zerocast.recipes import Form, Recipe
from zerocast.recipes.recipe import Buffers
from zerocast.sharded.state import State
from zerocast.tensors import TensorParallelShard
from zerocast.tensors.owned_shard import OwnedShard, owned_blocks

_ALIGNMENT = 16
"""Bytes: what a kernel stores at once."""


class AllGatherInput:
    """The codes and scales of this rank's rows of one weight, or tensor-parallel shard.

    Args:
        shape: the shape of the weight that a gather gives a rank.
        dtype: the nominal dtype of that.
        recipe: the scheme.
        state: the recipe's.
        world_size: the number of ranks that share the weight.
        rank: this rank's place among them.
        device: where codes and scales are.
        columnwise: whether the gathered weight has a columnwise copy.
        tp_shard: the part of a larger weight that it is; None for all of it.

    Attributes:
        extents: by rank the elements of its rows.
        storage: what this rank casts, in the memory that it sends.
        sent: by gathered plane, uint8: the codes that this rank sends.
        casts: the number of casts.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        recipe: Recipe,
        state: State,
        world_size: int,
        rank: int,
        device: torch.device,
        *,
        columnwise: bool,
        tp_shard: TensorParallelShard | None,
    ) -> None:
        self.casts, row_numel = 0, shape[1:].numel()
        rows = [chunk(shape[0], each, world_size) for each in range(world_size)]
        self.extents = [Extent(each.start * row_numel, each.end * row_numel) for each in rows]
        self._is_even = shape[0] % world_size == 0
        self._padded_shape = torch.Size([rows[0].size, *shape[1:]])
        bounds = [byte_span(recipe.numerics.fmt, each.start, each.end) for each in self.extents]
        self._code_sizes = [last - first for first, last in bounds]
        form = Form(recipe, shape, columnwise=columnwise)
        self.sent = {name: self._room(self._code_sizes[0], device) for name in form.gathered}
        # By plane whose scales are sent, where they begin and their bytes by rank.
        self._scale_parts: dict[str, tuple[int, list[int]]] = {}
        end, itemsize = 0, recipe.numerics.scale_dtype.itemsize
        for plane in form.planes_by_block:
            is_tall = plane.grid.block_h * plane.grid.cols > self.extents[0].size
            spans = tp_shard is not None and tp_shard.is_spanned_by(plane, recipe)
            if world_size > 1 and not spans and (form.stack or not is_tall):
                sizes = [len(owned_blocks(plane.grid, each)) * itemsize for each in self.extents]
                start = round_up(end, _ALIGNMENT)
                self._scale_parts[plane.name] = start, sizes
                end = start + sizes[0]
        self._sent_scales = self._room(end, device)
        memory = {name: self._sent_scales[at:] for name, (at, _) in self._scale_parts.items()}
        self.storage = OwnedShard.allocate(
            shape, dtype, recipe, device, self.extents[rank], columnwise=columnwise,
            tp_shard=tp_shard, state=state, by_owner=self._scale_parts.keys(),
            memory=self.sent | {f"{name}_scale_inv": each for name, each in memory.items()},
        )  # fmt: skip

    def _room(self, size: int, device: torch.device) -> torch.Tensor:
        """Return memory of ``size``, rounded up to what FSDP2 takes as one tensor of a rank."""
        row_numel = self._padded_shape[1:].numel()
        common = math.gcd(row_numel, len(self.extents))
        size = size if self._is_even else round_up(size, row_numel // common)
        return torch.zeros(size, dtype=torch.uint8, device=device)

    @property
    def owners(self) -> list[tuple[int, Extent]]:
        """The ranks that have elements, ascending, and which."""
        return [(rank, extent) for rank, extent in enumerate(self.extents) if extent]

    @property
    def flat(self) -> list[torch.Tensor]:
        """The tensors that this rank sends, each flat: codes plane by plane, and scales, if it
        sends any.
        """
        return [*self.sent.values(), *([self._sent_scales] if self._sent_scales.numel() else [])]

    @property
    def padded(self) -> tuple[torch.Tensor, ...]:
        """The same in the shape in which FSDP2 takes them."""
        if self._is_even:
            return tuple(self.flat)
        return tuple(PaddedCodes(each, self._padded_shape) for each in self.flat)

    @property
    def reduced_amaxes(self) -> int:
        """The number of amaxes of blocks that ranks reduce before a cast: those of blocks that they
        cut, and of planes whose scales every rank makes.
        """
        form, count = self.storage.form, 0
        bounds = [[[each.start, each.end]] for each in self.extents]
        owners = Owners.of_extents(torch.tensor(bounds, dtype=torch.int64, device="cpu"))
        for plane in form.planes_by_block:
            if plane.name not in self._scale_parts:
                count += form.num_matrices * plane.grid.num_blocks
            elif not form.stack:  # whose matrices are whole
                count += CutBlocks([(0, plane.grid)], owners).count
        return count

    # --- after the all-gather ---

    @property
    def _has_gaps(self) -> bool:
        """Whether what is gathered is not the codes as they lie in a weight."""
        return any(codes.numel() > self._code_sizes[0] for codes in self.sent.values())

    def views(self, outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return, by plane, the codes that were gathered as they lie in a weight."""
        if self._has_gaps:
            return {}
        size = sum(self._code_sizes)
        # On one rank FSDP2 hands over the first plane alone.
        return {p: out.view(-1)[:size] for p, out in zip(self.sent, outputs, strict=False)}

    def store_codes(self, outputs: Sequence[torch.Tensor], weight: Buffers) -> None:
        """Copy the planes for which there is no view from what was gathered into ``weight``."""
        for i, (plane, own) in enumerate(self.sent.items()):
            if i < len(outputs) and not self._has_gaps:
                continue
            chunks = (outputs[i] if i < len(outputs) else own).view(len(self.extents), -1)
            places = weight[plane].view(-1).split(self._code_sizes)
            for place, codes, size in zip(places, chunks, self._code_sizes, strict=True):
                place.copy_(codes[:size])

    def whole_scales(self, outputs: Sequence[torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
        """Return, by matrix and plane, the scales of all blocks, from what was gathered."""
        storage = self.storage
        whole = {name: own.entries for name, own in storage.own_scales.items()}
        for name, (start, sizes) in self._scale_parts.items():
            parts = outputs[-1].view(len(self.extents), -1)[:, start : start + sizes[0]]
            if len({*sizes}) > 1:
                pairs = zip(parts, sizes, strict=True)
                parts = torch.cat([part[:size] for part, size in pairs if size])
            whole[name] = parts.reshape(-1).contiguous().view(whole[name].dtype)
        matrices = storage.form.num_matrices
        by_matrix = {name: each.view(matrices, -1) for name, each in whole.items()}
        return {i: {name: each[i] for name, each in by_matrix.items()} for i in range(matrices)}


class PaddedCodes(torch.Tensor):
    """Codes, or scales, that present themselves in the shape of the padded rows; flat they are
    bytes.
    """

    codes: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, codes: torch.Tensor, shape: Sequence[int]) -> PaddedCodes:
        padded = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=torch.uint8, device=codes.device
        )
        padded.codes = codes
        return padded

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert func is torch.ops.aten.view.default, func  # FSDP2 flattens it, and does nothing else
        return args[0].codes.view(-1)
