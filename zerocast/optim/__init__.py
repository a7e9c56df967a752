"""ZeroOptimizer: a torch optimizer whose FP32 masters and state are sharded over ranks; FusedAdamW:
an AdamW that measures, as it updates them, what is cast next.
"""

from zerocast.optim.fused_adamw import FusedAdamW
from zerocast.optim.zero import ZeroOptimizer

__all__ = ["FusedAdamW", "ZeroOptimizer"]
