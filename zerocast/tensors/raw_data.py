"""replace_raw_data: moves the codes of a weight into a buffer that the caller gives."""

from __future__ import annotations

import torch

from zerocast.arguments import why_unusable
from zerocast.errors import InputError
from zerocast.tensors.quantized_tensor import QuantizedTensor
from zerocast.tensors.storage import QuantizedStorage


def replace_raw_data(
    tensor: QuantizedTensor,
    new_raw_data: torch.Tensor,
    new_columnwise_data: torch.Tensor | None = None,
) -> None:
    """Move a weight's codes into a buffer of the caller; the value stays the same.

    Every alias of the weight uses the new buffer, and derived copies stay valid. Use it to make the
    codes of many weights slices of one flat buffer for an all-gather.

    Args:
        tensor: the weight.
        new_raw_data: uint8, contiguous, on the weight's device, with as many bytes as
            ``tensor.rowwise_data``: in its shape or as a 1-D slice. Overwritten with the codes.
        new_columnwise_data: the same for ``tensor.columnwise_data``, if columnwise codes are
            quantized independently and so are gathered, too (MX, row-wise FP8). None does not move
            them.

    Raises:
        InputError: if a buffer does not match. Nothing has been written.
    """
    if not isinstance(tensor, QuantizedTensor):
        raise InputError(f"replace_raw_data needs a QuantizedTensor, got {type(tensor).__name__}.")
    storage = tensor.quantized_storage
    new = {"rowwise_data": _raw_data("new_raw_data", storage, "rowwise_data", new_raw_data)}
    if new_columnwise_data is not None:
        if "columnwise_data" not in storage.gathered:
            raise InputError(
                f"new_columnwise_data is for weights whose columnwise codes are gathered, got a "
                f"weight of {storage.recipe}, which gathers {', '.join(storage.gathered)}; leave "
                "it out."
            )
        new["columnwise_data"] = _raw_data(
            "new_columnwise_data", storage, "columnwise_data", new_columnwise_data
        )
    old = {name: storage.buffers[name] for name in new}
    if {_memory_of(each) for each in old.values()} & {_memory_of(each) for each in new.values()}:
        old = {name: codes.clone() for name, codes in old.items()}  # they may overlap
    for name, buffer in new.items():
        buffer.copy_(old[name])
        storage.replace(name, buffer)


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _raw_data(
    argument: str, storage: QuantizedStorage, name: str, given: torch.Tensor
) -> torch.Tensor:
    """Return ``given`` in the shape of the buffer ``name``."""
    old = storage.buffers[name]
    problem = why_unusable(given, (torch.uint8,), old.device)
    if problem is None and given.shape not in (old.shape, (old.numel(),)):
        problem = f"shape {tuple(given.shape)}"
    if problem is not None:
        raise InputError(
            f"{argument} must be a contiguous torch.uint8 tensor on the weight's device "
            f"{old.device} with allocated storage, for the {old.numel()} bytes of the weight's "
            f"codes in shape {tuple(old.shape)} or ({old.numel()},), got {problem}."
        )
    return given.detach().view(old.shape)
