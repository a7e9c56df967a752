"""HeldPlanes: the planes that a weight holds, and the buffers that casts write and gathers send.

A *stack* (see :attr:`Recipe.per_matrix`) is several matrices, stored one after another in each of
its buffers. Each is cast, transposed and decoded as a separate weight
(:attr:`QuantizedStorage.matrices`). A stack's planes are those of one matrix; all have the same.
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
        shape: the weight's nominal shape.
        recipe: the scheme that gives the bytes their meaning.
        tp_shard: the rows or columns of a larger weight that this weight is; None for a whole
            weight. Its casts are collective over the tensor-parallel group, too.
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
        self._form: Form | None = None  # reset when a columnwise copy is added or dropped

    @property
    def form(self) -> Form:
        """The recipe's form for a weight of this shape."""
        if self._form is None:
            self._form = Form(self.recipe, self.shape, columnwise=self.has_columnwise)
        return self._form

    @staticmethod
    def share_forms(weights: Iterable[HeldPlanes]) -> None:
        """Make equal weights share one form, which takes less time and memory than one each."""
        forms: dict[tuple[int, torch.Size, bool], Form] = {}
        for weight in weights:
            alike = id(weight.recipe), weight.shape, weight.has_columnwise
            if alike not in forms:
                forms[alike] = weight.form
            weight._form = forms[alike]

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The rowwise plane, and the columnwise one if there is one; for a stack of each matrix."""
        return self.form.planes

    @property
    def cast_planes(self) -> tuple[Plane, ...]:
        """The planes whose codes a cast writes, the rowwise one first; they have amaxes."""
        return self.form.cast_planes

    @property
    def grid(self) -> BlockGrid:
        """The blocks of the rowwise codes; for a stack of each matrix."""
        return self.planes[0].grid

    @property
    def has_rowwise(self) -> bool:
        """Whether there are rowwise codes and scales; quantizers and ``drop`` may omit them."""
        return "rowwise_data" in self._buffers and "rowwise_scale_inv" in self._buffers

    @property
    def is_whole(self) -> bool:
        """Whether the buffers are all that a cast writes; see :meth:`QuantizedStorage.whole`."""
        return self.has_rowwise and all(name in self._buffers for name in self.form.state)

    @property
    def has_scales(self) -> bool:
        """Whether the buffers are all that a cast writes, except codes."""
        return all(name in self._buffers for name in ("rowwise_scale_inv", *self.form.state))

    @property
    def has_columnwise(self) -> bool:
        """Whether this weight holds a columnwise copy."""
        return "columnwise_data" in self._buffers or "columnwise_scale_inv" in self._buffers

    @property
    def codes(self) -> list[torch.Tensor]:
        """The codes that are not derived from others, even if a gather is in flight."""
        return [self._buffers[name] for name in self.gathered if name in self._buffers]

    @property
    def gathered(self) -> tuple[str, ...]:
        """The names of the buffers that an all-gather moves."""
        return self.form.gathered

    @property
    def derived_names(self) -> tuple[str, ...]:
        """The names of the buffers that post-all-gather processing rebuilds."""
        if not self.has_rowwise or not self.shape.numel():
            return ()  # nothing to derive them from
        return self.form.derived

    @property
    def stack(self) -> torch.Size:
        """The leading dimensions of a stack; empty for a weight that is one tensor."""
        return self.form.stack

    @property
    def amax_slots(self) -> int:
        """The entries of this weight, or of each matrix of a stack, in an amax buffer.

        They are those of its rowwise blocks, of the blocks of a columnwise copy with separate
        amaxes, and the tensor's unless the tensor is one block.
        """
        blocks = sum(plane.grid.num_blocks for plane in self.cast_planes)
        return blocks + (not self.recipe.has_one_block)

    def spans_tp_shards(self, plane: Plane) -> bool:
        """Return whether blocks of ``plane`` span other shards of the whole weight."""
        return self.tp_shard is not None and self.tp_shard.is_spanned_by(plane, self.recipe)

    def shared_amaxes(self) -> list[range]:
        """Return the entries of :attr:`amax_slots` that are amaxes over other shards, too.

        For a stack they are those of each matrix. Empty without a tensor-parallel shard.
        """
        if self.tp_shard is None:
            return []
        return self.tp_shard.shared(self.recipe, columnwise=self.has_columnwise)


def read_rowwise_only(names: Iterable[str]) -> set[str]:
    """Return the names of the buffers that are needed only to read the rowwise codes."""
    held = set(names)
    return {
        name for name in ("rowwise_data", "rowwise_scale_inv")
        if name in held and name.replace("rowwise", "columnwise") in held
    }  # fmt: skip
