"""A layer's recipe state as one tensor of bytes, and that of its master in a state dict.

Code that shards, broadcasts, offloads or writes state dicts (torch's own, accelerate's,
safetensors) reads shape, dtype and device of every entry, as of a plain tensor, and
``torch.distributed.checkpoint`` loads into tensors of the saved size. So the tensors of a recipe's
state are saved as one, uint8 [n], behind a header that says what they are; n depends on recipe and
layer alone. As integers they keep their bits when a model changes its dtype.

    8 bytes               the length of the header, little-endian
    the header            JSON: what the state belongs to, and names, dtypes and shapes
    the tensors' bytes    one after the other
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zerocast.errors import InputError
from zerocast.recipes import recipe_to_values
from zerocast.sharded import MasterWeight
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.placement import is_sharded, replicated_like, to_local
from zerocast.sharded.state import check_saved_state

_LENGTH = 8  # bytes
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.int32, torch.int64)}


class SavedState(NamedTuple):
    """The contents that :func:`pack` has put into a tensor: ``owner``, which is JSON, and
    ``tensors``.
    """

    owner: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def pack(owner: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return one tensor, uint8 [n] on the CPU, of the state ``tensors`` of ``owner``."""
    specs = {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    header = json.dumps({"owner": owner, "tensors": specs}).encode()
    head = len(header).to_bytes(_LENGTH, "little") + header
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    parts += [t.detach().cpu().reshape(-1).view(torch.uint8) for t in tensors.values()]
    with torch.inference_mode(False):
        return torch.cat(parts)


def unpack(packed: Any, name: str) -> SavedState:
    """Return what :func:`pack` was given, on the CPU; ``name`` is the layer's, for errors.

    Raises:
        InputError: for anything that :func:`pack` does not make.
    """
    try:
        data = (to_local(packed) if is_sharded(packed) else packed).detach().cpu()
        head = bytes(data[:_LENGTH].tolist())
        end = _LENGTH + int.from_bytes(head, "little")
        header = json.loads(bytes(data[_LENGTH:end].tolist()))
        owner, tensors = dict(header["owner"]), {}
        for key, (dtype, shape) in header["tensors"].items():
            start, end = end, end + math.prod(shape) * _DTYPES[dtype].itemsize
            tensors[key] = data[start:end].clone().view(_DTYPES[dtype]).reshape(shape)
        if (data.dtype, tuple(data.shape)) != (torch.uint8, (end,)):
            raise ValueError
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError):
        given = (
            f"{packed.dtype} {list(packed.shape)} on {packed.device}"
            if isinstance(packed, torch.Tensor)
            else type(packed).__name__
        )
        raise InputError(
            f"the recipe state of {name} must be the tensor of bytes that its layer's state dict "
            f"has, whole and unchanged, got {given}; take this entry out of the state dict to "
            f"start without it."
        ) from None
    return SavedState(owner, tensors)


# --- the state of masters (:mod:`zerocast.sharded`) ---

WEIGHT_STATE = "weight_state"
"""The entry of a layer's state dict that holds the recipe's state of its master."""


def reserve_state(layer: torch.nn.Linear) -> None:
    """Reserve an entry of the state dict for the recipe's state of the layer's master.

    torch's functions for state dicts of sharded models look for each entry among parameters and
    buffers. This buffer takes the entry's place and is empty; the content is made when the layer is
    saved.
    """
    empty = torch.empty(0, dtype=torch.uint8, device=layer.weight.device)
    layer.register_buffer(WEIGHT_STATE, empty)


def state_to_save(weight: torch.Tensor) -> torch.Tensor:
    """Return a master's recipe state, and whether its cast is due, as one tensor.

    It is for a state dict that holds the master, too.
    """
    master = to_local(weight)
    assert isinstance(master, MasterWeight)
    gather = master.low_bit_all_gather
    is_due = int(gather.is_due(master.value))  # of one length in JSON
    owner = {"recipe": recipe_to_values(gather.recipe), "is_due": is_due}
    return replicated_like([weight], pack(owner, gather.state))


def state_to_load(weight: torch.Tensor, saved: object) -> SavedState | None:
    """Return what :func:`state_to_save` was given; nothing for a weight that is not a master. None
    for no entry, and for the empty buffer, which torch's ``set_model_state_dict`` fills in for one.

    Raises:
        InputError: if it was saved under another recipe, or is no state that casts leave.
    """
    if (gather := gather_of(weight)) is None:
        return SavedState({}, {})
    is_empty = isinstance(saved, torch.Tensor) and saved.dtype == torch.uint8 and not saved.numel()
    if saved is None or is_empty:
        return None
    owner, tensors = unpack(saved, gather.name)
    remedy = (
        "convert with the recipe that it was saved under, or take the layer's 'weight_state' out "
        "of the state dict to start without it"
    )
    recipe, own = gather.recipe, gather.state
    check_saved_state(gather.name, recipe, own, owner.get("recipe"), tensors, remedy)
    return SavedState(owner, tensors)


def load_saved_state(weight: torch.Tensor, state: SavedState) -> None:
    """Resume from what :func:`state_to_load` returned; do nothing for a weight that is not a
    master.
    """
    if (gather := gather_of(weight)) is not None:
        master: Any = to_local(weight)
        is_due = bool(state.owner.get("is_due", True))
        gather.load_state(state.tensors, master.value, is_due=is_due)
