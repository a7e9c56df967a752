"""CastCollectives: all that ranks send each other for the cast of some weights, and its buffers.

Nothing here reads memory, so weights may be on the meta device: for whoever asks what a cast would
send.
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
    """What the ranks of some groups reduce before codes are cast, and gather after it.

    Args:
        specs: the weights, with what this rank owns of each.
        members: by group the places of its weights, all weights once.
        owners: by group those of its members.
        tp_shards: by tensor-parallel group the places of the weights whose shards it holds.
        one_by_one_from: weights of so many elements or more are gathered one by one; None for none.
        boundary: whether ranks reduce the amaxes of tensors and of cut blocks alone.

    Attributes:
        matrices: what is cast: the weights, and the matrices of those that are stacks.
        members: by group the places of its matrices.
        exchange: what is reduced.
        code_gathers: of the codes.
        scale_gathers: of the scales that their blocks' owners make, but for those that the caller
            gathers.
        own_scales: by matrix, and by the name of a plane, the scales that this rank makes for all.
        compact: by the same, all of these once gathered.
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
        """Return what the operations of the cast work on: ``matrices``, those of
        :attr:`matrices` as they lie now, with their amaxes and choices.
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
