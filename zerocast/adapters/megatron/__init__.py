"""Megatron-Core's distributed optimizer on weights that hold codes of zerocast.

Serves megatron-core 0.16, and for 4-bit codes its source of August 2026. scripts/integration.sh
runs tests/integration/test_megatron.py beside the package. It may go when Megatron-Core lets
others register a class of quantized weights, or when no release that it serves is in use.

Two lines in a training script, before ``DistributedDataParallel`` is made::

    zerocast.adapters.megatron.install()
    zerocast.adapters.megatron.quantize_linears(model, "nvfp4")

Megatron-Core reaches quantized weights through functions of its ``fp8_utils`` and ``fp4_utils``,
which call TransformerEngine. :func:`install` puts functions in their place that call zerocast for
weights of zerocast, and what was there for all others. Nothing else of Megatron-Core changes: its
optimizer holds the FP32 masters, its buffers the codes, and its all-gathers send them.
"""

from zerocast.adapters.megatron.linears import quantize_linears
from zerocast.adapters.megatron.megatron_installation import install, uninstall

__all__ = ["install", "quantize_linears", "uninstall"]
