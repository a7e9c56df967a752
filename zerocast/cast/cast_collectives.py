"""CastCollectives: the collectives of a cast of some weights, and their buffers.

Nothing here reads memory, so weights may be on the meta device, to find out what a cast would send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerocast.cast.amax_buffers import planes_by_owner
from zerocast.cast.exchange import Exchange
from zerocast.cast.gather import code_gathers
from zerocast.cast.matrices import Matrices
from zerocast.cast.scale_gather import scale_gathers
from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import Communicator
from zerocast.layout import Owners
from zerocast.numerics import TensorOperand
from zerocast.tensors.owned_shard import OwnedShard, OwnScales
from zerocast.tensors.weight_operands import tensor_operand


class CastCollectives:
    """What the ranks of some groups reduce before codes are cast, and gather afterwards.

    Args:
        specs: the weights, with what this rank owns of each.
        members: for each group the indices of its weights; every weight is in one group.
        owners: for each group the owners of its members.
        tp_shards: for each tensor-parallel group the indices of the weights whose shards it holds.
        one_by_one_from: weights of at least this many elements are gathered alone; None: no weight.
        boundary: whether ranks reduce only the amaxes of tensors and of cut blocks.

    Attributes:
        matrices: what is cast: the weights, or the matrices of a weight that is a stack.
        members: for each group the indices of its matrices.
        exchange: what is reduced.
        code_gathers: the gathers of codes.
        scale_gathers: the gathers of scales that the owners of blocks make, except those that the
            caller gathers.
        own_scales: by matrix and plane name, the scales that this rank makes for all.
        compact: by the same keys, all of these scales once gathered.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        members: Mapping[Communicator, Sequence[int]],
        owners: Mapping[Communicator, Owners],
        tp_shards: Mapping[Communicator, Sequence[int]],
        one_by_one_from: int | None = None,
        *,
        boundary: bool,
    ) -> None:
        self.matrices = Matrices(specs)
        self.members = self.matrices.places(members)
        matrices, owners_of = self.matrices.specs(), self.matrices.owners(members, owners)
        by_owner = [planes_by_owner(each) if boundary else () for each in matrices]
        self.exchange = Exchange(
            matrices, self.members, owners_of, self.matrices.places(tp_shards), by_owner
        )
        self.code_gathers = code_gathers(specs, members, owners, one_by_one_from)
        self.scale_gathers = scale_gathers(matrices, self.members, owners_of, by_owner)
        self.own_scales: dict[int, Mapping[str, OwnScales]] = {
            i: own for each in self.scale_gathers for i, own in each.own.items() if own
        }
        storages = [each.storage for each in matrices]
        self.own_scales |= {
            i: each.own_scales for i, each in enumerate(storages) if isinstance(each, OwnedShard)
        }
        self.compact = {i: all_ for each in self.scale_gathers for i, all_ in each.compact.items()}

    def operands(
        self, matrices: Sequence[ShardSpec], *, judges_amaxes: bool
    ) -> list[TensorOperand]:
        """Return the operands of the cast, one for each of ``matrices``, with amaxes and choices.

        ``matrices`` are those of :attr:`matrices` with their current memory.
        """
        return [
            tensor_operand(
                matrix.storage,
                i,
                matrix.extent,
                self.exchange.buffers.amaxes[i],
                own_codes=matrix.codes,
                candidates=self.exchange.candidates_of.get(i),
                judges_amaxes=judges_amaxes,
            )
            for i, matrix in enumerate(matrices)
        ]
