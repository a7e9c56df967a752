"""ZeroOptimizer: a torch optimizer whose FP32 masters and state are sharded over ranks."""

from zerocast.optim.zero import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
