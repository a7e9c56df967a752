"""Low-bit weight all-gathers under torch's FSDP2 (``torch.distributed.fsdp.fully_shard``).

    zerocast.nn.convert(model, recipe, weights="master", low_bit_all_gather=True)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ...
    optimizer.step()
    zerocast.fsdp.precompute_scales_for_fsdp(model)

Parameters stay what FSDP2 makes of them, sharded masters in high precision; what it all-gathers are
codes. The gathered weight is, byte for byte, ``zerocast.quantize`` of the whole master.

Note: who writes a master
~~~~~~~~~~~~~~~~~~~~~~~~~
All ranks must write a master, or none of them, for a written one is cast and a cast is collective.
Operations on the parameter, a DTensor, and ``load_state_dict`` write on all ranks, also on those
without rows. What writes the memory of some ranks' rows alone does not: ``to_local()`` behind an
``if``, or ``torch.distributed.checkpoint.load`` that no ``load_state_dict`` follows, where a rank
has no rows. Then some ranks wait in an all-reduce and the others in an all-gather, until the
process group's timeout ends both. To find it out sooner would take one more collective in every
gather; only a plan that is made at that moment tells, on all ranks, that they mean different
weights.

precompute_scales_for_fsdp     casts all masters with one all-reduce, ahead of the gathers
report                         what travels for each parameter, and why
"""

from zerocast.fsdp.low_bit_gather import LowBitGather
from zerocast.fsdp.master_weight import MasterWeight
from zerocast.fsdp.precompute import precompute_scales_for_fsdp
from zerocast.fsdp.report import GatherReport, ParameterGather, report

__all__ = [
    "GatherReport",
    "LowBitGather",
    "MasterWeight",
    "ParameterGather",
    "precompute_scales_for_fsdp",
    "report",
]
