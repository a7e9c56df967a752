"""Gathers weights of which each rank has some rows or columns under tensor parallelism.

Each rank casts its part at its position in the whole weight
(:class:`zerocast.TensorParallelShard`), so its codes and scales are those of a cast of the whole.
The parts are gathered in codes and concatenated: by rows or by columns, for experts those of each
matrix, or by whole matrices.
"""

from collections.abc import Sequence

import torch

from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.export.dialects import without_padding
from zerocast.layout import round_up
from zerocast.recipes import Recipe
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.placement import is_sharded, to_local, tp_shard_of
from zerocast.tensors import QuantizedStorage, QuantizedTensor, TensorParallelShard
from zerocast.tensors.tp_shard import ROWS, check_tp_shards

_ALIGNMENT = 8
"""The alignment of gathered pieces in bytes, at least the size of their largest element."""


def is_fsdp_sharded(tensor: torch.Tensor) -> bool:
    """Return whether FSDP2 has sharded a parameter. A plain parameter sharded by rows over one mesh
    dimension is taken for one of FSDP2, which makes no difference here.
    """
    if not is_sharded(tensor):
        return False
    splits = [each for each in tensor.placements if not each.is_replicate()]
    gather = gather_of(tensor)
    if gather is not None:
        return gather.is_gathered
    return len(splits) > 1 or (len(splits) == 1 and splits[0].is_shard(0))


def tp_part(name: str, tensor: torch.Tensor) -> TensorParallelShard | None:
    """Return this rank's part of a weight under tensor parallelism; None if that is all of it.

    Raises:
        UnsupportedError: if it is not split by rows or by columns, or is split twice.
    """
    local = to_local(tensor)
    if isinstance(local, QuantizedTensor):
        return local.quantized_storage.tp_shard
    if not is_sharded(tensor) or all(each.is_replicate() for each in tensor.placements):
        return None
    return tp_shard_of(name, tensor, is_fsdp_sharded=is_fsdp_sharded(tensor))


def check_part(name: str, tp_shard: TensorParallelShard, recipe: Recipe) -> None:
    """Raise :class:`InputError` if ``recipe`` cannot cast this part of a weight by itself."""
    try:
        tp_shard.check(recipe, tp_shard.shape, columnwise=False)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def whole_weights(
    parts: dict[str, tuple[QuantizedStorage, TensorParallelShard]],
) -> dict[str, QuantizedStorage]:
    """Return the whole weights by name, without columnwise codes, from this rank's ``parts``.

    Collective over the parts' groups: each exchanges positions, then codes and scales. ``parts``
    are released as they are sent, so it is empty afterwards.
    """
    by_comm: dict[Communicator, list[str]] = {}
    for name, (_, tp_shard) in parts.items():
        by_comm.setdefault(tp_shard.require_comm(), []).append(name)
    whole: dict[str, QuantizedStorage] = {}
    for comm, names in by_comm.items():
        whole |= _gathered(comm, {name: parts.pop(name) for name in names})
    return whole


def _gathered(
    comm: Communicator, parts: dict[str, tuple[QuantizedStorage, TensorParallelShard]]
) -> dict[str, QuantizedStorage]:
    forms = {name: (part.dtype, part.recipe) for name, (part, _) in parts.items()}
    tp_shards = {name: tp_shard for name, (_, tp_shard) in parts.items()}
    device = next(part.device for part, _ in parts.values())
    # For each rank and weight, the rows or columns that the rank has: start and end.
    places = check_tp_shards(comm, list(parts), list(tp_shards.values())).tolist()

    def whole(name: str, on: torch.device) -> QuantizedStorage:
        shape = tp_shards[name].whole
        return QuantizedStorage.empty(shape, *forms[name], on, columnwise=False)

    likes = [(whole(name, torch.device("meta")), each) for name, each in tp_shards.items()]
    sizes = [
        [
            round_up(piece.nbytes, _ALIGNMENT)
            for (like, tp_shard), lines in zip(likes, of_rank, strict=True)
            for piece in _pieces(like, tp_shard, *lines)
        ]
        for of_rank in places
    ]
    counts = [sum(of_rank) for of_rank in sizes]
    gathered = torch.empty(sum(counts), dtype=torch.uint8, device=device)
    rooms = [room.split(own) for room, own in zip(gathered.split(counts), sizes, strict=True)]
    sent = iter(rooms[comm.rank])
    for part, tp_shard in parts.values():
        for piece in _pieces(part, tp_shard, 0, tp_shard.size):
            _as(piece, next(sent)).copy_(piece)
    parts.clear()
    comm.all_gather_(gathered, counts)
    received = [iter(room) for room in rooms]
    found: dict[str, QuantizedStorage] = {}
    for i, (name, tp_shard) in enumerate(tp_shards.items()):
        found[name] = whole(name, device)
        for of_rank, arrived in zip(places, received, strict=True):
            for piece in _pieces(found[name], tp_shard, *of_rank[i]):
                piece.copy_(_as(piece, next(arrived)))
    return found


def _as(piece: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Return a view of the first bytes of ``room`` with the dtype and shape of ``piece``."""
    return room[: piece.nbytes].view(piece.dtype).view(piece.shape)


def _pieces(
    storage: QuantizedStorage, tp_shard: TensorParallelShard, start: int, end: int
) -> Sequence[torch.Tensor]:
    """Return views of the data of lines (rows or columns) ``[start, end)`` of a weight that is
    sharded as ``tp_shard``; nothing if there are no lines.

    These are codes, as bytes, and scales. Also data that all parts have alike: the tensor amax, and
    scales of blocks that span parts.
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
