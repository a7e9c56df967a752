"""Form: the planes and buffers of weights of one recipe and one shape, computed once."""

from __future__ import annotations

from functools import cached_property

import torch

from zerocast.layout import Plane
from zerocast.recipes.recipe import BufferSpec, Recipe


class Form:
    """The storage of weights of one recipe and one shape, with or without a columnwise copy.

    Attributes:
        recipe, shape: the recipe and the shape that were given.
        numerics, state, has_one_block: those of the recipe.
        stack: the leading dimensions of a stack; none of a weight that is one tensor.
        num_matrices: the number of matrices that are quantized separately.
        planes: the planes of a weight, the rowwise one first; of a stack those of each matrix.
        cast_planes: the planes whose codes a cast writes; they have amaxes.
        gathered: the names of the buffers that an all-gather moves.
        derived: the names of the buffers that are made from others after it.
    """

    def __init__(self, recipe: Recipe, shape: torch.Size, *, columnwise: bool) -> None:
        self.recipe, self.shape, self._columnwise = recipe, shape, columnwise
        self.numerics, self.state = recipe.numerics, recipe.state
        self.has_one_block = recipe.has_one_block
        self.stack = recipe.stack_of(shape)
        self.num_matrices = self.stack.numel()
        self.planes = recipe.planes(shape, columnwise=columnwise)
        self.cast_planes = tuple(plane for plane in self.planes if plane.is_cast)
        self.gathered = tuple(plane.codes_name for plane in self.planes if plane.is_gathered)
        self.derived = tuple(name for p in self.planes if p.is_derived for name in p.buffers)

    @property
    def planes_by_block(self) -> tuple[Plane, ...]:
        """The planes whose scales are those of blocks: all that are cast, but of a weight with one
        scale or without elements.
        """
        return () if self.has_one_block or not self.shape.numel() else self.cast_planes

    @cached_property
    def buffers(self) -> dict[str, BufferSpec]:
        """:meth:`Recipe.buffers` of the shape."""
        return self.recipe.buffers(self.shape, columnwise=self._columnwise)

    @cached_property
    def of_matrix(self) -> Form:
        """The form of each matrix of a stack."""
        shape = self.shape[len(self.stack) :]
        return Form(self.recipe, shape, columnwise=self._columnwise)
