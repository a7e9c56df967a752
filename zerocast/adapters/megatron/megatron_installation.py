"""The functions of Megatron-Core that are replaced, each with its replacement."""

import inspect
from contextlib import suppress
from importlib import import_module

from zerocast.adapters.megatron import dist_checkpoints
from zerocast.adapters.megatron import megatron_hooks as hooks
from zerocast.adapters.replacements import Replacement, Replacements

_CAST = "model_params, main_params, start_offsets, data_parallel_group, fsdp_shard_model_params"
_SAVE = "self, model_sharded_state_dict, is_loading, sharding_type, metadata"
_GATHER = "output_tensor, input_tensor, group, async_op"


def install() -> None:
    """Let Megatron-Core train weights of zerocast. A second call does nothing.

    Raises:
        UnsupportedError: if Megatron-Core is not installed, or a function has other parameters
            than zerocast supports. Nothing has been replaced.
    """
    _REPLACEMENTS.install()


def uninstall() -> None:
    """Undo :func:`install`, also in modules of Megatron-Core that were imported after it.

    Call it only after training: an optimizer that steps afterwards would copy masters over codes.
    """
    _REPLACEMENTS.uninstall()


def _find() -> list[Replacement]:
    from megatron.core import fp4_utils as fp4
    from megatron.core import fp8_utils as fp8
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    buffer = buffers._ParamAndGradBuffer
    found: list[Replacement] = [
        (fp8, "is_float8tensor", "tensor", hooks.is_quantized),
        (fp8, "dequantize_fp8_tensor", "fp8_tensor", hooks.dequantize),
        (fp8, "modify_underlying_storage", "tensor, new_raw_data", hooks.replace_codes),
        (fp8, "quantize_param_shard", _CAST, hooks.cast),
        (fp8, "post_all_gather_processing", "model_params", hooks.rebuild),
        (buffers, "dist_all_gather_func", _GATHER, hooks.gather_bytes),
        (buffer, "__init__", "self, ddp_config", hooks.make_buffer),
        (DistributedOptimizer, "__init__", "self, optimizer, config", hooks.make_optimizer),
        (DistributedOptimizer, "load_state_dict", "self, state_dict", dist_checkpoints.load),
        (DistributedOptimizer, "sharded_state_dict", _SAVE, dist_checkpoints.save),
        (LayerWiseDistributedOptimizer, "__init__", "self, optimizers", hooks.make_layer_wise),
        *_fsdp_classes(),
    ]
    if hasattr(buffer, "_compute_nvfp4_packed_layout"):  # from 0.18 on: two codes per byte
        codes, layout = "fp4_tensor, new_rowwise_data", "self, params_with_names"
        found += [
            (fp4, "is_nvfp4tensor", "tensor", hooks.is_4_bits),
            (fp4, "dequantize_fp4_tensor", "fp4_tensor", hooks.dequantize),
            (fp4, "modify_nvfp4_rowwise_storage", codes, hooks.replace_codes),
            (fp4, "quantize_nvfp4_param_shard", _CAST, hooks.cast),
            (buffer, "_compute_nvfp4_packed_layout", layout, hooks.halve_layout),
        ]
    parameters = inspect.signature(TorchDistLoadShardedStrategy.__init__).parameters
    if "stream_ckpt_dequant" in parameters:  # from 0.19 on
        known = "self, cache_metadata, stream_ckpt_dequant"
        found.append(
            (TorchDistLoadShardedStrategy, "__init__", known, dist_checkpoints.decode_first)
        )
    return found


def _fsdp_classes() -> list[Replacement]:
    """Return both versions of Megatron-FSDP, in Megatron-Core and in a package of its own, as far
    as they are installed.
    """
    versions = (
        ("megatron_fsdp", "MegatronFSDP", "self, module", hooks.make_fsdp),
        ("experimental.module", "FsdpModule", "self, mesh", hooks.make_fsdp_module),
    )
    found: list[Replacement] = []
    for package in ("megatron.core.distributed.fsdp.src.megatron_fsdp", "megatron_fsdp"):
        for module, name, parameters, ours in versions:
            with suppress(ImportError):
                owner = getattr(import_module(f"{package}.{module}"), name)
                found.append((owner, "__init__", parameters, ours))
    return found


_REPLACEMENTS = Replacements(
    "zerocast.adapters.megatron",
    "Megatron-Core",
    "megatron-core",
    "0.16 or 0.19",
    _find,
    importers=("megatron.",),
)
