"""MatrixOwners: assigns whole weights to the ranks that step them, and sends FP32 values there and
back.

Optimizers that look at a whole matrix (Muon, SOAP, Shampoo) cannot step pieces of it. With
``shard="matrix"`` every weight is dealt to one rank, its *owner*, which keeps its whole master and
the optimizer's state of it. Everything else stays as it is: gradients are reduced to equal shards,
and weights are cast and gathered from equal shards of the masters, whatever the owners' loads. So
between them a step moves FP32 values of two kinds: gradients from the shards to their owners, and
updated masters from their owners to the shards. A rank sends 8 / ranks bytes an element for it.

The deal is balanced by what a step costs, the same on every rank, and needs no exchange.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zerocast.optim.shards import ShardedWeights


@dataclass(frozen=True, slots=True)
class _MatrixPiece:
    """Elements of a weight, and their place among what two ranks send each other.

    Attributes:
        weight: the weight's place.
        elements: of the weight, or of this rank's columns.
        sent: in the buffer.
    """

    weight: int
    elements: slice
    sent: slice


class MatrixOwners:
    """The whole masters of what this rank owns.

    Args:
        shards: the weights; their :attr:`~ShardedWeights.whole` becomes :attr:`masters`.

    Attributes:
        owner: the rank that steps each weight, by the weight's place.
        masters: the masters by the weight's place: FP32, in the weight's shape, of those that this
            rank owns.
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
        """All memory of the masters, and of what travels."""
        return [*self.masters.values(), self._columns, self._whole]

    def fetch_masters(self) -> None:
        """Make :attr:`masters` those of the shards. Collective."""
        self._bring(self._shards.masters, self.masters)

    def whole_gradients(
        self, columns: torch.Tensor, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return by place the whole gradients of what this rank owns, None where no rank has one.
        Collective.

        Args:
            columns: FP32 [num_columns], of every rank's shards.
            gradients: the gradients by place; None where no rank has one.
        """
        whole = {i: torch.empty_like(master) for i, master in self.masters.items()}
        self._bring(columns, whole)
        return [None if each is None else whole.get(i) for i, each in enumerate(gradients)]

    def return_masters(self) -> None:
        """Make the masters of the shards those of their owners. Collective."""
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
    """Return the pieces of a buffer, and how many elements of it are each rank's. ``elements`` are
    by rank and weight, the order in which both sides exchange them.
    """
    pieces, counts, end = list[_MatrixPiece](), [0] * size, 0
    for (rank, weight), part in sorted(elements.items(), key=lambda item: item[0]):
        begin, end = end, end + part.stop - part.start
        pieces.append(_MatrixPiece(weight, part, slice(begin, end)))
        counts[rank] += end - begin
    return pieces, counts


def deal(shapes: Sequence[Sequence[int]], size: int) -> list[int]:
    """Return an owner for each weight: the costliest first, to the rank with the least to do."""
    loads = [(0, rank) for rank in range(size)]
    owners = [0] * len(shapes)
    costs = [step_cost(shape) for shape in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[i], rank))
        owners[i] = rank
    return owners


def step_cost(shape: Sequence[int]) -> int:
    """Return what a step of a matrix [M, K] costs, to a factor: M * K * min(M, K), as its
    orthogonalization, its inverse or its eigenvectors do; of any other tensor its elements.
    """
    numel = torch.Size(shape).numel()
    return numel * min(shape) if len(shape) == 2 else numel
