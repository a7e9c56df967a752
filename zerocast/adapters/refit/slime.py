"""slime and miles: a function that quantizes the parameters converted from one of Megatron."""

from collections.abc import Callable
from typing import Any

from zerocast.export import Dialect
from zerocast.export.known_dialects import as_dialect
from zerocast.refit.audit import is_named
from zerocast.refit.fused_weights import encode_fused


def quantize_params(dialect: Dialect | str) -> Callable[..., Any]:
    """Return a replacement of ``quantize_params_fp8``, ``_mxfp8`` or ``_nvfp4``.

    It quantizes the matrices ``X.weight``, except in modules that the configuration lists. With
    NVFP4, matrices of one call share a tensor amax, as Megatron and the server fuse them.
    """
    found = as_dialect(dialect)

    def quantized(
        args: Any,
        megatron_name: str,
        converted_named_params: Any,
        quantization_config: Any,
        transform_ue8m0: bool = True,
    ) -> list[Any]:
        ignored = quantization_config.get(found.unquantized_key) or ()
        matrices = {
            name: param
            for name, param in converted_named_params
            if name.endswith(".weight") and param.dim() == 2
            if not is_named(name.removesuffix(".weight"), ignored)
        }
        stored = encode_fused(matrices, found)
        params: list[Any] = []
        for name, param in converted_named_params:
            params += stored[name].items() if name in stored else [(name, param)]
        return params

    return quantized
