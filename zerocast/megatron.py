"""Megatron-Core's distributed optimizer on weights that hold codes of zerocast.

Two lines in a training script, before ``DistributedDataParallel`` is made::

    zerocast.megatron.install()
    zerocast.megatron.quantize_linears(model, "nvfp4")

Megatron-Core reaches quantized weights through functions of its ``fp8_utils`` and ``fp4_utils``,
which call TransformerEngine. :func:`install` puts functions in their place that call zerocast for
weights of zerocast, and what was there for all others. Nothing else of Megatron-Core changes: its
optimizer holds the FP32 masters, its buffers the codes, and its all-gathers send them.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerocast.arguments import check_flag, check_module
from zerocast.cast import post_all_gather_processing, quantize_master_weights
from zerocast.errors import InputError, UnsupportedError
from zerocast.nn import ConversionReport, convert
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedTensor, replace_raw_data

__all__ = ["install", "quantize_linears", "uninstall"]

_CAST = (
    "model_params", "main_params", "start_offsets", "data_parallel_group",
    "fsdp_shard_model_params",
)  # fmt: skip
_installed: list[tuple[Any, str, Any]] = []
"""Owner, name and former value of all that is replaced now."""


def install() -> None:
    """Let Megatron-Core train weights of zerocast. A second call does nothing.

    Raises:
        UnsupportedError: where Megatron-Core is not installed, or reaches quantized weights through
            functions with other parameters than zerocast knows. Nothing has been replaced.
    """
    if _installed:
        return
    try:
        from megatron.core import fp4_utils as fp4
        from megatron.core import fp8_utils as fp8
        from megatron.core.distributed import param_and_grad_buffer as buffers
    except ImportError as error:
        raise UnsupportedError(
            f"zerocast.megatron needs Megatron-Core, got {error!r}; pip install megatron-core."
        ) from error
    has_packed_buffers = hasattr(fp4, "modify_nvfp4_rowwise_storage")
    buffer = buffers._ParamAndGradBuffer
    made = list(inspect.signature(buffer.__init__).parameters)
    hooks: list[tuple[Any, str, Sequence[str], Callable[..., Any]]] = [
        (buffer, "__init__", made, _make_buffer),
        (fp8, "is_float8tensor", ["tensor"], _is_quantized),
        (fp8, "dequantize_fp8_tensor", ["fp8_tensor"], _dequantize),
        (fp8, "modify_underlying_storage", ["tensor", "new_raw_data"], _replace_codes),
        (fp8, "quantize_param_shard", _CAST, _cast),
        (fp8, "post_all_gather_processing", ["model_params"], _rebuild),
        (
            buffers,
            "dist_all_gather_func",
            ["output_tensor", "input_tensor", "group", "async_op"],
            _gather_bytes,
        ),
    ]
    if has_packed_buffers:
        new_codes = ["fp4_tensor", "new_rowwise_data"]
        hooks += [
            (fp4, "is_nvfp4tensor", ["tensor"], _is_4_bits),
            (fp4, "dequantize_fp4_tensor", ["fp4_tensor"], _dequantize),
            (fp4, "modify_nvfp4_rowwise_storage", new_codes, _replace_codes),
            (fp4, "quantize_nvfp4_param_shard", _CAST, _cast),
            (buffer, "_compute_nvfp4_packed_layout", ["self", "params_with_names"], _halve_layout),
        ]
    for owner, name, parameters, _ in hooks:
        found = getattr(owner, name, None)
        given = list(inspect.signature(found).parameters) if callable(found) else None
        if given != list(parameters):
            raise UnsupportedError(
                f"zerocast.megatron needs {owner.__name__}.{name}({', '.join(parameters)}), got "
                f"{given}; use a version of Megatron-Core that it knows, such as 0.16."
            )
    for owner, name, _, ours in hooks:
        theirs = getattr(owner, name)
        replacement = _in_place_of(theirs, ours)
        for holder in _holders(owner, name, theirs):
            _installed.append((holder, name, theirs))
            setattr(holder, name, replacement)


def uninstall() -> None:
    """Undo :func:`install`."""
    while _installed:
        setattr(*_installed.pop())


def quantize_linears(
    model: torch.nn.Module,
    recipe: Recipe | str,
    *,
    skip: Sequence[str] = (),
    first_last_layers_bf16: bool | None = None,
) -> ConversionReport:
    """Put codes into the weights of Megatron-Core's column- and row-parallel linear layers.

    Each rank quantizes the part that it holds, with scales of its own, as TransformerEngine does.
    Attributes of the weights (``tensor_model_parallel``, ``partition_dim``, ...) stay, and their
    present values are kept for the optimizer's masters. Layers multiply by the values of the codes.

    Args:
        model: modules of Megatron-Core, before ``DistributedDataParallel`` wraps them.
        recipe: of the weights. MXFP8 and MXFP4 take ``enable_2d_quantization=True``: a buffer of
            Megatron-Core holds one plane of codes.
        skip: names of layers, or patterns of these with ``*`` and ``?``, that stay as they are.
        first_last_layers_bf16: leave out the transformer layers at both ends, as many as their
            configuration says in ``num_layers_at_start_in_bf16`` and ``num_layers_at_end_in_bf16``.
            None: where it says so in its own ``first_last_layers_bf16``.

    Raises:
        InputError: for a wrong argument, or a ``skip`` that names no layer. Nothing has been
            changed.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    check_module("model", model)
    if first_last_layers_bf16 is not None:
        check_flag("first_last_layers_bf16", first_last_layers_bf16)
    layers = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and layer.weight is not None
    ]
    for pattern in skip:
        if not fnmatch.filter(layers, pattern):
            raise InputError(
                f"skip must name linear layers of the model, got {pattern!r}, which fits none of "
                f"{layers[:4]}{' ...' if len(layers) > 4 else ''}."
            )
    plain = {name for name in layers if any(fnmatch.fnmatchcase(name, each) for each in skip)}
    plain |= {name for name in layers if _is_at_an_end(model, name, first_last_layers_bf16)}
    chosen = [name for name in layers if name not in plain]
    return convert(model, recipe, filter_fqns=lambda *_: False, include=chosen)


def _is_at_an_end(model: torch.nn.Module, name: str, is_asked: bool | None) -> bool:
    """Whether the layer stands in one of the transformer layers that stay in high precision."""
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:end]))
        number, config = getattr(module, "layer_number", None), getattr(module, "config", None)
        if number is None or config is None or not hasattr(module, "self_attention"):
            continue
        if not (config.first_last_layers_bf16 if is_asked is None else is_asked):
            return False
        last = config.num_layers - config.num_layers_at_end_in_bf16
        return bool(number <= config.num_layers_at_start_in_bf16 or number > last)
    return False


def _in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    return call


def _holders(owner: Any, name: str, value: object) -> Iterator[Any]:
    """Yield ``owner`` and the modules of Megatron-Core that have imported its function."""
    yield owner
    for module in list(sys.modules.values()):
        is_theirs = getattr(module, "__name__", "").startswith("megatron.")
        if is_theirs and module is not owner and vars(module).get(name) is value:
            yield module


def _is_quantized(theirs: Callable[..., Any], tensor: object) -> Any:
    return isinstance(tensor, QuantizedTensor) or theirs(tensor)


def _is_4_bits(theirs: Callable[..., Any], tensor: object) -> Any:
    if isinstance(tensor, QuantizedTensor):
        return tensor.recipe.numerics.fmt.bits == 4
    return theirs(tensor)


def _dequantize(theirs: Callable[..., Any], tensor: torch.Tensor) -> Any:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else theirs(tensor)


def _replace_codes(
    theirs: Callable[..., Any], tensor: torch.Tensor, new_raw_data: torch.Tensor
) -> None:
    if not isinstance(tensor, QuantizedTensor):
        theirs(tensor, new_raw_data)
        return
    storage = tensor.quantized_storage
    if len(storage.gathered) > 1:
        raise UnsupportedError(
            "a buffer of Megatron-Core holds one plane of codes, got a weight of "
            f"{storage.recipe}, whose columnwise codes are gathered, too; use "
            "enable_2d_quantization=True, or NVFP4."
        )
    if new_raw_data.numel() != tensor.rowwise_data.numel():
        raise UnsupportedError(
            "4-bit codes need buffers of two codes a byte, which this version of Megatron-Core "
            f"does not have, got a weight of {storage.recipe}; use FP8, or a version with "
            "fp4_utils.modify_nvfp4_rowwise_storage."
        )
    replace_raw_data(tensor, new_raw_data.view(-1))


def _cast(
    theirs: Callable[..., Any],
    model_params: Sequence[torch.Tensor],
    main_params: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    data_parallel_group: Any,
    fsdp_shard_model_params: Sequence[Any] | None = None,
) -> None:
    rows = list(
        zip(
            model_params,
            main_params,
            start_offsets,
            fsdp_shard_model_params or [None] * len(model_params),
            strict=True,
        )
    )
    ours = [row for row in rows if isinstance(row[0], QuantizedTensor)]
    others = [row for row in rows if not isinstance(row[0], QuantizedTensor)]
    for cast, chosen in ((quantize_master_weights, ours), (theirs, others)):
        if chosen:
            weights, masters, starts, shards = (
                list(column) for column in zip(*chosen, strict=True)
            )
            sharded = () if fsdp_shard_model_params is None else (shards,)
            cast(weights, masters, starts, data_parallel_group, *sharded)


def _rebuild(theirs: Callable[..., Any], model_params: Sequence[torch.Tensor]) -> None:
    ours = [weight for weight in model_params if isinstance(weight, QuantizedTensor)]
    if ours:
        post_all_gather_processing(ours)
    if len(ours) < len(model_params):
        theirs([weight for weight in model_params if not isinstance(weight, QuantizedTensor)])


def _gather_bytes(
    theirs: Callable[..., Any], output: torch.Tensor, own: torch.Tensor, **kwargs: Any
) -> Any:
    """Gather as bytes: gloo converts tensors of unequal dtypes that are gathered together."""
    return theirs(output.view(torch.uint8), own.view(torch.uint8), **kwargs)


def _make_buffer(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a configuration under which Megatron-Core would never cast the masters."""
    theirs(self, *args, **kwargs)
    kinds = {_is_4_bits(_no, weight) for weight in self.params if _is_quantized(_no, weight)}
    for is_4_bits in kinds:
        needed = ["use_distributed_optimizer", f"fp{4 if is_4_bits else 8}_param_gather"]
        missing = [name for name in needed if not getattr(self.ddp_config, name, True)]
        if missing:
            raise InputError(
                f"quantized weights need DistributedDataParallelConfig({missing[0]}=True), got "
                "False."
            )


def _no(_: object) -> bool:
    return False


def _halve_layout(theirs: Callable[..., Any], self: Any, params_with_names: Any) -> None:
    """Put every code where half of its element's place in the buffer of gradients is.

    So a rank's bytes are the codes of its elements. Megatron-Core pads elements and bytes
    independently, by which some codes lie in no rank's bytes (3 ranks, a weight of 80 x 208).
    """
    if not any(isinstance(weight, QuantizedTensor) for weight, _ in params_with_names):
        theirs(self, params_with_names)
        return
    for weight, name in params_with_names:
        if not _is_4_bits(_no, weight):
            raise UnsupportedError(
                f"a buffer of 4-bit codes holds nothing else, got {name} beside them; give all "
                "linear layers one recipe."
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
