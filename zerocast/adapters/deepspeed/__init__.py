"""DeepSpeed's ZeRO-1 and ZeRO-2 on weights that hold codes of zerocast.

Supports DeepSpeed 0.19.8. scripts/integration.sh runs tests/integration/test_deepspeed.py with the
package. This adapter can be removed when DeepSpeed lets others make weights from masters, or when
the supported release is no longer in use.

Two lines in a training script, before ``deepspeed.initialize``::

    zerocast.adapters.deepspeed.install()
    zerocast.nn.convert(model, "nvfp4")

DeepSpeed keeps the parameters of a group in one flat buffer of 16 bits per element, copies its FP32
partition into it and all-gathers it. :func:`install` replaces a few functions of DeepSpeed, so that
weights of zerocast are not in that buffer: their masters are cast, and codes are all-gathered.
Everything else is DeepSpeed's: gradients, clipping, loss scales, the optimizer on its FP32
partition, the layout of that partition, and so its checkpoints.

Not supported: ZeRO-3, which shards the parameters themselves. :mod:`zerocast.sharded` supports this
with torch's FSDP2.
"""

from zerocast.adapters.deepspeed.deepspeed_installation import install, uninstall

__all__ = ["install", "uninstall"]
