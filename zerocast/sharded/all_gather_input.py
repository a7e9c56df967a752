"""AllGatherInput: the codes and scales that a rank keeps between casts and sends to FSDP2.

FSDP2 gives each of D ranks ceil(M / D) rows of a weight [M, K], the last ranks fewer or none. It
gathers equal chunks, so a rank with fewer rows pads. If D does not divide M, FSDP2 requires inputs
of the padded shape [ceil(M / D), K], even if an element is half a byte. It then splits the gathered
bytes into rows of K bytes, so the chunk of a rank is rounded up until D chunks are whole rows of
bytes. With 4-bit codes this may leave unused bytes between the chunks.

In a stack [E, ..., M, K] the rows are the E entries of the first dimension.

Scales are sent beside the codes. Every rank sends as many as the first one, which has the most. If
a block has more rows than a rank, every rank computes all scales of the plane, and none are sent:
the parts, of equal size, would be sent for blocks that few ranks own. For columns with one scale
each (row-wise FP8) that would be one scale per column and rank.
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
"""The size in bytes of one vector store of a kernel."""


class AllGatherInput:
    """The codes and scales of this rank's rows of one weight, or of one tensor-parallel shard.

    Args:
        shape: the shape of the gathered weight.
        dtype: its nominal dtype.
        recipe: the quantization recipe.
        state: the recipe's state.
        world_size: the number of ranks that share the weight.
        rank: this rank's index among them.
        device: the device of codes and scales.
        columnwise: whether the gathered weight has a columnwise copy.
        tp_shard: the part of a larger weight that it is; None if it is whole.

    Attributes:
        extents: the elements of each rank's rows.
        storage: the cast destination, in the memory that is sent.
        sent: the codes that this rank sends, uint8, by gathered plane.
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
        # The byte offset, and the bytes by rank, of each plane whose scales are sent.
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
        """Return ``size`` bytes, rounded up to a size that FSDP2 accepts from one rank."""
        row_numel = self._padded_shape[1:].numel()
        common = math.gcd(row_numel, len(self.extents))
        size = size if self._is_even else round_up(size, row_numel // common)
        return torch.zeros(size, dtype=torch.uint8, device=device)

    @property
    def owners(self) -> list[tuple[int, Extent]]:
        """The ranks that have elements, in ascending order, with their extents."""
        return [(rank, extent) for rank, extent in enumerate(self.extents) if extent]

    @property
    def flat(self) -> list[torch.Tensor]:
        """The flat tensors that this rank sends: codes by plane, then scales if any are sent."""
        return [*self.sent.values(), *([self._sent_scales] if self._sent_scales.numel() else [])]

    @property
    def padded(self) -> tuple[torch.Tensor, ...]:
        """The tensors of :attr:`flat` in the shape that FSDP2 requires."""
        if self._is_even:
            return tuple(self.flat)
        return tuple(PaddedCodes(each, self._padded_shape) for each in self.flat)

    @property
    def reduced_amaxes(self) -> int:
        """The number of block amaxes that ranks reduce before a cast: those of blocks that span
        ranks, and those of planes whose scales every rank computes.
        """
        form, count = self.storage.form, 0
        bounds = [[[each.start, each.end]] for each in self.extents]
        owners = Owners.of_extents(torch.tensor(bounds, dtype=torch.int64, device="cpu"))
        for plane in form.planes_by_block:
            if plane.name not in self._scale_parts:
                count += form.num_matrices * plane.grid.num_blocks
            elif not form.stack:  # ranks hold whole matrices of a stack
                count += CutBlocks([(0, plane.grid)], owners).count
        return count

    # --- after the all-gather ---

    @property
    def _has_gaps(self) -> bool:
        """Whether the gathered chunks have padding, so that they are not contiguous codes."""
        return any(codes.numel() > self._code_sizes[0] for codes in self.sent.values())

    def views(self, outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return views of the gathered codes by plane, where they are contiguous as in a weight."""
        if self._has_gaps:
            return {}
        size = sum(self._code_sizes)
        # On one rank FSDP2 passes the first plane only.
        return {p: out.view(-1)[:size] for p, out in zip(self.sent, outputs, strict=False)}

    def store_codes(self, outputs: Sequence[torch.Tensor], weight: Buffers) -> None:
        """Copy the gathered planes that have no view into ``weight``."""
        for i, (plane, own) in enumerate(self.sent.items()):
            if i < len(outputs) and not self._has_gaps:
                continue
            chunks = (outputs[i] if i < len(outputs) else own).view(len(self.extents), -1)
            places = weight[plane].view(-1).split(self._code_sizes)
            for place, codes, size in zip(places, chunks, self._code_sizes, strict=True):
                place.copy_(codes[:size])

    def whole_scales(self, outputs: Sequence[torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
        """Return the gathered scales of all blocks, by matrix and plane."""
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
    """Codes or scales that have the shape of the padded rows, and flatten to bytes."""

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
