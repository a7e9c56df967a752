"""Megatron-Core's distributed optimizer on weights that hold codes of zerocast.

Supports megatron-core 0.16 to 0.19, and 4-bit codes from 0.18 on. From 0.17 on it needs Python
3.12. Megatron-FSDP (megatron-fsdp 0.6, and its copy in Megatron-Core) is refused by name.
scripts/integration.sh and scripts/megatron.sh run tests/integration/test_megatron.py with the
packages. This adapter can be removed when Megatron-Core lets others register a class of quantized
weights, or when no supported release is in use.

Two lines in a training script, before ``DistributedDataParallel`` is made::

    zerocast.adapters.megatron.install()
    zerocast.adapters.megatron.quantize_linears(model, "nvfp4")

Megatron-Core accesses quantized weights through functions of its ``fp8_utils`` and ``fp4_utils``,
which call TransformerEngine. :func:`install` replaces them by functions that call zerocast for
weights of zerocast, and the original function for others. Megatron-Core's optimizer still holds the
FP32 masters, its buffers hold the codes, and its all-gathers send them.
"""

from zerocast.adapters.megatron.linears import quantize_linears
from zerocast.adapters.megatron.megatron_installation import install, uninstall

__all__ = ["install", "quantize_linears", "uninstall"]
