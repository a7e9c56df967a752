"""Refuses modules that would average quantized weights by copying into a copy of them.

Every copy into a quantized weight rounds. An average changes by less than a rounding step per
update, so it would not move, or would jump. Torch calls a hook for every module that
becomes part of another, which is when such a module makes its copy. Averages that are not modules
(lists of copies) are not detected here. Weights themselves refuse in-place updates (``lerp_``,
``add_``), but a copy of a computed value looks like any other write.
"""

from __future__ import annotations

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from zerocast.errors import UnsupportedError
from zerocast.tensors.quantized_tensor import QuantizedTensor

_AVERAGES = {
    "torch.optim.swa_utils.AveragedModel",
    "timm.utils.model_ema.ModelEmaV2",
    "timm.utils.model_ema.ModelEmaV3",
}


def _refuse_quantized(module: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
    """Refuse a quantized ``part`` of an average; torch calls this for every part of a module."""
    if torch.compiler.is_compiling():
        return  # No average is made in a graph, and a traced module has no parts yet.
    kind = type(module)
    if part is None or kind.__module__ == "torch.nn.modules.container":
        return
    if not _AVERAGES.isdisjoint(f"{c.__module__}.{c.__qualname__}" for c in kind.__mro__):
        for weight, param in part.named_parameters():
            if isinstance(param, QuantizedTensor):
                raise UnsupportedError(
                    f"{kind.__name__} needs weights in high precision, because it rounds its "
                    f"average at every update, and {weight} is quantized; average the FP32 masters "
                    "instead: ZeroOptimizer.ema(decay), or, under FSDP2, a model of masters."
                )


register_module_module_registration_hook(_refuse_quantized)
