"""The tensors of a bucket, as a checkpoint stores them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zerocast.comm import Communicator, raising_together
from zerocast.export.entries import Entry, whole
from zerocast.export.stages import NamedTensors
from zerocast.export.tp_parts import whole_weights
from zerocast.export.unusable_values import check_finite, check_tensor_scale
from zerocast.tensors import QuantizedStorage


@torch.no_grad()
def named_tensors(
    comm: Communicator,
    bucket: Sequence[Entry],
    gather: Callable[[], Mapping[str, QuantizedStorage]],
) -> NamedTensors:
    """Return the tensors of ``bucket`` as a checkpoint stores them. Collective.

    Args:
        comm: the ranks of the export.
        bucket: the entries.
        gather: returns the weights that were cast, by name, whole.

    Raises:
        NonFiniteError: on every rank, if a weight holds a NaN or an infinity.
    """
    cast = dict(gather())
    for entry in bucket:
        if entry.recipe is not None and entry.name not in cast:
            held: Any = entry.tensor
            cast[entry.name] = held.quantized_storage
    parts = {entry.name: entry.tp_shard for entry in bucket if entry.tp_shard is not None}
    cast |= whole_weights({name: (cast.pop(name), part) for name, part in parts.items()})
    tensors: NamedTensors = {}
    judged: dict[str, torch.Tensor] = {}  # scales, and unquantized values
    for entry in bucket:
        if entry.recipe is None:
            value = whole(entry.tensor, entry.dtype)
            tensors |= entry.named(value)
            if entry.is_value:
                judged[entry.name] = value
            continue
        storage = cast[entry.name]
        check_tensor_scale(entry.name, entry.dialect, storage)
        for part, tensor in entry.dialect.encode(storage).items():
            tensors[entry.stored_name(part)] = tensor
            if part == entry.dialect.scales:
                judged[entry.name] = entry.judged(tensor)
    with raising_together(comm):  # unquantized values may differ between ranks
        check_finite(judged)
    return tensors
