"""Optimizers. ZeroOptimizer shards FP32 masters and optimizer state over ranks; FusedAdamW updates
masters and measures their amaxes for the next cast.
"""

from zerocast.optim.fused_adamw import FusedAdamW
from zerocast.optim.zero import ZeroOptimizer

__all__ = ["FusedAdamW", "ZeroOptimizer"]
