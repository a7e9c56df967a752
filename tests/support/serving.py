"""Which layers vLLM 0.32 builds quantized, by the section of a checkpoint: its rules in short.

For a linear layer and for the experts of a module, as ``should_ignore_layer``, ``get_moe_method``
(compressed-tensors), ``is_layer_skipped`` (FP8) and ``is_layer_excluded`` (ModelOpt) have them.
"""

import re
from collections.abc import Iterable
from typing import Any

from zerocast.export import DIALECTS
from zerocast.export.dialects import LINEAR

LINEAR_ALONE = [
    name for name, each in DIALECTS.items() if LINEAR in each.reads and not each.input_scale
]
"""The dialects that have linear layers and need no more than their weights."""

_OF_AN_EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+$")


def is_built_quantized(section: dict[str, Any], module: str) -> bool:
    """Of a linear layer, and of an expert's projection, with which all of its module are built."""
    key = {"fp8": "modules_to_not_convert", "mxfp8": "ignored_layers"}
    method = section["quant_method"]
    named: Iterable[str] = section[key.get(method, "ignore")]
    if method == "compressed-tensors":
        (group,) = section["config_groups"].values()
        is_target = "Linear" in group["targets"] and module != "lm_head"  # a ParallelLMHead
        return module not in named and (is_target or module in group["targets"])
    experts = _OF_AN_EXPERT.match(module)
    if experts is not None:
        return not any(experts[1] in name for name in named if "experts" in name)
    if method == "modelopt":
        return not any(name in module for name in named)
    return module not in named


def built_layers(stored: Iterable[str], projections: Iterable[str]) -> dict[str, bool]:
    """Of the tensors of a checkpoint: the layers that a server builds of them, but norms and
    embeddings, and whether they are stored in codes.

    Args:
        stored: the names of the tensors.
        projections: what those of an expert are called.
    """
    names, found = set(stored), dict[str, bool]()
    for name in names:
        module, _, part = name.rpartition(".")
        is_layer = part in ("weight", "weight_packed") and "norm" not in module
        if is_layer and "embed" not in module:
            found[module] = any(
                f"{module}.{scale}" in names for scale in ("weight_scale", "weight_scale_inv")
            )
    for module in [each for each in found if re.search(r"experts\.0\.", each)]:
        assert module.rpartition(".")[2] in projections, module
    return found
