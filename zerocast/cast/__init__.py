"""The sharded cast: plans, and functional calls for callers that keep no plan.

Note: casting a sharded weight
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A *master weight*, usually FP32, is sharded over the ranks of a data-parallel group. The *model
weight* is its quantized form, which every rank holds whole. A cast takes these steps::

            rank r                                          all ranks
    grad --reduce_scatter--> grad shard
              | optimizer             in high precision, only the elements I own
            master shard
              | partial_amax          over my extent; blocks I do not touch stay 0
            amax ------------ reduce_amax: ONE all-reduce MAX ----------- amax
              | compute_scale         the same arithmetic everywhere
            scale_inv
              | partial_cast          only my codes, in place in the gather buffer
            codes[r] --------------- all_gather (in place) -------------- codes
              | post_all_gather_processing      columnwise copies, padded scales
            weight ready

If each scale depends on one block only (MX, block-wise and row-wise FP8), a block inside one shard
needs no other rank. The CPU's ``partial_amax`` casts such blocks in the same read of the master;
``partial_cast`` then casts only the blocks at the ends of shards.

Two schemes differ. Delayed scaling casts with a scale from earlier casts, so its single pass over
the masters runs first and also measures the amax. The reduced amax gives the next scale.
4-over-6 chooses one of two scales for each block. The errors of shared blocks are reduced in one
more all-reduce, between ``reduce_amax`` and ``compute_scale``. On the CPU the rank that holds a
block whole casts it in the read in which it chooses the scale.

Terms, each with one meaning:

    element     one logical weight value; every offset in Python is in elements
    byte        one stored byte; byte offsets are always derived from elements, by
                ``zerocast.numerics.byte_span``
    shard       what one rank owns of one master weight: an ``Extent`` of elements, possibly empty
    block       the elements that share a scale
    amax        the largest magnitude over a block; reduced over ranks before the all-gather
    scale       multiplies a weight before rounding; ``scale_inv`` multiplies a code after, and is
                stored with its codes
    rowwise     the codes as [M, K]; *columnwise* is the copy that the transposed GEMM reads
    derived     what post-all-gather processing rebuilds; reading it while *stale* raises an error

Guarantee: for every partition, the gathered codes, scales and padding equal those of ``quantize``
on the whole weight, and are the same on every rank.
"""

from zerocast.cast.calls import (
    cast_master_weights_to_fp8,
    cast_master_weights_to_nvfp4,
    post_all_gather_processing,
    quantize_master_weights,
)
from zerocast.cast.plan import CastPlan
