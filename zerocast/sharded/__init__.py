"""Low-bit weight all-gathers under torch's FSDP2 (``torch.distributed.fsdp.fully_shard``).

    zerocast.nn.convert(model, recipe, weights="master", low_bit_all_gather=True)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ...
    optimizer.step()
    zerocast.sharded.precompute_scales_for_fsdp(model)

Parameters stay what FSDP2 makes of them, sharded masters in high precision; what it all-gathers are
codes. The gathered weight is, byte for byte, ``zerocast.quantize`` of the whole master.

Note: who writes a master
~~~~~~~~~~~~~~~~~~~~~~~~~
Anybody, by any means, on all ranks or on some: an optimizer, compiled or not, ``load_state_dict``,
``torch.distributed.checkpoint.load``, an average that is copied in, another library by DLPack or by
the address. A gather outside of a backward asks all ranks whether their rows are those that were
cast last, where writes that torch does not see are found by a digest of the rows, and all cast if
one says no. A value that is written again unseen is not cast again.

The first gather after :func:`precompute_scales_for_fsdp` does not ask, for the caller has just said
that the masters are written. A write between the two is cast where torch sees it on all ranks;
where it sees it on some only, these wait in an all-reduce and the others in an all-gather, until
the process group's timeout. So after a write in between that some ranks do not make, or that torch
does not see (``torch._foreach_*`` on entries of a state dict are of these), all ranks call
:func:`mark_written`. So they do before a state dict is taken between a write that torch does not
see and the next gather: ranks without rows would save what a recipe remembers as if nothing had
been written.

Note: an average of the masters
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Masters are DTensors in high precision, so an exponential moving average is a dict of DTensors, each
rank's its own rows, and is saved by ``torch.distributed.checkpoint``::

    def masters(model):
        names = dict(model.named_parameters())
        return {name: value for name, value in model.state_dict().items() if name in names}

    average = {name: value.clone() for name, value in masters(model).items()}
    ...
    optimizer.step()
    for name, value in masters(model).items():
        average[name].lerp_(value, 1 - decay)
    ...
    dcp.save({"model": model.state_dict(), "average": average}, checkpoint_id=path)

To evaluate it keep clones of the masters, call ``model.load_state_dict(average, strict=False)``,
and load the clones afterwards. Delayed scaling and stochastic rounding remember the casts in
between; where a run must go on as if nothing had been, evaluate a second model.

precompute_scales_for_fsdp     casts all masters with one all-reduce, ahead of the gathers
mark_written                   lets the next gather of every master cast it
report                         what travels for each parameter, and why
"""

from zerocast.sharded.low_bit_all_gather import LowBitAllGather
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.precompute import mark_written, precompute_scales_for_fsdp
from zerocast.sharded.report import GatherReport, ParameterGather, report

__all__ = [
    "GatherReport",
    "LowBitAllGather",
    "MasterWeight",
    "ParameterGather",
    "mark_written",
    "precompute_scales_for_fsdp",
    "report",
]
