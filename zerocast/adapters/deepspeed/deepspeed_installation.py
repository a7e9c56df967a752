"""The functions of DeepSpeed that are replaced, each with its replacement in
:mod:`zerocast.adapters.deepspeed.deepspeed_hooks`.
"""

from zerocast.adapters.deepspeed import deepspeed_hooks as hooks
from zerocast.adapters.replacements import Replacement, Replacements

_CONFIGURE = "self, model, collect_sources"
_CAST = "self, param_dtype, buffer_dtype, is_zero_init_model, keep_pattern"
_FLATTEN = "self, tensor_list, alignment, use_cpu_data, param_padding"
_OFFLOAD = "self, include, device, pin_memory, non_blocking"
_GATHER = (
    "groups_flat, partitioned_param_groups, dp_process_group, start_alignment_factor, "
    "allgather_bucket_size"
)


def install() -> None:
    """Let DeepSpeed's ZeRO-1 and ZeRO-2 train weights of zerocast. A second call does nothing.

    Call this before ``deepspeed.initialize``. That then accepts models whose weights hold codes
    (:func:`zerocast.nn.convert`, :func:`zerocast.model_init`), and refuses configurations that
    would train them wrongly. Models without such weights are trained as before.

    Raises:
        UnsupportedError: if DeepSpeed is not installed, or a function has other parameters than
            zerocast supports. Nothing has been replaced.
    """
    _REPLACEMENTS.install()


def uninstall() -> None:
    """Undo :func:`install`. No engine that trains weights of zerocast may be used afterwards."""
    _REPLACEMENTS.uninstall()


def _find() -> list[Replacement]:
    from deepspeed.runtime.engine import DeepSpeedEngine as engine
    from deepspeed.runtime.zero import stage_1_and_2 as zero

    optimizer = zero.DeepSpeedZeroOptimizer
    return [
        (engine, "_configure_expert_parallel", _CONFIGURE, hooks.check_configuration),
        (engine, "_cast_module_mixed_precision", _CAST, hooks.change_nominal_dtype),
        (engine, "_broadcast_model", "self", hooks.broadcast),
        (engine, "_get_shared_params", "self", hooks.shared_params),
        (optimizer, "flatten_dense_tensors_aligned", _FLATTEN, hooks.flatten_values),
        (optimizer, "_update_model_bit16_weights", "self, group_index", hooks.point_to_flat),
        (optimizer, "_link_all_hp_params", "self", hooks.take_over),
        (optimizer, "_restore_from_bit16_weights", "self", hooks.restart_masters),
        (optimizer, "offload_states", _OFFLOAD, hooks.check_offload),
        (zero, "all_gather_dp_groups", _GATHER, hooks.cast_and_gather),
    ]


_REPLACEMENTS = Replacements(
    "zerocast.adapters.deepspeed", "DeepSpeed", "deepspeed", "0.19.8", _find
)
