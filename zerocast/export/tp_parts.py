"""Weights of which tensor parallelism leaves each rank some rows or columns, made whole.

Each rank casts its part as it lies in the whole weight (:class:`zerocast.TensorParallelShard`):
its codes and scales are those of the whole's cast. So the parts are gathered in codes and put
together: rows below each other, columns beside each other.
"""

from collections.abc import Mapping, Sequence

import torch

from zerocast.comm import Communicator
from zerocast.errors import InputError, UnsupportedError
from zerocast.export.dialects import without_padding
from zerocast.recipes import Recipe
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.placement import is_sharded, to_local, tp_shard_of
from zerocast.tensors import QuantizedStorage, QuantizedTensor, TensorParallelShard
from zerocast.tensors.tp_shard import ROWS, check_tp_shards


def is_fsdp_sharded(tensor: torch.Tensor) -> bool:
    """Say whether FSDP2 has sharded a parameter. Rows of a plain one over one dimension of a mesh
    are taken for FSDP2's, which makes no difference here.
    """
    if not is_sharded(tensor):
        return False
    splits = [each for each in tensor.placements if not each.is_replicate()]
    gather = gather_of(tensor)
    if gather is not None:
        return gather.is_gathered
    return len(splits) > 1 or (len(splits) == 1 and splits[0].is_shard(0))


def tp_part(name: str, tensor: torch.Tensor) -> TensorParallelShard | None:
    """Return what tensor parallelism leaves this rank of a weight; None where that is all of it.

    Raises:
        UnsupportedError: if it is split otherwise than by rows or columns, or twice.
    """
    local = to_local(tensor)
    if isinstance(local, QuantizedTensor):
        return local.quantized_storage.tp_shard
    if not is_sharded(tensor) or all(each.is_replicate() for each in tensor.placements):
        return None
    return tp_shard_of(name, tensor, is_fsdp_sharded=is_fsdp_sharded(tensor))


def check_part(name: str, tp_shard: TensorParallelShard, recipe: Recipe) -> None:
    """Raise :class:`InputError` where ``recipe`` cannot cast this part of a weight by itself, and
    :class:`UnsupportedError` for a stack of matrices.
    """
    if len(tp_shard.whole) > 2:
        raise UnsupportedError(
            f"{name} is split by tensor parallelism, {tp_shard}, and exported is a matrix of which "
            f"ranks have rows or columns; give each rank whole experts by FSDP2."
        )
    try:
        tp_shard.check(recipe, tp_shard.shape, columnwise=False)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def whole_weights(
    parts: Mapping[str, tuple[QuantizedStorage, TensorParallelShard]],
) -> dict[str, QuantizedStorage]:
    """Return, by name, the weights of which these are this rank's parts, without columnwise codes.
    Collective over the parts' groups: one exchange of their places and one of codes and scales.
    """
    by_comm: dict[Communicator, list[str]] = {}
    for name, (_, tp_shard) in parts.items():
        by_comm.setdefault(tp_shard.require_comm(), []).append(name)
    whole: dict[str, QuantizedStorage] = {}
    for comm, names in by_comm.items():
        whole |= _gathered(comm, {name: parts[name] for name in names})
    return {name: whole[name] for name in parts}


def _gathered(
    comm: Communicator, parts: Mapping[str, tuple[QuantizedStorage, TensorParallelShard]]
) -> dict[str, QuantizedStorage]:
    tp_shards = [tp_shard for _, tp_shard in parts.values()]
    places = check_tp_shards(comm, list(parts), tp_shards).tolist()
    whole = {name: _made_whole(*part) for name, part in parts.items()}
    # By rank and weight the places, in the whole, of its codes and of its scales.
    pieces = [
        [
            piece
            for storage, tp_shard, (start, end) in zip(
                whole.values(), tp_shards, of_rank, strict=True
            )
            for piece in _pieces(storage, tp_shard.dim, start, end)
        ]
        for of_rank in places
    ]
    counts = [sum(piece.nbytes for piece in of_rank) for of_rank in pieces]
    own = [
        piece.contiguous().view(torch.uint8).reshape(-1)
        for (storage, tp_shard) in parts.values()
        for piece in _pieces(storage, tp_shard.dim, 0, tp_shard.size)
    ]
    gathered = comm.all_gather_parts(torch.cat(own), counts)
    for of_rank, received in zip(pieces, gathered, strict=True):
        for piece, given in zip(
            of_rank, received.split([piece.nbytes for piece in of_rank]), strict=True
        ):
            # A copy, for the start of a piece is aligned to bytes alone.
            piece.copy_(given.clone().view(piece.dtype).view(piece.shape))
    return whole


def _made_whole(part: QuantizedStorage, tp_shard: TensorParallelShard) -> QuantizedStorage:
    """Return the whole weight, with what all parts have alike: tensor amax, and scales of blocks
    that reach across them.
    """
    whole = QuantizedStorage.empty(
        tp_shard.whole, part.dtype, part.recipe, part.device, columnwise=False
    )
    plane = whole.planes[0]
    for name, buffer in whole.buffers.items():
        if name == plane.scales_name and plane.spans(tp_shard.dim):
            given = without_padding(part.planes[0], part.buffers[name])
            without_padding(plane, buffer).copy_(given)
        elif name not in plane.buffers:
            buffer.copy_(part.buffers[name])
    return whole


def _pieces(storage: QuantizedStorage, dim: int, start: int, end: int) -> Sequence[torch.Tensor]:
    """Return rows or columns ``[start, end)`` of a weight: of its codes, bytes, and of its scales
    where these are theirs alone.
    """
    plane, bits = storage.planes[0], storage.recipe.numerics.fmt.bits
    codes = storage.buffers[plane.codes_name].view(torch.uint8).flatten(end_dim=-2)
    unit = 1 if dim == ROWS else 8 // bits
    pieces = [codes.narrow(dim, start // unit, (end - start) // unit)]
    if not plane.spans(dim):
        scales = without_padding(plane, storage.buffers[plane.scales_name])
        repeats = (plane.scales.row_repeat, plane.scales.col_repeat)[dim]
        block = plane.block[dim] // repeats
        first = start // block
        pieces.append(scales.narrow(dim, first, -(-end // block) - first))
    return pieces
