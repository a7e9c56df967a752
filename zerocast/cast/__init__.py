"""The sharded cast: plans, and functional calls for callers who keep none.

Note: casting a sharded weight
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A *master weight*, FP32 as a rule, is split over the ranks of a data-parallel group; the *model
weight* is its quantized form, whole on every rank. A cast takes these steps::

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

Where scales belong to blocks alone (MX, FP8 in blocks or rows), the blocks that a shard holds whole
wait for no other rank: the CPU's ``partial_amax`` casts them, too, in the same read of the master,
and ``partial_cast`` is left with the blocks at the ends of shards.

Two schemes differ. Delayed scaling casts with a scale that it has from earlier casts, so its one
pass over the masters comes first and takes the amax along; the reduced amax then makes the next
scale. 4-over-6 lets each block choose between two scales, for which the errors of shared blocks
travel in one all-reduce more, between ``reduce_amax`` and ``compute_scale``. On the CPU whoever
chooses for a block that it holds whole casts it in the same read.

The words, each used for nothing else:

    element     one logical weight value; every offset in Python is in elements
    byte        one stored byte; derived from elements by ``zerocast.numerics.byte_span``, never a
                second offset system
    shard       what one rank owns of one master weight: an ``Extent`` of elements, possibly empty
    block       the elements that share a scale
    amax        the largest magnitude over a block; travels between ranks before the all-gather
    scale       multiplies a weight before rounding; ``scale_inv`` multiplies a code after, and is
                stored with its codes
    rowwise     the codes as [M, K]; *columnwise* is the copy that the transposed GEMM reads
    derived     what post-all-gather processing rebuilds; it may be *stale*, knows it, and refuses
                to be read then

The guarantee: whatever the partition, the gathered shards are exactly the codes, scales and padding
of ``quantize`` on the whole weight, the same on every rank.
"""

from zerocast.cast.calls import (
    cast_master_weights_to_fp8,
    cast_master_weights_to_nvfp4,
    post_all_gather_processing,
    quantize_master_weights,
)
from zerocast.cast.plan import CastPlan
