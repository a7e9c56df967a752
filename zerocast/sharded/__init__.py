"""zerocast.sharded: FSDP2 (``torch.distributed.fsdp.fully_shard``) all-gathers weights in codes.

    zerocast.nn.convert(model, recipe, weights="master", low_bit_all_gather=True)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ...
    optimizer.step()
    zerocast.sharded.precompute_scales_for_fsdp(model)

Parameters stay sharded masters in high precision, and FSDP2 all-gathers their codes. The gathered
weight is, byte for byte, ``zerocast.quantize`` of the whole master. Tensor-parallel weights, whose
masters torch's DTensor splits, are cast alike.

    master_weight      the parameter, and the two methods that FSDP2 calls
    all_gather         what is known of one weight, and what is made of what was gathered
    all_gather_input   what a rank has of it between casts, and sends
    casts              when a cast is due, what is cast together, precompute_scales_for_fsdp
    state              the recipe's state of a master, and the values that were cast
    updates            an optimizer's update that measures masters for their next cast
    placement          what DTensor and FSDP2 say about a weight
    parallel_linear    what the forward of a layer multiplies by
    report             what is gathered, and why

Note: who writes a master
~~~~~~~~~~~~~~~~~~~~~~~~~
Any code may write a master, by any means, on all ranks or on some: an optimizer, compiled or not,
``load_state_dict``, ``torch.distributed.checkpoint.load``, an average that is copied in, another
library by DLPack or by the address. A gather outside of a backward asks all ranks whether their
rows are those that were cast last, and all ranks cast if one answers no. A digest of the rows finds
the writes that torch does not see. If such a write leaves the same values, they are not cast again.

The first gather after :func:`precompute_scales_for_fsdp` does not ask, because the caller has just
said that the masters are written. A write between the two is cast if torch sees it on all ranks. If
torch sees it on some ranks only, these wait in an all-reduce and the others in an all-gather, until
the process group's timeout. So all ranks call :func:`mark_written`

* after a write in between that some ranks do not make, or that torch does not see
  (``torch._foreach_*`` on entries of a state dict is one of these);
* after a write that torch does not see between a step of :class:`zerocast.optim.FusedAdamW` and the
  next cast, which begins with the amaxes that the step has taken;
* before a state dict is taken between a write that torch does not see and the next gather: ranks
  without rows would save the recipe's state as if nothing had been written.

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
and load the clones afterwards. The state of delayed scaling and of stochastic rounding advances
with the casts in between; if a run must resume as if there had been none, evaluate a second model.

precompute_scales_for_fsdp     casts all masters with one all-reduce, ahead of the gathers
verify_gathers                 compares what ranks hold after their gathers
mark_written                   lets the next gather of every master cast it
report                         says what is gathered for each parameter, and why
"""

from zerocast.sharded.all_gather import LowBitAllGather
from zerocast.sharded.casts import mark_written, precompute_scales_for_fsdp, verify_gathers
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.report import GatherReport, ParameterGather, report

__all__ = [
    "GatherReport",
    "LowBitAllGather",
    "MasterWeight",
    "ParameterGather",
    "mark_written",
    "precompute_scales_for_fsdp",
    "report",
    "verify_gathers",
]
