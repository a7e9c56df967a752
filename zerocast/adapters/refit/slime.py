"""slime and miles: functions that quantize the converted parameters of a Megatron parameter."""

from collections.abc import Callable
from typing import Any

from zerocast.export import Dialect
from zerocast.export.known_dialects import as_dialect
from zerocast.refit.audit import is_named
from zerocast.refit.fused_weights import encode_fused


def quantize_params(dialect: Dialect | str) -> Callable[..., Any]:
    """Return a function that takes the place of ``quantize_params_fp8``, ``_mxfp8`` or ``_nvfp4``.

    It quantizes the matrices ``X.weight`` but for modules that the configuration names. Under NVFP4
    those of one call, which are one parameter in Megatron and in the server, share a tensor amax.
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
