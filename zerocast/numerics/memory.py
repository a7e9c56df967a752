"""Says which tensors backends and transports may read and write by address."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_HOLDS_MEMORY = torch.Tensor.__torch_dispatch__


def why_no_memory(tensor: torch.Tensor) -> str | None:
    """Why the elements of ``tensor`` do not stand as its dtype says, in memory of its own, and what
    to do; None where they do. Strides are not looked at.
    """
    kind = type(tensor)
    if kind.__torch_dispatch__ is not _HOLDS_MEMORY:
        return (
            f"a {kind.__name__}, which only stands for other tensors; give a plain tensor: "
            ".to_local() of a DTensor, an FP32 master in place of a quantized weight"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        return f"a {layout} tensor; give a dense one, such as .to_dense()"
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(
        tensor
    ):
        return "a tensor of a torch.func transform; call this outside of the transform"
    if tensor.device.type == "meta":
        return "a tensor on the meta device, which holds no values; move it by to_empty and fill it"
    if tensor.is_neg() or tensor.is_conj():
        return (
            "a view whose signs torch changes when it reads it; call .resolve_neg().resolve_conj()"
        )
    needed = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() and tensor.is_contiguous() and held < needed:
        return (
            f"a tensor of {tensor.numel()} elements whose memory was given back or cut, {held} of "
            f"{needed} bytes; give one that holds its values"
        )
    return None


def why_unusable(tensor: object, dtypes: Sequence[torch.dtype], device: torch.device) -> str | None:
    """What ``tensor`` is instead of a contiguous tensor of one of ``dtypes`` on ``device`` with
    memory of its own, and what to do; None where it is one.
    """
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    if tensor.dtype not in dtypes:
        remedy = "use .view(torch.uint8)" if torch.uint8 in dtypes else "convert it first"
        return f"{tensor.dtype}; {remedy}"
    if tensor.device != device:
        return f"one on {tensor.device}; move it first"
    problem = why_no_memory(tensor)
    if problem is None and not tensor.is_contiguous():
        problem = (
            f"shape {tuple(tensor.shape)} with strides {tensor.stride()}; call .contiguous() and "
            f"keep the result"
        )
    return problem
