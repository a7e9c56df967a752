"""The functions that replace Megatron-Core's calls of TransformerEngine. The first argument of each
is the function that it replaces, which it calls for weights that are not zerocast's.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zerocast import (
    CastPlan,
    InputError,
    QuantizedTensor,
    UnsupportedError,
    as_communicator,
    post_all_gather_processing,
    replace_raw_data,
)
from zerocast.cast.plan_cache import find_plan, keep_plan


def is_quantized(theirs: Callable[..., Any], tensor: object) -> Any:
    """Return True for weights of zerocast."""
    return isinstance(tensor, QuantizedTensor) or theirs(tensor)


def is_4_bits(theirs: Callable[..., Any], tensor: object) -> Any:
    """Return whether a weight holds two codes per byte."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.recipe.numerics.fmt.bits == 4
    return theirs(tensor)


def dequantize(theirs: Callable[..., Any], tensor: torch.Tensor) -> Any:
    """Return the decoded values of a weight."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else theirs(tensor)


def replace_codes(
    theirs: Callable[..., Any], tensor: torch.Tensor, new_raw_data: torch.Tensor
) -> None:
    """Move the codes of a weight into a buffer of Megatron-Core, which holds one plane.

    Raises:
        UnsupportedError: if two planes are gathered, or the buffer has another size.
    """
    if not isinstance(tensor, QuantizedTensor):
        theirs(tensor, new_raw_data)
        return
    storage = tensor.quantized_storage
    if len(storage.gathered) > 1:
        raise UnsupportedError(
            "a buffer of Megatron-Core holds one plane of codes, got a weight of "
            f"{storage.recipe}, whose columnwise codes are gathered as well; use "
            "enable_2d_quantization=True, or NVFP4."
        )
    if new_raw_data.numel() != tensor.rowwise_data.numel():
        from megatron.core import __version__ as version

        raise UnsupportedError(
            f"4-bit codes need megatron-core 0.18 or newer, got {version}, whose buffers zerocast "
            f"cannot fill with two codes a byte, and a weight of {storage.recipe}; use FP8, or "
            "Python 3.12 or newer and pip install 'megatron-core>=0.18'."
        )
    replace_raw_data(tensor, new_raw_data.view(-1))


def cast(
    theirs: Callable[..., Any],
    model_params: Sequence[torch.Tensor],
    main_params: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    data_parallel_group: Any,
    fsdp_shard_model_params: Sequence[Any] | None = None,
) -> None:
    """Cast the masters of one optimizer, and gather scales; Megatron-Core later gathers codes.

    Only Megatron-FSDP gives ``fsdp_shard_model_params``, and it has no weights of zerocast.
    """
    shards = fsdp_shard_model_params or [None] * len(model_params)
    rows = list(zip(model_params, main_params, start_offsets, shards, strict=True))
    ours = [row[:3] for row in rows if isinstance(row[0], QuantizedTensor)]
    others = [row for row in rows if not isinstance(row[0], QuantizedTensor)]
    if others:
        *lists, shards = (list(column) for column in zip(*others, strict=True))
        sharded = () if fsdp_shard_model_params is None else (shards,)
        theirs(*lists, data_parallel_group, *sharded)
    if ours:
        weights, masters, starts = (list(column) for column in zip(*ours, strict=True))
        plan = _plan_of(weights, masters, starts, data_parallel_group)
        plan.cast_and_release(masters)
        plan.all_gather_scales()


def _plan_of(
    weights: list[Any],
    masters: list[torch.Tensor | None],
    starts: list[int | None],
    group: Any,
) -> CastPlan:
    """Return the plan of an earlier step, or make one.

    An optimizer shards its masters once, on all ranks. So either all ranks find a plan or none
    does, and no collective is needed to check this.
    """
    storages = [weight.quantized_storage for weight in weights]
    sizes = (None if master is None else master.numel() for master in masters)
    key = ("megatron", as_communicator(group), tuple(starts), tuple(sizes))
    return find_plan(storages, key) or keep_plan(
        storages, key, CastPlan(weights, masters, starts, group, exchange="boundary")
    )


def rebuild(theirs: Callable[..., Any], model_params: Sequence[torch.Tensor]) -> None:
    """Compute the data that is derived from gathered codes."""
    ours = _quantized(model_params)
    if ours:
        post_all_gather_processing(ours)
    if len(ours) < len(model_params):
        theirs([weight for weight in model_params if not isinstance(weight, QuantizedTensor)])


def gather_bytes(
    theirs: Callable[..., Any], output: torch.Tensor, own: torch.Tensor, **kwargs: Any
) -> Any:
    """Gather tensors as bytes, since gloo converts between tensors of different dtypes."""
    return theirs(output.view(torch.uint8), own.view(torch.uint8), **kwargs)


def make_buffer(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Raise if Megatron-Core would never cast the masters, or would send other bytes than codes.

    Raises:
        InputError: without the distributed optimizer, or the gather of the weights' codes.
        UnsupportedError: with ``reuse_grad_buf_for_mxfp8_param_ag``.
    """
    theirs(self, *args, **kwargs)
    weights = _quantized(self.params)
    _check_buffers_hold_codes(weights, self.ddp_config)
    for is_4_bit in {is_4_bits(_no, weight) for weight in weights}:
        needed = ["use_distributed_optimizer", f"fp{4 if is_4_bit else 8}_param_gather"]
        missing = [name for name in needed if not getattr(self.ddp_config, name, True)]
        if missing:
            raise InputError(
                f"quantized weights need DistributedDataParallelConfig({missing[0]}=True), got "
                "False."
            )


def make_optimizer(
    theirs: Callable[..., Any], self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Raise :class:`UnsupportedError` if the inner optimizer holds the masters, since Megatron-Core
    then passes none to the cast.
    """
    groups = [] if optimizer is None else optimizer.param_groups  # None: all weights are frozen
    weights = _quantized(weight for group in groups for weight in group["params"])
    if weights and config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        raise UnsupportedError(
            "quantized weights need FP32 masters that Megatron-Core holds, got a precision-aware "
            "optimizer, which does not expose its masters; set "
            "OptimizerConfig(main_params_dtype=torch.float32, fp8_recipe='blockwise', "
            "optimizer_cpu_offload=False), or use_precision_aware_optimizer=False."
        )
    _check_buffers_hold_codes(weights, config)
    theirs(self, optimizer, config, *args, **kwargs)


def _check_buffers_hold_codes(weights: list[QuantizedTensor], config: Any) -> None:
    """Raise :class:`UnsupportedError` for a configuration of gradient buffers or the optimizer that
    puts values into the place of codes.
    """
    if weights and getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        raise UnsupportedError(
            "quantized weights need buffers of codes, got reuse_grad_buf_for_mxfp8_param_ag=True, "
            "with which Megatron-Core gathers MXFP8 as BF16 values; leave it False: codes take "
            "half of these bytes."
        )


def make_layer_wise(
    theirs: Callable[..., Any], self: Any, optimizers: Any, *args: Any, **kwargs: Any
) -> None:
    """Raise :class:`UnsupportedError` for the layer-wise optimizer, which has whole matrices as
    masters, and which Megatron-Core copies and sends as values.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(_quantized(group["params"]) for group in groups):
        raise UnsupportedError(
            "quantized weights need Megatron-Core's DistributedOptimizer, got its layer-wise one, "
            "whose owners of whole matrices send weights in high precision; use "
            "zerocast.optim.ZeroOptimizer(shard='matrix') for Muon."
        )
    theirs(self, optimizers, *args, **kwargs)


def make_fsdp(
    theirs: Callable[..., Any], self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Raise :class:`UnsupportedError` for Megatron-FSDP, which frees codes and sets them plane by
    plane.
    """
    _check_without_codes(module)
    theirs(self, module, *args, **kwargs)


def make_fsdp_module(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Do so for its second version, which is a base class of the module itself."""
    _check_without_codes(self)
    theirs(self, *args, **kwargs)


def _check_without_codes(module: torch.nn.Module) -> None:
    if _quantized(module.parameters()):
        raise UnsupportedError(
            "quantized weights need Megatron-Core's DistributedDataParallel, got Megatron-FSDP, "
            "which frees the planes of a weight's codes and sets them one at a time; shard with "
            "zerocast.sharded and torch's fully_shard instead."
        )


def _quantized(weights: Iterable[torch.Tensor]) -> list[QuantizedTensor]:
    """Return the weights of zerocast among ``weights``."""
    return [weight for weight in weights if isinstance(weight, QuantizedTensor)]


def _no(_: object) -> bool:
    return False


def halve_layout(theirs: Callable[..., Any], self: Any, params_with_names: Any) -> None:
    """Place every code at half the index of its element in the gradient buffer.

    A rank's bytes are then the codes of its elements. Megatron-Core pads elements and bytes
    independently, so that some codes are in no rank's bytes (3 ranks, a weight of 80 x 208).

    Raises:
        UnsupportedError: if the buffer has other weights, or ranks have odd numbers of elements.
    """
    if not _quantized(weight for weight, _ in params_with_names):
        theirs(self, params_with_names)
        return
    for weight, name in params_with_names:
        if not is_4_bits(_no, weight):
            raise UnsupportedError(
                f"a buffer of 4-bit codes must hold nothing else, got {name} in it; use one recipe "
                "for all linear layers."
            )
    ranks = self.data_parallel_world_size
    for start, end in self.bucket_indices:
        if (end - start) % (2 * ranks):
            raise UnsupportedError(
                f"{ranks} ranks need an even number of elements each, got a bucket of "
                f"{end - start}; set pad_buckets_for_high_nccl_busbw=True."
            )
    self.nvfp4_packed_param_index_map = {
        weight: (start // 2, end // 2, bucket)
        for weight, (start, end, bucket) in self.param_index_map.items()
    }
    self.nvfp4_packed_bucket_indices = [(a // 2, b // 2) for a, b in self.bucket_indices]
    self.nvfp4_packed_numel_unpadded = self.bucket_indices[-1][1] // 2
