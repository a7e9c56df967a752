"""Weights of which tensor parallelism leaves each rank some rows or columns, made whole.

Each rank casts its part as it lies in the whole weight (:class:`zerocast.TensorParallelShard`):
its codes and scales are those of the whole's cast. So the parts are gathered in codes and put
together: rows below each other, columns beside each other, of experts those of each matrix, or
whole matrices behind each other.
"""

from collections.abc import Mapping, Sequence

import torch

from zerocast.comm import Communicator
from zerocast.errors import InputError
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
    """Raise :class:`InputError` where ``recipe`` cannot cast this part of a weight by itself."""
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
    whole = {
        name: QuantizedStorage.empty(
            tp_shard.whole, part.dtype, part.recipe, part.device, columnwise=False
        )
        for name, (part, tp_shard) in parts.items()
    }
    # By rank and weight the places, in the whole, of all that it has.
    pieces = [
        [
            piece
            for storage, tp_shard, (start, end) in zip(
                whole.values(), tp_shards, of_rank, strict=True
            )
            for piece in _pieces(storage, tp_shard, start, end)
        ]
        for of_rank in places
    ]
    counts = [sum(piece.nbytes for piece in of_rank) for of_rank in pieces]
    own = [
        piece.contiguous().view(torch.uint8).reshape(-1)
        for (storage, tp_shard) in parts.values()
        for piece in _pieces(storage, tp_shard, 0, tp_shard.size)
    ]
    nothing = torch.empty(0, dtype=torch.uint8, device=next(iter(whole.values())).device)
    gathered = comm.all_gather_parts(torch.cat([nothing, *own]), counts)
    for of_rank, received in zip(pieces, gathered, strict=True):
        for piece, given in zip(
            of_rank, received.split([piece.nbytes for piece in of_rank]), strict=True
        ):
            # A copy, for the start of a piece is aligned to bytes alone.
            piece.copy_(given.clone().view(piece.dtype).view(piece.shape))
    return whole


def _pieces(
    storage: QuantizedStorage, tp_shard: TensorParallelShard, start: int, end: int
) -> Sequence[torch.Tensor]:
    """Return what belongs to lines ``[start, end)`` of a weight that is sharded as ``tp_shard``:
    its codes, bytes, and its scales; and what all parts have alike, the tensor amax, and the scales
    of blocks that reach across parts. Nothing of no lines.
    """
    if start == end:
        return []
    recipe, plane, dim = storage.recipe, storage.planes[0], tp_shard.dim
    codes = storage.buffers[plane.codes_name].view(torch.uint8)
    scales = without_padding(plane, storage.buffers[plane.scales_name])
    names = recipe.buffers(storage.shape, columnwise=False).keys() - set(plane.buffers)
    others = [storage.buffers[name] for name in sorted(names)]
    if tp_shard.has_whole_matrices(recipe):
        first, count = start // tp_shard.step, (end - start) // tp_shard.step
        return [each.narrow(0, first, count) for each in (codes, scales, *others)]
    unit = 1 if dim == ROWS else 8 // recipe.numerics.fmt.bits
    codes = codes if recipe.stack_of(storage.shape) else codes.flatten(end_dim=-2)
    codes = codes.narrow(dim - 2, start // unit, (end - start) // unit)
    if not plane.spans(dim):
        repeats = (plane.scales.row_repeat, plane.scales.col_repeat)[dim]
        block = plane.block[dim] // repeats
        first = start // block
        scales = scales.narrow(dim - 2, first, -(-end // block) - first)
    return [codes, scales, *others]
