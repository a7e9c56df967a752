"""HeldPlanes: the planes that a weight holds, and the buffers that casts write and gathers send.

A *stack* (see :attr:`Recipe.per_matrix`) is as many matrices, which lie one behind the other in
each of its buffers. Each is cast, transposed and decoded as a separate weight
(:attr:`QuantizedStorage.matrices`); its planes, which all of them have alike, are those of one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerocast.layout import BlockGrid, Plane
from zerocast.recipes import Form, Recipe
from zerocast.tensors.tp_shard import TensorParallelShard


class HeldPlanes:
    """The planes of one quantized weight; the base of :class:`QuantizedStorage`.

    Attributes:
        shape: the weight's nominal one.
        recipe: the scheme that gives the bytes their meaning.
        tp_shard: the rows or columns that this weight is of a larger one; None for a whole weight.
            A cast of it is collective over the tensor-parallel group, too.
    """

    def __init__(
        self,
        shape: torch.Size,
        recipe: Recipe,
        buffers: dict[str, torch.Tensor],
        tp_shard: TensorParallelShard | None,
    ) -> None:
        self.shape, self.recipe, self.tp_shard = shape, recipe, tp_shard
        self._buffers = buffers
        self._form: Form | None = None  # None again where a columnwise copy comes or goes

    @property
    def form(self) -> Form:
        """The recipe's form for a weight of this shape."""
        if self._form is None:
            self._form = Form(self.recipe, self.shape, columnwise=self.has_columnwise)
        return self._form

    @staticmethod
    def share_forms(weights: Iterable[HeldPlanes]) -> None:
        """Let weights that are alike have one form between them: that takes less time and memory
        than one each.
        """
        forms: dict[tuple[int, torch.Size, bool], Form] = {}
        for weight in weights:
            alike = id(weight.recipe), weight.shape, weight.has_columnwise
            if alike not in forms:
                forms[alike] = weight.form
            weight._form = forms[alike]

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The rowwise plane, and the columnwise one of a weight that holds one; of a stack those of
        each matrix.
        """
        return self.form.planes

    @property
    def cast_planes(self) -> tuple[Plane, ...]:
        """The planes whose codes a cast writes, the rowwise one first; they have amaxes."""
        return self.form.cast_planes

    @property
    def grid(self) -> BlockGrid:
        """The blocks of the rowwise codes; of a stack those of each matrix."""
        return self.planes[0].grid

    @property
    def has_rowwise(self) -> bool:
        """Whether rowwise codes and scales are there, as they are unless a quantizer was told
        otherwise.
        """
        return "rowwise_data" in self._buffers and "rowwise_scale_inv" in self._buffers

    @property
    def is_whole(self) -> bool:
        """Whether a cast finds here all that it writes; see :meth:`QuantizedStorage.whole`."""
        return self.has_rowwise and all(name in self._buffers for name in self.form.state)

    @property
    def has_scales(self) -> bool:
        """Whether a cast whose codes go elsewhere finds here all else that it writes."""
        return all(name in self._buffers for name in ("rowwise_scale_inv", *self.form.state))

    @property
    def has_columnwise(self) -> bool:
        """Whether this weight holds a columnwise copy at all."""
        return "columnwise_data" in self._buffers or "columnwise_scale_inv" in self._buffers

    @property
    def codes(self) -> list[torch.Tensor]:
        """The codes that are not derived from others, also while a gather is under way."""
        return [self._buffers[name] for name in self.gathered if name in self._buffers]

    @property
    def gathered(self) -> tuple[str, ...]:
        """The names of the buffers that an all-gather moves."""
        return self.form.gathered

    @property
    def derived_names(self) -> tuple[str, ...]:
        """The names of the buffers that post-all-gather processing rebuilds."""
        if not self.has_rowwise or not self.shape.numel():
            return ()  # there is nothing that they could be derived from
        return self.form.derived

    @property
    def stack(self) -> torch.Size:
        """The leading dimensions of a stack; none of a weight that is one tensor."""
        return self.form.stack

    @property
    def amax_slots(self) -> int:
        """The entries of this weight, or of each matrix of a stack, in an amax buffer: those of its
        rowwise blocks, of the blocks of a columnwise copy with amaxes of its own, and the tensor's
        unless that is one block.
        """
        blocks = sum(plane.grid.num_blocks for plane in self.cast_planes)
        return blocks + (not self.recipe.has_one_block)

    def spans_tp_shards(self, plane: Plane) -> bool:
        """Say whether blocks of ``plane`` reach across the other shards of the whole weight."""
        return self.tp_shard is not None and self.tp_shard.is_spanned_by(plane, self.recipe)

    def shared_amaxes(self) -> list[range]:
        """Return the entries of :attr:`amax_slots`, of each matrix of a stack, that are amaxes over
        other shards of the whole weight, too; none where it is not a tensor-parallel shard.
        """
        if self.tp_shard is None:
            return []
        return self.tp_shard.shared(self.recipe, columnwise=self.has_columnwise)


def read_rowwise_only(names: Iterable[str]) -> set[str]:
    """Select those of a weight's buffers that only its rowwise codes are read with."""
    held = set(names)
    return {
        name for name in ("rowwise_data", "rowwise_scale_inv")
        if name in held and name.replace("rowwise", "columnwise") in held
    }  # fmt: skip
