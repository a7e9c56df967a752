"""Puts the functions of :mod:`zerocast.deepspeed.hooks` in the place of DeepSpeed's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from zerocast.deepspeed import hooks
from zerocast.errors import UnsupportedError

_installed: list[tuple[Any, str, Any]] = []
"""Owner, name and former value of all that is replaced now."""


def install() -> None:
    """Let DeepSpeed's ZeRO-1 and ZeRO-2 train weights of zerocast. A second call does nothing.

    Call it before ``deepspeed.initialize``, which then takes models whose weights hold codes
    (:func:`zerocast.nn.convert`, :func:`zerocast.model_init`), and refuses configurations under
    which they could not be right. Models without such weights are trained as ever.

    Raises:
        UnsupportedError: where DeepSpeed is not installed, or has functions with other parameters
            than zerocast knows. Nothing has been replaced.
    """
    if _installed:
        return
    try:
        from deepspeed.runtime.engine import DeepSpeedEngine as engine
        from deepspeed.runtime.zero import stage_1_and_2 as zero
    except ImportError as error:
        raise UnsupportedError(
            f"zerocast.deepspeed needs DeepSpeed, got {error!r}; pip install deepspeed."
        ) from error
    optimizer = zero.DeepSpeedZeroOptimizer
    configure = ["self", "model", "collect_sources"]
    cast = ["self", "param_dtype", "buffer_dtype", "is_zero_init_model", "keep_pattern"]
    flatten = ["self", "tensor_list", "alignment", "use_cpu_data", "param_padding"]
    offload = ["self", "include", "device", "pin_memory", "non_blocking"]
    gather = [
        "groups_flat", "partitioned_param_groups", "dp_process_group", "start_alignment_factor",
        "allgather_bucket_size",
    ]  # fmt: skip
    replacements: list[tuple[Any, str, Sequence[str], Callable[..., Any]]] = [
        (engine, "_configure_expert_parallel", configure, hooks.check_configuration),
        (engine, "_cast_module_mixed_precision", cast, hooks.change_nominal_dtype),
        (engine, "_broadcast_model", ["self"], hooks.broadcast),
        (engine, "_get_shared_params", ["self"], hooks.shared_params),
        (optimizer, "flatten_dense_tensors_aligned", flatten, hooks.flatten_values),
        (optimizer, "_update_model_bit16_weights", ["self", "group_index"], hooks.point_to_flat),
        (optimizer, "_link_all_hp_params", ["self"], hooks.take_over),
        (optimizer, "_restore_from_bit16_weights", ["self"], hooks.restart_masters),
        (optimizer, "offload_states", offload, hooks.check_offload),
        (zero, "all_gather_dp_groups", gather, hooks.cast_and_gather),
    ]
    for owner, name, parameters, _ in replacements:
        found = getattr(owner, name, None)
        given = list(inspect.signature(found).parameters) if callable(found) else None
        if given != parameters:
            raise UnsupportedError(
                f"zerocast.deepspeed needs {owner.__name__}.{name}({', '.join(parameters)}), got "
                f"{given}; use a version of DeepSpeed that it knows, such as 0.19.8."
            )
    for owner, name, _, ours in replacements:
        theirs = getattr(owner, name)
        _installed.append((owner, name, theirs))
        setattr(owner, name, _in_place_of(theirs, ours))


def uninstall() -> None:
    """Undo :func:`install`. Engines that train weights of zerocast need it as long as they live."""
    while _installed:
        setattr(*_installed.pop())


def _in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    return call
