"""Piece: the part of a tensor of a checkpoint that one rank holds, and its position in the whole.

Scales are divided like codes: a rank has the scales of the blocks whose first element it owns. So
the pieces of all ranks cover each element of every tensor once, for any partition that does not
split a byte.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.arguments import present
from zerocast.comm import Communicator, raising_together
from zerocast.errors import InputError, UnsupportedError
from zerocast.export.dialects import Dialect
from zerocast.export.entries import Entry, own_rows, whole
from zerocast.export.exported_weights import Export
from zerocast.export.shard_plan import ShardPlan
from zerocast.export.unusable_values import check_tensor_scale
from zerocast.layout import NOTHING, BlockGrid, Extent, Plane, ceil_div
from zerocast.sharded.placement import is_sharded, to_local
from zerocast.tensors import QuantizedStorage
from zerocast.tensors.owned_shard import owned_blocks


@dataclass(frozen=True)
class Piece:
    """A range of one tensor of a checkpoint.

    Attributes:
        name: the name of the tensor in the checkpoint.
        shape: the shape of the whole tensor.
        start: the index of the first element in the flattened whole; for 4-bit codes, of the byte.
        values: the elements, flat, with the tensor's dtype; empty if this rank has none.
        comm: the ranks whose pieces make up the whole.
    """

    name: str
    shape: torch.Size
    start: int
    values: torch.Tensor
    comm: Communicator


def refuse_parts(export: Export) -> None:
    """Raise :class:`UnsupportedError` on every rank if tensor parallelism splits a weight that is
    sent in codes. Collective.
    """
    with raising_together(export.comm):
        for entry in export.entries:
            if entry.tp_shard is not None:
                raise UnsupportedError(
                    f"{entry.name} is split by tensor parallelism, {entry.tp_shard}, so no rank "
                    "has a range of the whole weight; take whole tensors by named_tensors, or "
                    "deltas, which gather such weights."
                )


def check_cuts(export: Export) -> None:
    """Raise :class:`InputError` on every rank if any rank's shard of 4-bit codes begins or ends
    inside a byte. Collective.
    """
    with raising_together(export.comm):
        for entry in export.entries:
            is_cut = entry.shard is not None and entry.shard.extent and entry.tp_shard is None
            if entry.recipe is None or entry.shard is None or not is_cut:
                continue
            extent, unit = entry.shard.extent, _codes_each(entry)
            if any(at % unit for at in (extent.start, extent.end)):
                raise InputError(
                    f"{entry.name}: shards of a refit begin and end between stored numbers, "
                    f"{unit} codes each, got elements {extent}; cut it at multiples of {unit}, or "
                    f"take whole tensors by named_tensors."
                )


def pieces_of(
    export: Export,
    bucket: Sequence[Entry],
    plan: ShardPlan | None,
    tensors: Mapping[str, torch.Tensor],
) -> Iterator[Piece]:
    """Yield this rank's pieces of the tensors of ``bucket``, some of which ``plan`` has cast.

    A weight that tensor parallelism splits must be whole in ``tensors``; each rank yields an equal
    share of it. Collective only if an unquantized parameter is sharded, but not by rows.
    """
    for entry in bucket:
        dialect = entry.dialect
        if entry.tp_shard is not None:
            for part in dialect.names:
                name = entry.stored_name(part)
                yield _share(name, tensors[name], export.comm)
        elif plan is not None and entry.name in plan.storages:
            yield from _cast_pieces(dialect, entry, plan)
        elif entry.recipe is not None:
            held: Any = entry.tensor
            check_tensor_scale(entry.name, dialect, held.quantized_storage)
            for part, tensor in dialect.encode(held.quantized_storage).items():
                yield _share(entry.stored_name(part), tensor, export.comm)
        elif _is_cut_by_rows(entry.tensor):
            yield from _plain_pieces(entry)
        else:
            for name, tensor in entry.named(whole(entry.tensor, entry.dtype)).items():
                yield _share(name, tensor, export.comm)


def _plain_pieces(entry: Entry) -> Iterator[Piece]:
    """Yield the pieces of an unquantized parameter of which this rank has rows."""
    rows = own_rows(entry.name, entry.tensor)
    values = to_local(entry.tensor).detach().to(entry.dtype).contiguous().view(-1)
    start = 0
    for name, like in entry.named(
        torch.empty(entry.tensor.shape, dtype=entry.dtype, device="meta")
    ).items():
        held = rows.extent.intersect(Extent(start, start + like.numel()))
        first = held.start - rows.extent.start if held else 0
        at = held.start - start if held else 0
        yield Piece(name, like.shape, at, values[first : first + held.size], rows.comm)
        start += like.numel()


def _is_cut_by_rows(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is sharded by rows over one mesh dimension, and by no other."""
    if not is_sharded(tensor):
        return False
    splits = [each for each in tensor.placements if not each.is_replicate()]
    return len(splits) == 1 and splits[0].is_shard(0)


def _cast_pieces(dialect: Dialect, entry: Entry, plan: ShardPlan) -> Iterator[Piece]:
    """Yield the pieces of a weight that was cast from this rank's shard."""
    shard, cast = entry.shard, plan.storages[entry.name]
    assert shard is not None
    (plane,), (own,) = cast.planes, cast.own_codes.values()
    storage: QuantizedStorage = cast
    extent, bits = shard.extent, storage.recipe.numerics.fmt.bits
    whole_codes = torch.empty(
        (*storage.shape[:-1], storage.shape[-1] * bits // 8), dtype=torch.uint8, device="meta"
    )
    yield Piece(
        entry.stored_name(dialect.codes),
        dialect.shaped_codes(dialect.encode_codes(whole_codes)).shape,
        extent.start // _codes_each(entry),
        dialect.encode_codes(own),
        shard.comm,
    )
    own_scales = plan.own_scales(entry.name)
    if own_scales is not None:  # a meta tensor stands for the whole scales, for its shape
        spec = storage.form.buffers[plane.scales_name].allocate(torch.device("meta"))
        buffers = {**storage.buffers, plane.scales_name: spec}
        storage = QuantizedStorage(storage.shape, storage.dtype, storage.recipe, buffers)
    check_tensor_scale(entry.name, dialect, storage)
    for part, tensor in dialect.encode_scales(storage).items():
        its_range = (scale_range if part == dialect.scales else matrix_range)(plane, extent)
        if part == dialect.scales and own_scales is not None:
            values = dialect.encode_scale_values(own_scales)
        else:
            values = tensor.reshape(-1)[its_range.start : its_range.end]
        assert len(values) == its_range.size, (entry.name, part)
        yield Piece(entry.stored_name(part), tensor.shape, its_range.start, values, shard.comm)


def _codes_each(entry: Entry) -> int:
    """Return the number of codes in each stored number of codes."""
    bits = present(entry.recipe).numerics.fmt.bits
    return max(8 * entry.dialect.code_dtype.itemsize // bits, 1)


def scale_range(plane: Plane, extent: Extent) -> Extent:
    """Return the range of scales of ``plane`` whose blocks begin in ``extent``, elements of the
    weight. Scales are counted row by row, without padding; in a stack, matrix by matrix.
    """
    grid, scales = plane.grid, plane.scales
    height = 1 if scales.rows == grid.rows else grid.block_h
    width = 1 if scales.cols == grid.cols else grid.block_w
    blocks = BlockGrid(grid.rows, grid.cols, height, width)
    if not extent:
        return NOTHING
    owned = owned_blocks(blocks, extent)
    return Extent(owned.start, owned.stop)


def matrix_range(plane: Plane, extent: Extent) -> Extent:
    """Return the range of matrices that begin in ``extent``; a weight that is no stack has one."""
    if not extent:
        return NOTHING
    return Extent(*(ceil_div(at, plane.grid.numel) for at in (extent.start, extent.end)))


def _share(name: str, tensor: torch.Tensor, comm: Communicator) -> Piece:
    """Return an equal share of a tensor that is whole on every rank."""
    start, end = (tensor.numel() * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    return Piece(name, tensor.shape, start, tensor.reshape(-1)[start:end], comm)
