"""The input of tensor-parallel layers, split in time between the ranks, gathered in codes.

The ranks agree on the amax of the whole input, each casts what it holds, and codes travel: one byte
an element. The gathered input is, byte for byte, the cast of the gathered tensor. Its columnwise
copy is derived after the gather, and the gradient that comes back is reduce-scattered in high
precision.

That works where one scale serves all ranks and the columnwise codes are the transposed rowwise
ones: :class:`zerocast.Float8CurrentScaling` and :class:`zerocast.DelayedScaling`.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from zerocast.comm import as_communicator
from zerocast.errors import InputError, UnsupportedError
from zerocast.layout import Source
from zerocast.nn.derivatives import first_derivatives_only
from zerocast.nn.quantized_module import QuantizedModule, Quantizing
from zerocast.nn.recomputation import as_in_first_run
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedStorage, QuantizedTensor, TensorParallelShard, rebuild_derived

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def gather_input(name: str, layer: QuantizedModule, input: DTensor) -> DTensor:
    """``input`` [..., K], split in one of its leading dimensions, as codes that every rank has.
    Collective.

    Args:
        name: who asked for it, for messages.
        layer: multiplies with it; its quantizer of inputs makes the codes.
        input: Shard(d), d not the last dimension, over a mesh of one dimension.

    Raises:
        InputError: outside of :class:`zerocast.autocast`, or for another placement.
        UnsupportedError: under a recipe whose inputs cannot be gathered so.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
        return torch.compiler.disable(gather_input)(name, layer, input)
    from torch.distributed.tensor import Shard

    placement, last = input.placements[0], input.ndim - 1
    dim = placement.dim % input.ndim if isinstance(placement, Shard) else last
    if input.device_mesh.ndim > 1 or dim == last:
        raise InputError(
            f"{name} gathers an input that is split in a leading dimension, Shard(d), over a mesh "
            f"of one dimension, got {input.placements} of shape {tuple(input.shape)}; state its "
            f"input_layouts, or use torch's style."
        )
    with as_in_first_run(layer):
        quantizing = layer._quantizing(0, input, layer.weight)  # type: ignore[arg-type]
        if quantizing is None:
            raise InputError(
                f"{name} gathers its input in codes, which needs zerocast.autocast(enabled=True) "
                f"around the forward and an input with elements, got one without the other or "
                f"neither; for forwards in high precision use torch's style."
            )
        _check_recipe(name, quantizing.quantizer.recipe)
        gathered: Any = _GatherInput.apply(input, dim, quantizing)
        return gathered


def _check_recipe(name: str, recipe: Recipe) -> None:
    if not recipe.has_one_block or recipe.columnwise_source is not Source.ROWWISE:
        raise UnsupportedError(
            f"{name} gathers codes under recipes that quantize an input with one scale "
            f"(Float8CurrentScaling, DelayedScaling), got {recipe}; use torch's style, which "
            f"gathers in high precision and leaves quantizing to the layer."
        )


class _GatherInput(torch.autograd.Function):
    """``apply(input, dim, quantizing)``: Shard(dim) -> Replicate, in codes; back as Partial sums,
    reduce-scattered.
    """

    @staticmethod
    def forward(ctx: Any, input: DTensor, dim: int, quantizing: Quantizing) -> DTensor:
        from torch.distributed.tensor import DTensor, Replicate

        ctx.placements = input.placements
        mesh = input.device_mesh
        whole = _gathered_codes(input, dim, quantizing)
        return DTensor.from_local(
            whole,
            mesh,
            (Replicate(),),
            run_check=False,
            shape=input.shape,
            stride=torch.empty(input.shape, dtype=input.dtype, device="meta").stride(),
        )

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None]:
        return grad.redistribute(placements=ctx.placements), None, None


def _gathered_codes(input: DTensor, dim: int, quantizing: Quantizing) -> QuantizedTensor:
    """The cast of the whole ``input``, of which each rank casts what it holds."""
    quantizer, dtype, watch = quantizing
    comm = as_communicator(input.device_mesh)
    own = input.to_local().to(dtype).contiguous()
    length = -(-input.shape[dim] // comm.size)  # as torch.chunk cuts it
    ends = [min(rank * length, input.shape[dim]) for rank in range(comm.size + 1)]
    features = input.shape[-1]
    others = input.numel() // input.shape[dim] // features  # rows for each entry of ``dim``
    rows = math.prod(input.shape[:-1])

    columnwise = quantizer.columnwise
    quantizer.set_usage(rowwise=True, columnwise=False)
    own_rows = own.view(-1, features)
    if not own.numel():  # a rank without rows takes part in the amax, by one of zeros
        own_rows = own.new_zeros(1, features)
    start = min(others * ends[comm.rank], rows - len(own_rows))
    quantizer.tp_shard = TensorParallelShard(
        torch.Size((rows, features)), 0, start, len(own_rows), comm
    )
    try:
        codes = quantizer.quantize(own_rows).quantized_storage
    finally:
        quantizer.tp_shard = None
        quantizer.set_usage(rowwise=True, columnwise=columnwise)
    if watch is not None:
        watch("input", own, codes)

    whole = QuantizedStorage.empty(
        input.shape, dtype, quantizer.recipe, own.device, columnwise=columnwise, state=False
    )
    counts = [others * (b - a) * features for a, b in itertools.pairwise(ends)]
    is_in_order = math.prod(input.shape[:dim]) == 1
    place = whole.buffers["rowwise_data"].view(-1)
    gathered = place if is_in_order else torch.empty_like(place)
    sent = gathered.split(counts)[comm.rank]
    sent.copy_(codes.buffers["rowwise_data"].view(-1)[: len(sent)])
    comm.all_gather_(gathered, counts)
    if not is_in_order:
        pieces = [
            piece.view(*input.shape[:dim], -1, *input.shape[dim + 1 :])
            for piece in gathered.split(counts)
        ]
        torch.cat(pieces, dim, out=whole.buffers["rowwise_data"])
    whole.buffers["rowwise_scale_inv"].copy_(codes.buffers["rowwise_scale_inv"])
    rebuild_derived([whole])
    return QuantizedTensor(whole)
