"""TensorParallelShard: the rows or columns of a weight that one tensor-parallel rank holds.

A tensor-parallel rank has its shard as a separate weight, with a separate layout of codes and
scales. Its scales differ from those of an independent weight: an amax over elements of several
shards is taken over all of them. So a shard has exactly the bytes that it would have in the cast of
the whole weight.

NOT here: the reduction of those amaxes (:mod:`zerocast.tensors.quantize` for one weight,
:mod:`zerocast.cast` for a plan).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.arguments import check_flag, check_integer, check_shape, shown
from zerocast.comm import Communicator
from zerocast.comm.agreement import check_same
from zerocast.errors import InputError, RankMismatchError, ZerocastError
from zerocast.layout import Extent, Owners, Plane, check_partition, chunk
from zerocast.recipes import Recipe

ROWS, COLUMNS = 0, 1
LINES = ("rows", "columns")
"""The names of the dimensions, by :attr:`TensorParallelShard.dim`."""


@dataclass(frozen=True)
class TensorParallelShard:
    """Rows or columns ``[start, start + size)`` of a weight of shape ``whole``.

    The other ranks of ``comm`` hold the others. A weight is the matrix [M, K], where M is the
    product of the leading dimensions and K is the last one. The shards of a group divide one
    dimension and cover the whole once; a shard may be empty. A weight [..., M, K] may be quantized
    matrix by matrix (experts). Then a shard has columns of each matrix, rows of each, or whole
    matrices (entries of the first dimension).

    Attributes:
        whole: the shape of the whole weight.
        dim: 0 if rows are sharded, 1 if columns are.
        start, size: in rows, or columns, of the matrix.
        comm: the tensor-parallel group. None in a shard that was unpickled, because a group cannot
            be saved; a cast then requires one.
        per_matrix: whether the rows are those of each matrix [M, K] of a weight [..., M, K], and
            not entries of its first dimension.

    Raises:
        InputError: for a range outside of the whole, or rows that are not whole entries of the
            first dimension.
    """

    whole: torch.Size
    dim: int
    start: int
    size: int
    comm: Communicator | None
    per_matrix: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", check_shape("whole", self.whole))
        if not isinstance(self.dim, int) or self.dim not in (ROWS, COLUMNS):
            raise InputError(
                f"dim must be 0 (rows are sharded) or 1 (columns are), of the weight as a matrix "
                f"[M, K], got {shown(self.dim)}."
            )
        for name in ("start", "size"):
            check_integer(name, getattr(self, name), 0, 2**63 - 1)
        if not isinstance(self.comm, Communicator | None):
            raise InputError(
                f"comm must be a zerocast communicator, which zerocast.as_communicator makes of a "
                f"group, or None, got {shown(self.comm)}."
            )
        check_flag("per_matrix", self.per_matrix)
        if self.per_matrix and (self.dim != ROWS or len(self.whole) < 3):
            raise InputError(
                "per_matrix needs rows of each matrix of a weight of three dimensions or more, got "
                f"{LINES[self.dim]} of shape {tuple(self.whole)}."
            )
        if self.dim == ROWS and len(self.whole) < 2:
            raise InputError(
                f"rows are sharded of a weight of two dimensions or more, got shape "
                f"{tuple(self.whole)}, one row; shard its columns, dim=1."
            )
        if not 0 <= self.start <= self.start + self.size <= self.lines:
            raise InputError(
                f"a shard must lie inside its whole, {self.lines} {LINES[self.dim]} of shape "
                f"{tuple(self.whole)}, got start {self.start} and size {self.size}."
            )
        if self.start % self.step or self.size % self.step:
            raise InputError(
                f"a shard of shape {tuple(self.whole)} must be whole entries of its first "
                f"dimension, {self.step} rows each, got {self}."
            )

    @classmethod
    def chunk(cls, whole: Sequence[int], dim: int, comm: Communicator) -> TensorParallelShard:
        """Return the shard of ``comm``'s rank, as ``torch.chunk`` and DTensor's ``Shard(dim)`` do.

        Each has ceil(n / size) entries; later ranks have fewer or none.

        Args:
            whole: the shape of the whole weight.
            dim: the dimension of the tensor, the first or one of the last two; may count from the
                end.

        Raises:
            InputError: for another dimension, whose shards are neither rows nor columns.
        """
        dims = len(whole)
        at = dim + dims if dim < 0 else dim
        if at not in (0, dims - 2, dims - 1):
            raise InputError(
                f"a weight can be sharded in its first dimension or in one of its last two, got "
                f"dimension {dim} of shape {tuple(whole)}; reshape it first."
            )
        # The only dimension of a vector is its last one: the columns of a matrix of one row.
        columns, per_matrix = at == dims - 1, 0 < at == dims - 2
        step = 1 if columns or per_matrix else math.prod(whole[1:-1])
        own = chunk(whole[at], comm.rank, comm.size)
        place = COLUMNS if columns else ROWS
        return cls(torch.Size(whole), place, own.start * step, own.size * step, comm, per_matrix)

    @property
    def shape(self) -> torch.Size:
        """The shape of this shard."""
        if self.dim == COLUMNS:
            return torch.Size((*self.whole[:-1], self.size))
        if self.per_matrix:
            return torch.Size((*self.whole[:-2], self.size, self.whole[-1]))
        return torch.Size((self.size // self.step, *self.whole[1:]))

    @property
    def lines(self) -> int:
        """The number of rows, or columns, of the whole."""
        return self.matrix[self.dim]

    @property
    def matrix(self) -> tuple[int, int]:
        """The numbers of rows and columns of the whole, or of each of its matrices."""
        rows = self.whole[-2] if self.per_matrix else math.prod(self.whole[:-1])
        return rows, self.whole[-1]

    @property
    def step(self) -> int:
        """The number of rows of one entry of the sharded dimension."""
        return 1 if self.dim == COLUMNS or self.per_matrix else math.prod(self.whole[1:-1])

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this shard of ``tensor``, which has the whole's shape, as a view."""
        at = -1 if self.dim == COLUMNS else -2 if self.per_matrix else 0
        return tensor.narrow(at, self.start // self.step, self.size // self.step)

    def has_whole_matrices(self, recipe: Recipe) -> bool:
        """Return whether the shard is matrices of a weight that is quantized matrix by matrix.

        Ranks then share no amax.
        """
        is_stack = len(recipe.stack_of(self.whole)) > 0
        return is_stack and self.dim == ROWS and not self.per_matrix

    def first_matrix(self, recipe: Recipe) -> int:
        """Return the index in the whole of the first matrix that the shard is a part of."""
        return self.start // max(self.whole[-2], 1) if self.has_whole_matrices(recipe) else 0

    def of_matrix(self, recipe: Recipe) -> TensorParallelShard | None:
        """Return the part that the shard has of each matrix; None if it has whole matrices.

        ``recipe`` quantizes the weight matrix by matrix.
        """
        if self.has_whole_matrices(recipe):
            return None
        return TensorParallelShard(self.whole[-2:], self.dim, self.start, self.size, self.comm)

    def is_spanned_by(self, plane: Plane, recipe: Recipe) -> bool:
        """Return whether blocks of ``plane``, of a weight under ``recipe``, span other shards."""
        return plane.spans(self.dim) and not self.has_whole_matrices(recipe)

    def require_comm(self) -> Communicator:
        """Return the tensor-parallel group.

        Raises:
            InputError: if the shard was unpickled.
        """
        if self.comm is None:
            raise InputError(
                f"{self} was loaded, and a group cannot be saved; give it one before the weight is "
                "cast: weight.quantized_storage.tp_shard = dataclasses.replace(tp_shard, comm=...)."
            )
        return self.comm

    def check(self, recipe: Recipe, shape: Sequence[int], *, columnwise: bool = True) -> None:
        """Raise :class:`InputError` if a tensor of ``shape`` cannot be this shard under ``recipe``.

        That is if it has another shape, ``recipe`` cannot hold the whole, or this shard begins or
        ends inside a block. The last shard may end where the whole does, and an empty one may be
        anywhere. A shard may begin anywhere if it has whole matrices, or if blocks span the whole
        weight (FP8 with one scale, or with one per row): their amaxes are shared.
        """
        recipe.check_shape(self.whole)
        if tuple(shape) != tuple(self.shape):
            raise InputError(f"{self} have shape {tuple(self.shape)}, got {tuple(shape)}.")
        end = self.start + self.size
        if self.has_whole_matrices(recipe):
            return
        for plane in _cast_planes(recipe, self.whole, columnwise=columnwise):
            if plane.spans(self.dim) or not self.size:
                continue
            block = plane.block[plane.grid_dim(self.dim)]
            if self.start % block or (end % block and end != self.lines):
                raise InputError(
                    f"a shard of a weight under {type(recipe).__name__} must begin and end between "
                    f"blocks, at multiples of {block} {LINES[self.dim]}, got {self}; choose "
                    f"another number of ranks, or leave the weight whole or in high precision."
                )

    def shared(self, recipe: Recipe, *, columnwise: bool) -> list[range]:
        """Return which entries of the amaxes of the shard, or of each matrix, span other shards.

        They are entries of :attr:`QuantizedStorage.amax_slots`: of blocks that span shards, and the
        tensor's if scales depend on it. They are the same amaxes on all ranks, but their places in
        the buffer may differ.
        """
        ranges, at = list[range](), 0
        if self.has_whole_matrices(recipe):
            return ranges
        for plane in _cast_planes(recipe, self.shape, columnwise=columnwise):
            blocks = plane.grid.num_blocks
            if plane.spans(self.dim):
                ranges.append(range(at, at + blocks))
            at += blocks
        if recipe.scales_tensor and not recipe.has_one_block:
            ranges.append(range(at, at + 1))
        return ranges

    def check_group(self, line: str, error: ZerocastError | None) -> None:
        """Raise on every rank of the group what is wrong on any. Collective.

        That is an ``error``, a ``line`` that differs, or shards that do not cover the whole once.

        Args:
            line: a text of what ranks must have in common besides the whole and the dimension;
                ignored with an ``error``.
        """
        comm = self.require_comm()
        line = f"{tuple(self.whole)} sharded by {self.kind}, {line}"
        check_same(comm, [line], "every rank must cast its shard of the same weight alike", error)
        check_tp_shards(comm, ["the weight"], [self])

    @property
    def kind(self) -> str:
        """What is sharded, as text."""
        return LINES[self.dim] + (" of each matrix" if self.per_matrix else "")

    def __str__(self) -> str:
        each = "each matrix of " if self.per_matrix else ""
        lines = f"{LINES[self.dim]} [{self.start}, {self.start + self.size})"
        return f"{lines} of {each}{tuple(self.whole)}"

    def __reduce__(self) -> tuple[object, ...]:
        """Return the range without the group, which cannot be pickled."""
        place = self.whole, self.dim, self.start, self.size
        return TensorParallelShard, (*place, None, self.per_matrix)

    def __deepcopy__(self, memo: object) -> TensorParallelShard:
        return self


def _cast_planes(recipe: Recipe, shape: Sequence[int], *, columnwise: bool) -> list[Plane]:
    """Return the planes that have separate amaxes, in the order of the amax buffer."""
    return [plane for plane in recipe.planes(shape, columnwise=columnwise) if plane.is_cast]


def check_held_shape(
    recipe: Recipe, shape: Sequence[int], tp_shard: TensorParallelShard | None, *, columnwise: bool
) -> None:
    """Raise :class:`InputError` if ``recipe`` cannot hold a weight of ``shape``.

    Also raise it if the weight does not match its ``tp_shard``.
    """
    if tp_shard is None:
        recipe.check_shape(shape)
    else:
        tp_shard.check(recipe, shape, columnwise=columnwise)


def check_tp_shards(
    comm: Communicator, names: Sequence[str], tp_shards: Sequence[TensorParallelShard]
) -> torch.Tensor:
    """Raise :class:`RankMismatchError` on every rank unless shards cover each weight once.

    Collective over ``comm``. All ranks have already compared everything else.

    Args:
        names: the names of the weights in messages.
        tp_shards: this rank's shards, one per weight.

    Returns:
        int64 [size, len(tp_shards), 2] on the CPU: where each rank's shards start and end.
    """
    places = torch.zeros(comm.size, len(tp_shards), 2, dtype=torch.int64, device="cpu")
    mine = [[tp_shard.start, tp_shard.start + tp_shard.size] for tp_shard in tp_shards]
    places[comm.rank] = torch.tensor(mine, dtype=torch.int64, device="cpu").view(len(tp_shards), 2)
    comm.all_gather_(places.view(-1))
    i = Owners.of_extents(places).first_wrong([tp_shard.lines for tp_shard in tp_shards])
    if i is not None:
        tp_shard, extents = tp_shards[i], [Extent(*pair) for pair in places[:, i].tolist()]
        problem = check_partition(tp_shard.lines, extents, LINES[tp_shard.dim])
        raise RankMismatchError(
            f"the shards of {names[i]} must cover each of the {tp_shard.lines} "
            f"{LINES[tp_shard.dim]} of {tuple(tp_shard.whole)} exactly once: {problem}."
        )
    return places
