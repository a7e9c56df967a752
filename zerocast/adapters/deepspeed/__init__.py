"""DeepSpeed's ZeRO-1 and ZeRO-2 on weights that hold codes of zerocast.

Serves DeepSpeed 0.19.8. scripts/integration.sh runs tests/integration/test_deepspeed.py beside the
package. It may go when DeepSpeed lets others make weights from masters, or when the release that it
serves is no longer in use.

Two lines in a training script, before ``deepspeed.initialize``::

    zerocast.adapters.deepspeed.install()
    zerocast.nn.convert(model, "nvfp4")

DeepSpeed keeps the parameters of a group in one flat buffer of 16 bits an element, copies its FP32
partition into it and all-gathers it. :func:`install` puts functions in the place of a few of its
own, by which weights of zerocast have no part in that buffer: their masters are cast, and codes are
all-gathered. Everything else is DeepSpeed's: gradients, clipping, loss scales, the optimizer on its
FP32 partition, the layout of that, and so its checkpoints.

NOT here: ZeRO-3, which shards the parameters themselves; under torch's FSDP2 that is
:mod:`zerocast.sharded`.
"""

from zerocast.adapters.deepspeed.deepspeed_installation import install, uninstall

__all__ = ["install", "uninstall"]
