"""What ranks send where only the amaxes of tensors and of shared blocks are reduced, and what is
refused before scales have been gathered. That the bytes are the same is the claim of
test_bitwise_guarantee.
"""

import pytest
import torch

import zerocast
from tests.support.planned import Planned
from tests.support.ranks import on_ranks
from tests.support.recipes import RECIPES, each
from zerocast.comm import Communicator, RecordingCommunicator
from zerocast.errors import StaleCopyError
from zerocast.layout import FlatLayout

SHAPES = [(768, 256), (256, 256), (1024, 256), (256, 1056)] * 25
"""The 100 weights of a GPT, whose end is padded so that ranks meet inside of blocks."""


@pytest.mark.parametrize(("recipe", "most"), [("nvfp4", 0.506), ("mxfp8", 2.07), ("block", 1.001)])
def test_bytes_before_and_in_the_gather(recipe, most):
    """Of 100 weights end to end over 4 ranks, by the recording communicator: one all-reduce before
    the cast, and in all no more than this a weight's element, scales and both planes included.
    """
    sent = zerocast.comm.run_in_process(4, lambda comm: _traffic(comm, RECIPES[recipe]))
    numel = sum(m * k for m, k in SHAPES)
    # A ring sends every byte of an all-gather (size - 1) times.
    assert sum(sent) / 3 / numel <= most


def _traffic(comm: Communicator, recipe: zerocast.Recipe) -> int:
    recorded = RecordingCommunicator(comm)
    weights = [zerocast.empty(shape, recipe) for shape in SHAPES]
    shards = FlatLayout(tuple(w.numel() for w in weights), 4).shards(comm.rank)
    masters = [torch.randn(e.size) if e else None for e in shards]
    starts = [e.start if e else None for e in shards]
    plan = zerocast.CastPlan(weights, masters, starts, recorded, exchange="boundary")
    recorded.reset()
    plan.cast()
    assert recorded.total().calls == recorded.total(kind="all_reduce").calls == 1
    plan.all_gather()
    return recorded.total().sent_bytes


@on_ranks("in_process", 2)
@each("nvfp4", "nvfp4-4over6", "mxfp8", "mxfp8-2d", "block", "rowwise")
def test_a_weight_whose_scales_were_not_gathered_is_not_read(comm, recipe):
    """Decoding, copies, columnwise reads and the functional processing are refused after a cast,
    also where the plan is gone, and work after the gather of scales.
    """
    planned = Planned(comm, recipe, exchange="boundary")
    planned.plan.cast()
    reads = [
        planned.weight.dequantize,
        lambda: planned.weight.clone(),
        lambda: planned.weight.columnwise_data,
        lambda: zerocast.post_all_gather_processing([planned.weight]),
    ]
    for read in reads:
        with pytest.raises(StaleCopyError, match=r"call plan.all_gather\(\)"):
            read()
    planned.plan.all_gather_scales()
    planned.plan.post_all_gather_processing()
    for read in reads:
        read()
    planned.plan.cast()
    del planned.plan
    with pytest.raises(StaleCopyError):
        planned.weight.dequantize()
    planned.weight.copy_(torch.ones(planned.weight.shape))
    assert planned.weight.dequantize().eq(1).all()


def test_amax_memory_follows_the_shard():
    """A rank with 64 of 65,536 rows keeps the amaxes of 6 rows of blocks at most, and one entry of
    each block that is cut anywhere.
    """
    weight = zerocast.empty((65536, 16), RECIPES["nvfp4"], columnwise=False)

    def buffers(comm: Communicator) -> int:
        start = weight.numel() // comm.size * comm.rank
        master = torch.zeros(weight.numel() // comm.size)
        other = zerocast.empty(weight.shape, weight.recipe, columnwise=False)
        plan = zerocast.CastPlan([other], [master], [start], comm, exchange="boundary")
        held = plan._cast.exchange.buffers
        return held.reduced.numel() + sum(len(a) for a in held.amaxes[0].blocks.values())

    assert max(zerocast.comm.run_in_process(16, buffers)) <= 4096 // 16 + 4 + 1
