"""Makes quantized weights, and casts single ones without a plan.

The unsharded cast runs the same steps of a recipe as a plan, with the whole weight as one shard and
no reduction between ranks. It defines the result that a sharded cast must equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from zerocast.arguments import (
    check_device,
    check_flag,
    check_memory,
    check_tensor,
    check_text,
    present,
    shown,
)
from zerocast.backends import backend_for
from zerocast.comm import Attempt
from zerocast.errors import InputError
from zerocast.layout import BlockGrid, Extent, SharedBlocks, Source
from zerocast.numerics import FourOverSixErrors, Masters, TensorOperand
from zerocast.recipes import (
    NOMINAL_DTYPES,
    BufferSpec,
    Recipe,
    as_recipe,
    check_nominal,
    describe_recipe,
)
from zerocast.tensors.cast_steps import CastSteps
from zerocast.tensors.quantized_tensor import QuantizedTensor
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.tp_shard import TensorParallelShard, check_held_shape
from zerocast.tensors.weight_operands import Amaxes, tensor_operand, transposed_operand


def quantize(
    tensor: torch.Tensor,
    recipe: Recipe | str,
    *,
    dtype: torch.dtype | None = None,
    columnwise: bool = True,
    name: str | None = None,
    tp_shard: TensorParallelShard | None = None,
) -> QuantizedTensor:
    """Return the cast of a whole tensor, which every sharded cast must equal, byte for byte.

    Args:
        tensor: FP32, BF16 or FP16, of a shape that the recipe can hold; any strides. No gradient
            flows through.
        recipe: the scheme, or its name. To cast a layer's tensors use its quantizers,
            ``quantizer(tensor)``, which hold the state of schemes that have one.
        dtype: the nominal dtype of the result, to which elements are rounded first; by default the
            tensor's dtype.
        columnwise: whether the weight holds the columnwise copy.
        name: the weight's name, on which the random bits of stochastic rounding depend. Without
            names, all weights draw the same bits.
        tp_shard: the rows or columns of a larger weight that ``tensor`` is, if it is a
            tensor-parallel shard. The call is then collective over the ranks that hold the others,
            and gives the bytes that this shard has in the cast of the whole.

    Returns:
        A weight with new memory on the tensor's device. A NaN or an infinity makes all values under
        its scale NaN.

    Raises:
        InputError: for another dtype, or a shape that the recipe cannot hold; for a tensor-parallel
            shard on every rank.
        RankMismatchError: on every rank, if the ranks' shards do not make up one weight.
    """
    weight: QuantizedTensor | None = None
    attempt = Attempt()
    with attempt:
        check_nominal("tensor", check_tensor("tensor", tensor).dtype)
        check_memory("tensor", tensor)
        if hasattr(recipe, "quantize"):
            raise InputError(
                f"recipe must be a zerocast recipe or the name of one, got a "
                f"{type(recipe).__name__}; call quantizer(tensor) to cast with a quantizer."
            )
        weight = empty(
            tensor.shape,
            recipe,
            dtype=tensor.dtype if dtype is None else dtype,
            device=tensor.device,
            columnwise=columnwise,
            name=name,
            tp_shard=tp_shard,
        )
    if isinstance(tp_shard, TensorParallelShard):  # all ranks that hold shards of it raise
        line = ""
        if weight is not None:
            names = ", ".join(weight.quantized_storage.buffers)
            line = f"{describe_recipe(weight.recipe)} {weight.dtype} with {names}"
        tp_shard.check_group(line, attempt.error)
    elif attempt.error is not None:
        raise attempt.error
    assert weight is not None
    quantize_into(weight.quantized_storage, tensor)
    return weight


def empty(
    shape: Sequence[int],
    recipe: Recipe | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    columnwise: bool = True,
    name: str | None = None,
    tp_shard: TensorParallelShard | None = None,
) -> QuantizedTensor:
    """Return an unfilled quantized weight: every code and every scale is 0, so it decodes to zeros.

    Args:
        shape: the nominal shape.
        recipe: the scheme, or its name.
        dtype: the nominal dtype: FP32, BF16 or FP16.
        device: the device of the bytes; torch's default device by default.
        columnwise: whether the weight holds the columnwise copy.
        name: as for :func:`quantize`.
        tp_shard: the rows or columns of a larger weight that it is, of ``tp_shard.shape``. Every
            cast of it is then collective over the ranks that hold the others; this call is not.

    Raises:
        InputError: for a wrong argument, a shape that the recipe cannot hold, or a shard that
            begins or ends inside a block.
    """
    recipe = as_recipe(recipe)
    check_flag("columnwise", columnwise)
    if name is not None:
        check_text("name", name)
    if not isinstance(dtype, torch.dtype) or dtype not in NOMINAL_DTYPES:
        raise InputError(
            f"the nominal dtype of a quantized weight must be torch.float32, torch.bfloat16 or "
            f"torch.float16, got {shown(dtype)}."
        )
    if not isinstance(tp_shard, TensorParallelShard | None):
        raise InputError(
            f"tp_shard must be a zerocast.TensorParallelShard or None, got {shown(tp_shard)}."
        )
    check_held_shape(recipe, shape, tp_shard, columnwise=columnwise)
    device = check_device("device", device)
    storage = QuantizedStorage.empty(
        shape, dtype, recipe, device, columnwise=columnwise, tp_shard=tp_shard
    )
    if name is not None:
        storage.name_weight(name)
    return QuantizedTensor(storage)


def quantize_into(
    storage: QuantizedStorage,
    source: torch.Tensor,
    *,
    advances: bool = True,
    least: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cast ``source`` into an existing weight: codes, scales, amax and derived copies.

    Collective if the weight is a tensor-parallel shard: all ranks of its group cast theirs.

    Args:
        storage: the weight's bytes; written in place, so buffers do not move.
        source: of the weight's shape; any strides, real dtype and device. FP32, BF16 and FP16 are
            cast as they are; other dtypes are converted to FP32 first.
        advances: whether the state of delayed scaling advances; False if it waits for a reduction
            over ranks.
        least: lower bounds of the weight's amaxes, int32 in the shape of the result.

    Returns:
        int32 [storage.amax_slots]: the amaxes of what was cast, the tensor's last; for a stack
        this many for each matrix, one matrix after the other.

    Raises:
        InputError: if the storage lacks the recipe state.
    """
    assert source.shape == storage.shape, (source.shape, storage.shape)
    if not storage.is_whole:
        amax = quantize_into(storage.whole({}), source)
        storage.mark_written()
        return amax
    matrices, slots = storage.matrices, storage.amax_slots
    amax = BufferSpec((len(matrices) * slots,), torch.int32).allocate(storage.device)
    if storage.device.type == "meta":
        storage.mark_written()
        return amax
    master = plain_master(source, storage.device).view(
        len(matrices), *storage.shape[len(storage.stack) :]
    )
    sources: list[torch.Tensor] = []
    operands: list[tuple[QuantizedStorage, TensorOperand]] = []
    for matrix, values, own in zip(matrices, master, amax.view(len(matrices), slots), strict=True):
        extent, candidates = Extent(0, values.numel()), _candidates(matrix, matrix.grid)
        amaxes = Amaxes.whole(matrix, own)
        operand = tensor_operand(
            matrix, len(sources), extent, amaxes, candidates=candidates, advances=advances
        )
        operands.append((matrix, operand))
        sources.append(values)
        for plane in matrix.planes:
            if plane.source is Source.TRANSPOSED_MASTER:
                operand = transposed_operand(matrix, plane, len(sources), own)
                operand = replace(operand, candidates=_candidates(matrix, operand.grid))
                operands.append((matrix, operand))
                sources.append(_transposed(values, operand.grid))
    masters = Masters(len(sources))
    masters.bind(sources)
    steps = CastSteps(backend_for(storage.device), operands, masters)

    def reduce_amax() -> None:
        if least is not None:
            torch.maximum(amax, least, out=amax)
        reduce_shared(storage, amax)

    steps.pipeline(reduce_amax=reduce_amax).run()
    for matrix, operand in operands:
        plane = operand.planes[0].plane
        if plane.source is Source.TRANSPOSED_MASTER and plane.grid.cols > matrix.grid.rows:
            # Padding in a row's last byte is not an element, and keeps code 0 also for a NaN scale.
            present(operand.planes[0].codes)[:, -1] &= 0x0F
    storage.mark_written()
    steps.run("transpose")
    storage.writes.mark_rebuilt()
    return amax


def _candidates(storage: QuantizedStorage, grid: BlockGrid) -> FourOverSixErrors | None:
    """Return the errors by which the blocks of a whole matrix choose scales, or None."""
    if not storage.recipe.chooses_scales:
        return None
    words = FourOverSixErrors.words(grid, SharedBlocks())
    buffer = BufferSpec((words,), torch.int32).allocate(storage.device)
    return FourOverSixErrors.carve(buffer, grid, SharedBlocks())


def reduce_shared(storage: QuantizedStorage, amax: torch.Tensor) -> None:
    """Reduce the amaxes that a tensor-parallel shard shares with other shards, by MAX.

    This takes one all-reduce, or none if it shares no amax.

    Args:
        storage: the weight's bytes.
        amax: int32 [storage.amax_slots], the amaxes of this rank's shard; for a stack those of one
            matrix after the other. Changed in place.
    """
    ranges = storage.shared_amaxes()
    if ranges and amax.numel():
        of_matrices = amax.split(storage.amax_slots)
        entries = [own[each.start : each.stop] for own in of_matrices for each in ranges]
        buffer = torch.cat(entries)
        present(storage.tp_shard).require_comm().all_reduce_max_(buffer)
        for entry, reduced in zip(entries, buffer.split([len(e) for e in entries]), strict=True):
            entry.copy_(reduced)


def _transposed(master: torch.Tensor, grid: BlockGrid) -> torch.Tensor:
    """Transpose [M, K], or more dimensions, to [grid.rows, grid.cols]: [K, M], zero-padded rows."""
    flipped = master.flatten(end_dim=-2).t()
    if flipped.shape[1] == grid.cols:
        return flipped.contiguous()
    return torch.nn.functional.pad(flipped, (0, grid.cols - flipped.shape[1]))


def plain_master(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``source`` as contiguous FP32, BF16 or FP16, which a backend can read.

    Return the same memory if it already is.
    """
    if type(source) in (torch.Tensor, torch.nn.Parameter):
        dtype = source.dtype if source.dtype in NOMINAL_DTYPES else torch.float32
        return source.detach().resolve_neg().to(device, dtype).contiguous()
    # A subclass (a quantized weight, a view of one) may have no memory but can be read.
    return torch.empty(source.shape, dtype=torch.float32, device=device).copy_(source.detach())
