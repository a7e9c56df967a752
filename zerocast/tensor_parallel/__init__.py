"""Tensor parallelism with torch's DTensor styles.

Layers that :func:`zerocast.nn.convert` made are parallelized by torch's own ``ColwiseParallel``,
``RowwiseParallel``, ``SequenceParallel`` and ``PrepareModuleInput``, which know nothing of codes:

    zerocast.nn.convert(model, recipe, weights="master")
    parallelize_module(block, mesh["tp"], {"wq": ColwiseParallel(), "wo": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])

The codes and scales that a rank has are those of its part of the whole weight's cast.

What they gather, they gather in high precision. The styles here take the same arguments and gather
an input that is split in time (sequence parallelism) in FP8 codes, half the bytes of BF16:

Float8ColwiseParallel        for one layer
PrepareFloat8ModuleInput     for a module whose layers share the input: one gather for all
"""

from zerocast.tensor_parallel.styles import Float8ColwiseParallel, PrepareFloat8ModuleInput

__all__ = ["Float8ColwiseParallel", "PrepareFloat8ModuleInput"]
