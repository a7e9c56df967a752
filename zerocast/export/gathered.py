"""The weights of a bucket while ranks gather them: memory is given to each part when it arrives.

What is gathered in a staging buffer gets memory where it is stored when the gather ends.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from zerocast.backends import backend_for
from zerocast.cast.matrices import Matrices
from zerocast.cast.scale_gather import ScaleGather
from zerocast.cast.shard_spec import NO_CODES, ShardSpec
from zerocast.comm import Communicator
from zerocast.layout import NOTHING, Owners
from zerocast.tensors import QuantizedStorage, prepare_expansion
from zerocast.tensors.ledger import announce
from zerocast.tensors.weight_operands import OwnScales

ONE_BY_ONE_FROM = 1 << 20
"""Weights of so many elements or more are gathered one by one, each where its codes are to lie: a
collective more takes less time than copying them would. So is the largest of a plan."""


def allocate_codes(weights: Iterable[QuantizedStorage], device: torch.device) -> None:
    """Allocate the whole codes, all of which a gather writes, of the weights that have none."""
    for weight in weights:
        if weight.planes[0].codes_name not in weight.buffers:
            name = weight.planes[0].codes_name
            codes = weight.form.buffers[name]
            weight.buffers[name] = torch.empty(codes.shape, dtype=codes.dtype, device=device)
    announce()


def start_scales(
    comm: Communicator,
    owners: Owners,
    cast: Mapping[str, QuantizedStorage],
    own: Mapping[str, Sequence[OwnScales]],
    into: Mapping[str, QuantizedStorage],
) -> Callable[[], None]:
    """Begin to bring the scales of the weights ``cast`` to every rank of ``comm``, of each matrix
    those that this rank has in ``own``; what is returned ends that, and stores them in ``into``,
    which gets memory for them then.
    """
    specs = [ShardSpec(name, True, each, NOTHING, NO_CODES, None) for name, each in cast.items()]
    matrices, group = Matrices(specs), {comm: range(len(specs))}
    planes = {i: (each.storage, each.storage.planes[:1]) for i, each in enumerate(matrices.specs())}
    gather = ScaleGather(comm, planes, matrices.owners(group, {comm: owners})[comm], is_kept=False)
    rooms = [room.entries for of_planes in gather.own.values() for room in of_planes.values()]
    torch._foreach_copy_(rooms, [each.entries for name in cast for each in own[name]])
    wait = gather.start()

    def finish() -> None:
        wait()
        for name, shard in cast.items():
            weight, scales = into[name], shard.planes[0].scales_name
            weight.buffers[scales] = weight.form.buffers[scales].allocate(shard.device)
        stored = [matrix for name in cast for matrix in into[name].matrices]
        backend = backend_for(specs[0].storage.device)
        for launch in prepare_expansion(stored, gather.compact, backend):
            launch()

    return finish
