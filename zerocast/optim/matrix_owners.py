"""MatrixOwners: assigns whole weights to ranks, and sends FP32 values between owners and shards.

Optimizers that read a whole matrix (Muon, SOAP, Shampoo) cannot step pieces of it. With
``shard="matrix"`` every weight is assigned to one rank, its *owner*, which keeps its whole master
and optimizer state. Everything else is unchanged: gradients are reduced to equal shards, and
weights are cast and gathered from equal shards of the masters, regardless of the owners' loads. So
a step sends gradients from the shards to the owners, and updated masters from the owners to the
shards, both in FP32. A rank sends 8 / ranks bytes an element for it.

The assignment is balanced by the cost of a step. It is computed equally on every rank, without
communication.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zerocast.optim.shards import ShardedWeights


@dataclass(frozen=True, slots=True)
class _MatrixPiece:
    """Elements of a weight, and their position in an exchange buffer.

    Attributes:
        weight: the weight's index.
        elements: the elements in the weight, or in this rank's columns.
        sent: the elements in the buffer.
    """

    weight: int
    elements: slice
    sent: slice


class MatrixOwners:
    """The whole masters of the weights that this rank owns.

    Args:
        shards: the weights; their :attr:`~ShardedWeights.whole` becomes :attr:`masters`.

    Attributes:
        owner: the rank that steps each weight, by weight index.
        masters: the masters of the owned weights, by weight index: FP32, in the weight's shape.
    """

    def __init__(self, shards: ShardedWeights) -> None:
        self._shards = shards
        comm, columns = shards.comm, shards.masters
        self.owner = deal([weight.param.shape for weight in shards.weights], comm.size)
        owned = [i for i, owner in enumerate(self.owner) if owner == comm.rank]
        self.masters = {i: columns.new_zeros(shards.weights[i].param.shape) for i in owned}
        shards.whole = self.masters

        held = {(self.owner[i], i): shards.own[i].columns for i in shards.held}
        self._shard_pieces, self._of_shards = _end_to_end(held, comm.size)
        self._columns = columns.new_empty(sum(self._of_shards))

        whole = {
            (rank, i): slice(part.start, part.end) for i in owned for rank, part in shards.owners(i)
        }
        self._whole_pieces, self._of_owned = _end_to_end(whole, comm.size)
        self._whole = columns.new_empty(sum(self._of_owned))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the masters and of the exchange buffers."""
        return [*self.masters.values(), self._columns, self._whole]

    def fetch_masters(self) -> None:
        """Copy the masters of the shards to :attr:`masters`. Collective."""
        self._bring(self._shards.masters, self.masters)

    def whole_gradients(
        self, columns: torch.Tensor, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the whole gradients of the weights that this rank owns, by weight index; None for
        the others, and where no rank has a gradient. Collective.

        Args:
            columns: FP32 [num_columns], the gradients of this rank's shards.
            gradients: the gradients by weight index; None where no rank has one.
        """
        whole = {i: torch.empty_like(master) for i, master in self.masters.items()}
        self._bring(columns, whole)
        return [None if each is None else whole.get(i) for i, each in enumerate(gradients)]

    def return_masters(self) -> None:
        """Copy the masters of the owners to the shards. Collective."""
        for piece in self._whole_pieces:
            self._whole[piece.sent].copy_(self.masters[piece.weight].view(-1)[piece.elements])
        comm, sent, received = self._shards.comm, self._of_owned, self._of_shards
        comm.start_all_to_all(self._columns, self._whole, received, sent)()
        for piece in self._shard_pieces:
            self._shards.masters[piece.elements].copy_(self._columns[piece.sent])

    def _bring(self, columns: torch.Tensor, whole: Mapping[int, torch.Tensor]) -> None:
        """Fill the owners' ``whole`` tensors from every rank's ``columns``."""
        for piece in self._shard_pieces:
            self._columns[piece.sent].copy_(columns[piece.elements])
        comm, sent, received = self._shards.comm, self._of_shards, self._of_owned
        comm.start_all_to_all(self._whole, self._columns, received, sent)()
        for piece in self._whole_pieces:
            whole[piece.weight].view(-1)[piece.elements].copy_(self._whole[piece.sent])


def _end_to_end(
    elements: Mapping[tuple[int, int], slice], size: int
) -> tuple[list[_MatrixPiece], list[int]]:
    """Return the pieces of a buffer, and the number of its elements for each rank. ``elements`` are
    keyed by rank and weight, which is the order of the exchange on both sides.
    """
    pieces, counts, end = list[_MatrixPiece](), [0] * size, 0
    for (rank, weight), part in sorted(elements.items(), key=lambda item: item[0]):
        begin, end = end, end + part.stop - part.start
        pieces.append(_MatrixPiece(weight, part, slice(begin, end)))
        counts[rank] += end - begin
    return pieces, counts


def deal(shapes: Sequence[Sequence[int]], size: int) -> list[int]:
    """Return an owner for each weight. Assign the costliest first, to the least loaded rank."""
    loads = [(0, rank) for rank in range(size)]
    owners = [0] * len(shapes)
    costs = [step_cost(shape) for shape in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[i], rank))
        owners[i] = rank
    return owners


def step_cost(shape: Sequence[int]) -> int:
    """Return the relative cost of a step: M * K * min(M, K) of a matrix [M, K], as of its
    orthogonalization, inverse or eigenvectors; of any other tensor its number of elements.
    """
    numel = torch.Size(shape).numel()
    return numel * min(shape) if len(shape) == 2 else numel
