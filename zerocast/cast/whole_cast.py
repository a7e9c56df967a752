"""The reference of a sharded cast: the weight cast whole by the reference backend.

It needs the memory of a whole gathered FP32 master on every rank, and the time of plain torch. It
is used for a sample of the weights, or for a weight that was found wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from zerocast.backends import use_backend
from zerocast.comm import Communicator
from zerocast.layout import Extent
from zerocast.numerics import decode, unpack_nibbles
from zerocast.tensors import QuantizedStorage
from zerocast.tensors.digest import each_digest
from zerocast.tensors.quantize import quantize_into


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A weight as this rank holds it when it is gathered, and its owners.

    Attributes:
        name: the weight's name in messages.
        storage: its bytes, with its recipe state.
        owners: the ranks that own elements of it, with these elements.
        amax_group: a label; weights of one group of ranks with the same one share a tensor amax.
        is_compared: False for a weight that is used for its amax only.
    """

    name: str
    storage: QuantizedStorage
    owners: Sequence[tuple[int, Extent]]
    amax_group: str | None
    is_compared: bool = True


@dataclass(frozen=True, slots=True)
class WholeCast:
    """A weight that was cast whole.

    Attributes:
        storage: the result of the cast.
        master: FP32, of the shape of the weight, or of its tensor-parallel shard.
        before: the recipe state and amax before the cast, by name.
        amaxes: int32, the amaxes of blocks and tensor in the cast, raised to those of the weights
            and shards that share them.
        owned, gathered: digests of this rank's shards of the masters that were gathered for it, and
            of what was gathered. The sum of ``owned`` over ranks is ``gathered``, unless bytes
            changed.
    """

    storage: QuantizedStorage
    master: torch.Tensor
    before: dict[str, torch.Tensor]
    amaxes: torch.Tensor
    owned: int = 0
    gathered: int = 0


def cast_whole(
    comm: Communicator,
    weights: Sequence[HeldWeight],
    masters: Sequence[torch.Tensor | None],
) -> WholeCast:
    """Cast the first of ``weights`` whole.

    Collective over ``comm``, and over the ranks that hold other tensor-parallel shards.

    Args:
        comm: the ranks that share the weights.
        weights: the weight, then the others of its amax group.
        masters: this rank's shard of each; None if it owns nothing.
    """
    sums: list[torch.Tensor] = []
    shared: torch.Tensor | None = None  # the largest tensor amax of each matrix
    for weight, master in list(zip(weights, masters, strict=True))[1:]:
        whole = gather_master(comm, weight, master, sums)
        amaxes = cast_again(weight.storage, whole).amaxes.view(-1, weight.storage.amax_slots)
        shared = amaxes[:, -1] if shared is None else torch.maximum(shared, amaxes[:, -1])
    first = weights[0].storage
    least = None
    if shared is not None:
        least = shared.new_zeros(len(shared), first.amax_slots)
        least[:, -1] = shared
    made = cast_again(first, gather_master(comm, weights[0], masters[0], sums), least)
    owned, gathered = torch.stack(sums).sum(0).tolist()
    return replace(made, owned=owned, gathered=gathered)


def cast_again(
    storage: QuantizedStorage, master: torch.Tensor, least: torch.Tensor | None = None
) -> WholeCast:
    """Repeat the latest cast of a weight from its whole master, by the reference, in new memory.

    Amaxes are at least ``least``, int32 as :attr:`WholeCast.amaxes`.
    """
    recipe = storage.recipe
    made = QuantizedStorage.empty(
        storage.shape, storage.dtype, recipe, storage.device,
        columnwise=storage.has_columnwise, tp_shard=storage.tp_shard,
    )  # fmt: skip
    kept = [name for name in (*recipe.state, "amax") if name in storage.buffers]
    for name in kept:
        made.buffers[name].copy_(storage.buffers[name])
    if recipe.state:
        recipe.rewind(made.buffers)
    before = {name: made.buffers[name].clone() for name in kept}
    with use_backend("reference"):
        amaxes = quantize_into(made, master, least=None if least is None else least.view(-1))
    return WholeCast(made, master, before, amaxes)


def gather_master(
    comm: Communicator,
    weight: HeldWeight,
    master: torch.Tensor | None,
    sums: list[torch.Tensor],
) -> torch.Tensor:
    """Return the weight's whole master, FP32, of the weight's shape. Collective.

    Append the digests of this rank's shard and of the whole, int64 [2], to ``sums``.
    """
    places = dict(weight.owners)
    counts = [places[rank].size if rank in places else 0 for rank in range(comm.size)]
    whole = torch.empty(sum(counts), dtype=torch.float32, device=weight.storage.device)
    own = whole[:0]
    if counts[comm.rank]:
        assert master is not None, weight.name
        own = master.detach().reshape(-1).float()
    parts = comm.all_gather_parts(own, counts)
    for rank, extent in weight.owners:
        whole[extent.start : extent.end] = parts[rank]
    start = places[comm.rank].start if counts[comm.rank] else 0
    sums.append(each_digest([own, whole], [start, 0]))
    return whole.view(weight.storage.shape)


# --- what differs ---


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element in which a weight differs from what was cast.

    Attributes:
        buffer: the name of the buffer.
        place: the element's index in it; codes of 4 bits are counted individually.
        held, cast: the values, as text.
        count: how many elements of the buffer differ.
        owner: for rowwise codes the rank whose shard holds the element; -1 for other buffers.
    """

    buffer: str
    place: tuple[int, ...]
    held: str
    cast: str
    count: int
    owner: int


def first_difference(weight: HeldWeight, made: QuantizedStorage) -> Difference | None:
    """Compare all buffers of ``weight`` with those of ``made``; return the first difference."""
    fmt = weight.storage.recipe.numerics.fmt
    for name, held in weight.storage.buffers.items():
        codes = name.endswith("_data")
        pair = [_elements(each, fmt.bits if codes else 0) for each in (held, made.buffers[name])]
        differ = (pair[0] != pair[1]).any(-1)
        if not differ.any():
            continue
        at, place = int(differ.view(-1).nonzero()[0]), tuple(differ.nonzero()[0].tolist())
        texts: list[str] = []
        for each, buffer in zip(pair, (held, made.buffers[name]), strict=True):
            element = each.reshape(-1, each.shape[-1])[at]
            if codes:
                texts.append(f"0x{int(element):X} ({float(decode(element, fmt)):g})")
            else:
                texts.append(_text(element.contiguous().view(buffer.dtype)[0]))
        owner = next((r for r, e in weight.owners if e.start <= at < e.end), -1)
        count = int(differ.sum())
        return Difference(
            name, place, texts[0], texts[1], count, owner if name == "rowwise_data" else -1
        )
    return None


def _elements(buffer: torch.Tensor, code_bits: int) -> torch.Tensor:
    """Return a buffer as uint8 [*shape, bytes of an element]; for 4-bit codes one per nibble."""
    if code_bits == 4:
        return unpack_nibbles(buffer, 2 * buffer.shape[-1]).unsqueeze(-1)
    return buffer.contiguous().view(-1).view(torch.uint8).view(*buffer.shape, buffer.itemsize)


def _text(value: torch.Tensor) -> str:
    """Return a scale, or a value of recipe state, as text that differs for different values."""
    if value.dtype == torch.float32:
        return f"{value.item():.9g}"
    return f"0x{value.item():02X}" if value.dtype == torch.uint8 else str(value.item())
