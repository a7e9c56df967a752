"""zerocast.sharded: low-bit all-gather of weights under FSDP2.

    zerocast.nn.convert(model, recipe, weights="master", low_bit_all_gather=True)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ...
    optimizer.step()
    zerocast.sharded.precompute_scales_for_fsdp(model)

Parameters stay sharded masters in high precision, and FSDP2
(``torch.distributed.fsdp.fully_shard``) all-gathers their codes. The gathered weight equals
``zerocast.quantize`` of the whole master, byte for byte. Tensor-parallel weights, whose masters are
split by DTensor, are cast in the same way.

    master_weight      the parameter, and the two methods that FSDP2 calls
    all_gather         the cast of one weight, and the weight built from gathered codes
    all_gather_input   the codes and scales that a rank keeps between casts and sends
    casts              when a cast is due, what is cast together, precompute_scales_for_fsdp
    state              the recipe's state of a master, and the values that were cast
    updates            an optimizer's update that measures masters for their next cast
    placement          the placement of a weight, as DTensor and FSDP2 report it
    parallel_linear    the operand of a layer's forward
    report             what is gathered, and why

Note: who writes a master
~~~~~~~~~~~~~~~~~~~~~~~~~
Any code may write a master, by any means, on all ranks or on some: an optimizer, compiled or not,
``load_state_dict``, ``torch.distributed.checkpoint.load``, a copy of an average, or another library
through DLPack or the address. A gather outside of a backward checks on all ranks whether their rows
have changed since the last cast, and all ranks cast if any have. A digest of the rows detects
writes that torch does not see. Rows that such a write leaves unchanged are not cast again.

The first gather after :func:`precompute_scales_for_fsdp` skips this check. A write between the two
is cast if torch sees it on all ranks. If torch sees it on some ranks only, these block in an
all-reduce and the others in an all-gather, until the process group's timeout. Therefore all ranks
call :func:`mark_written`

* after a write in between that some ranks do not make, or that torch does not see
  (such as ``torch._foreach_*`` on entries of a state dict);
* after a write that torch does not see between a step of :class:`zerocast.optim.FusedAdamW` and the
  next cast, which uses the amaxes of that step;
* before taking a state dict between a write that torch does not see and the next gather: ranks
  without rows would save the recipe's state as if nothing had been written.

Note: an average of the masters
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Masters are DTensors in high precision. An exponential moving average is therefore a dict of
DTensors, of which each rank holds its rows. Save it by ``torch.distributed.checkpoint``::

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

To evaluate the average, clone the masters, call ``model.load_state_dict(average, strict=False)``,
and load the clones afterwards. The state of delayed scaling and of stochastic rounding advances
with the casts in between. If training must not be affected by them, evaluate a second model.

precompute_scales_for_fsdp     casts all masters with one all-reduce, before the gathers
verify_gathers                 compares the gathered bytes between ranks
mark_written                   makes the next gather of every master cast it
report                         lists what is gathered for each parameter, and why
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
