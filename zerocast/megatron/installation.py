"""Which functions of Megatron-Core are replaced, and that they are those that zerocast knows."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from zerocast.errors import UnsupportedError
from zerocast.megatron import checkpoints, hooks

_CAST = (
    "model_params", "main_params", "start_offsets", "data_parallel_group",
    "fsdp_shard_model_params",
)  # fmt: skip
_SAVE = ("self", "model_sharded_state_dict", "is_loading", "sharding_type", "metadata")
_GATHER = ("output_tensor", "input_tensor", "group", "async_op")
_installed: list[tuple[Any, str, Any, Any]] = []
"""Owner, name, former value and present one of all that is replaced now."""


def install() -> None:
    """Let Megatron-Core train weights of zerocast. A second call does nothing.

    Raises:
        UnsupportedError: where Megatron-Core is not installed, or reaches quantized weights through
            functions with other parameters than zerocast knows. Nothing has been replaced.
    """
    if _installed:
        return
    table = _replacements()
    for owner, name, parameters, _ in table:
        found = getattr(owner, name, None)
        given = list(inspect.signature(found).parameters) if callable(found) else []
        checked = given[: len(parameters)] if name == "__init__" else given
        if checked != list(parameters):
            raise UnsupportedError(
                f"zerocast.megatron needs {owner.__name__}.{name}({', '.join(parameters)}), got "
                f"{given}; use a version of Megatron-Core that it knows, such as 0.16."
            )
    for owner, name, _, ours in table:
        theirs = getattr(owner, name)
        replacement = _in_place_of(theirs, ours)
        _put(owner, name, theirs, replacement)
        _installed.append((owner, name, theirs, replacement))


def uninstall() -> None:
    """Undo :func:`install`, also in modules of Megatron-Core that were imported after it.

    Call it once training has ended: an optimizer that goes on would copy masters over codes.
    """
    while _installed:
        owner, name, theirs, replacement = _installed.pop()
        _put(owner, name, replacement, theirs)


def _put(owner: Any, name: str, old: object, new: object) -> None:
    """Let ``new`` take the place of ``old`` in ``owner`` and in the modules that have imported it
    by name.
    """
    modules = [
        module
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("megatron.")
    ]
    for holder in (owner, *modules):
        if vars(holder).get(name) is old:
            setattr(holder, name, new)


def _replacements() -> list[tuple[Any, str, Sequence[str], Callable[..., Any]]]:
    """Return owner, name, first parameters, and what takes the place, of each function."""
    try:
        from megatron.core import fp4_utils as fp4
        from megatron.core import fp8_utils as fp8
        from megatron.core.distributed import param_and_grad_buffer as buffers
        from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    except ImportError as error:
        raise UnsupportedError(
            f"zerocast.megatron needs Megatron-Core, got {error!r}; pip install megatron-core."
        ) from error
    buffer = buffers._ParamAndGradBuffer
    with_config = ("self", "optimizer", "config")
    table: list[tuple[Any, str, Sequence[str], Callable[..., Any]]] = [
        (fp8, "is_float8tensor", ("tensor",), hooks.is_quantized),
        (fp8, "dequantize_fp8_tensor", ("fp8_tensor",), hooks.dequantize),
        (fp8, "modify_underlying_storage", ("tensor", "new_raw_data"), hooks.replace_codes),
        (fp8, "quantize_param_shard", _CAST, hooks.cast),
        (fp8, "post_all_gather_processing", ("model_params",), hooks.rebuild),
        (buffers, "dist_all_gather_func", _GATHER, hooks.gather_bytes),
        (buffer, "__init__", ("self", "ddp_config"), hooks.make_buffer),
        (DistributedOptimizer, "__init__", with_config, hooks.make_optimizer),
        (DistributedOptimizer, "load_state_dict", ("self", "state_dict"), checkpoints.load),
        (DistributedOptimizer, "sharded_state_dict", _SAVE, checkpoints.save),
        (LayerWiseDistributedOptimizer, "__init__", ("self", "optimizers"), hooks.make_layer_wise),
        (MegatronFSDP, "__init__", ("self", "module"), hooks.make_fsdp),
    ]
    if hasattr(fp4, "modify_nvfp4_rowwise_storage"):  # buffers of two codes a byte
        new_codes = ("fp4_tensor", "new_rowwise_data")
        layout = ("self", "params_with_names")
        table += [
            (fp4, "is_nvfp4tensor", ("tensor",), hooks.is_4_bits),
            (fp4, "dequantize_fp4_tensor", ("fp4_tensor",), hooks.dequantize),
            (fp4, "modify_nvfp4_rowwise_storage", new_codes, hooks.replace_codes),
            (fp4, "quantize_nvfp4_param_shard", _CAST, hooks.cast),
            (buffer, "_compute_nvfp4_packed_layout", layout, hooks.halve_layout),
        ]
    return table


def _in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    return call
