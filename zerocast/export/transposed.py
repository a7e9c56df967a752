"""Transposes experts that a model keeps as [in, out] for a checkpoint that has them as [out, in].

The checkpoint's scales are along the other dimension, so codes of the model's matrices cannot be
used: masters are transposed, then cast as usual. A rank transposes whole matrices. FSDP2 gives it
whole ones. Ranks of a ZeroOptimizer exchange missing elements, in the dtype that the cast first
rounds to.
"""

import dataclasses

import torch

from zerocast.arguments import present
from zerocast.errors import InputError
from zerocast.export.entries import Entry, ExportSource, Shard
from zerocast.layout import Extent, chunk
from zerocast.sharded.placement import to_local
from zerocast.tensors import TensorParallelShard
from zerocast.tensors.tp_shard import COLUMNS, ROWS


def is_transposed(source: ExportSource, name: str) -> bool:
    """Return whether a parameter of a module of experts holds matrices as [in, out].

    transformers marks some modules so (``is_transposed``). For others, gate_up_proj has as many
    rows as down_proj has columns. An optimizer or a plan does not know its modules, so this returns
    False for its weights.
    """
    if not isinstance(source, torch.nn.Module):
        return False
    module = source.get_submodule(name.rpartition(".")[0])
    if getattr(module, "is_transposed", False):
        return True
    gate_up, down = (getattr(module, each, None) for each in ("gate_up_proj", "down_proj"))
    are_stacks = all(isinstance(each, torch.Tensor) and each.dim() > 2 for each in (gate_up, down))
    return are_stacks and bool(present(gate_up).shape[-2] == present(down).shape[-1])


def transposed_shape(shape: torch.Size) -> torch.Size:
    """Return the shape of a stack in the checkpoint."""
    *stack, rows, columns = shape
    return torch.Size((*stack, columns, rows))


def transposed(entry: Entry, *, from_masters: bool) -> Entry:
    """Return the entry of a stack [..., in, out] as the checkpoint has it, [..., out, in].

    Raises:
        InputError: if the trained bytes are to be exported, and differ when transposed.
    """
    recipe, shard = present(entry.recipe), entry.shard
    if not from_masters and (shard is None or recipe.block[0] != recipe.block[1]):
        raise InputError(
            f"{entry.name} has matrices [in, out], and the checkpoint needs scales along the other "
            f"dimension than {recipe}; give from_masters=True to cast transposed masters."
        )
    assert shard is not None
    part = entry.tp_shard
    shape = transposed_shape(entry.tensor.shape if part is None else part.shape)
    like = torch.empty((), dtype=entry.dtype, device=to_local(entry.tensor).device)
    own = _matrices(shape, shard.comm.rank, shard.comm.size)
    return dataclasses.replace(
        entry, tensor=like.expand(shape), shard=Shard(None, own, shard.comm), original=shard,
        tp_shard=None if part is None else transposed_part(part),
    )  # fmt: skip


def transposed_part(part: TensorParallelShard) -> TensorParallelShard:
    """Return the part of the stack [..., out, in] that corresponds to ``part`` of [..., in, out].

    Columns become rows of each matrix, and rows of each matrix become columns.
    """
    whole = transposed_shape(part.whole)
    if part.dim == ROWS and not part.per_matrix:
        step = whole[1:-1].numel()
        start, size = (each // part.step * step for each in (part.start, part.size))
        return TensorParallelShard(whole, ROWS, start, size, part.comm)
    dim = ROWS if part.dim == COLUMNS else COLUMNS
    return TensorParallelShard(whole, dim, part.start, part.size, part.comm, dim == ROWS)


def with_masters(entry: Entry) -> Entry:
    """Return ``entry`` with the values of its shard: read from a file if they are stored in one,
    and transposed if it has ``original`` masters. Then it is collective over their ranks.
    """
    if entry.original is None:
        return dataclasses.replace(entry, shard=present(entry.shard).loaded())
    given = entry.original.loaded()
    comm, own, shape = given.comm, present(entry.shard).extent, entry.tensor.shape
    targets = [_matrices(shape, rank, comm.size) for rank in range(comm.size)]
    extents: list[Extent] = comm.all_gather_object(given.extent)
    dtype = present(entry.recipe).round_to(entry.dtype)
    values = entry.tensor.new_empty(0) if given.values is None else given.values.detach()
    values = values.reshape(-1).to(dtype)
    if any(extent != target for extent, target in zip(extents, targets, strict=True) if extent):
        sent = [given.extent.intersect(target).size for target in targets]
        parts = [own.intersect(extent) for extent in extents]
        received = [part.size for part in parts]
        data = values.new_empty(sum(received))
        comm.start_all_to_all(data, values, received, sent)()
        values = torch.empty_like(data)
        for part, each in zip(parts, data.split(received), strict=True):
            values[part.start - own.start : part.start - own.start + part.size] = each
    matrices = values.view(-1, shape[-1], shape[-2]).mT.contiguous()
    return dataclasses.replace(entry, shard=Shard(matrices if own else None, own, comm))


def _matrices(shape: torch.Size, rank: int, size: int) -> Extent:
    """Return the elements of the matrices that ``rank`` casts, in chunks as FSDP2 makes them."""
    own, each = chunk(shape[:-2].numel(), rank, size), shape[-2:].numel()
    return Extent(own.start * each, own.end * each)
