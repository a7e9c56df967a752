"""Prepares the tensors of collectives: checked, flat, and as bytes where the dtype does not matter.

Every communicator checks its arguments here, so all of them refuse the same calls with the same
message, on a single rank, too.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from zerocast.arguments import check_integer, why_no_memory
from zerocast.errors import InputError

Parts: TypeAlias = Sequence[int] | None
"""The number of elements of a buffer that are each rank's part, in rank order; None means equal
parts.
"""

_DTYPES = {
    "all_reduce_max_": (torch.int32,),
    "all_reduce_sum_": (torch.float32, torch.float64, torch.int32, torch.int64),
    "reduce_scatter_sum": (torch.float32,),
}
"""The dtypes that each collective can reduce."""


def reduce_operand(what: str, buffer: torch.Tensor) -> torch.Tensor:
    """Return ``buffer`` of the reduction ``what`` as a 1-D tensor outside autograd, sharing its
    memory.

    Raises:
        InputError: where ``buffer`` is not contiguous, or of a dtype that cannot be reduced.
    """
    flat = _flat(what, buffer)
    if flat.dtype not in _DTYPES[what]:
        names = ", ".join(str(dtype) for dtype in _DTYPES[what])
        raise InputError(
            f"{what} takes a tensor of {names}, got {buffer.dtype}; reduce in one of these."
        )
    return flat


def as_bytes(what: str, buffer: torch.Tensor) -> torch.Tensor:
    """Return ``buffer`` as 1-D uint8 outside autograd, sharing its memory.

    A transport that only moves data needs no other dtype.

    Raises:
        InputError: where ``buffer`` is not contiguous.
    """
    return _flat(what, buffer).view(torch.uint8)


def _flat(what: str, buffer: torch.Tensor) -> torch.Tensor:
    _check_memory(what, buffer)
    return buffer.detach().view(-1)


def _check_memory(what: str, buffer: torch.Tensor) -> None:
    if not isinstance(buffer, torch.Tensor):
        raise InputError(f"{what} takes a tensor, got {type(buffer).__name__}.")
    problem = why_no_memory(buffer)
    if problem is not None:
        raise InputError(f"{what} takes a tensor with allocated storage, got {problem}.")
    if not buffer.is_contiguous():
        raise InputError(
            f"{what} works in place on a contiguous tensor, got shape {tuple(buffer.shape)} with "
            f"strides {buffer.stride()}; call it on a .contiguous() copy and copy the result back."
        )


def gather_operands(
    buffer: torch.Tensor, counts: Parts, size: int
) -> tuple[torch.Tensor, list[int]]:
    """Return ``buffer`` of an all-gather as bytes, and how many of them each rank's part has, in
    rank order.

    Args:
        counts: the elements of each part; None means equal parts.

    Raises:
        InputError: where the parts do not fill ``buffer``, or it is not 1-D and contiguous.
    """
    return as_bytes("all_gather_", buffer), _parts("all_gather_", buffer, counts, size)


def check_gather(buffer: torch.Tensor, counts: Parts, size: int) -> None:
    """Raise what :func:`gather_operands` raises, for a group that has nothing to send."""
    _check_memory("all_gather_", buffer)
    _parts("all_gather_", buffer, counts, size)


class AllToAllOperands(NamedTuple):
    """The operands of an all-to-all.

    Attributes:
        output, buffer: uint8, 1-D.
        takes, gives: the bytes of their parts, in rank order.
        is_equal: whether all parts are equally long, on every rank.
    """

    output: torch.Tensor
    buffer: torch.Tensor
    takes: list[int]
    gives: list[int]
    is_equal: bool

    @property
    def is_in_place(self) -> bool:
        """Whether it writes over what it sends."""
        return self.output.numel() > 0 and self.output.data_ptr() == self.buffer.data_ptr()


def exchange_operands(
    output: torch.Tensor, buffer: torch.Tensor, received: Parts, sent: Parts, size: int
) -> AllToAllOperands:
    """Return the operands of an all-to-all, checked and as bytes.

    Raises:
        InputError: where parts do not fill their tensor, one is not 1-D and contiguous, their
            dtypes or devices differ, or parts of one tensor that is both are not equal.
    """
    out, takes = as_bytes("all_to_all", output), _parts("all_to_all", output, received, size)
    flat, gives = as_bytes("all_to_all", buffer), _parts("all_to_all", buffer, sent, size)
    if (output.dtype, output.device) != (buffer.dtype, buffer.device):
        raise InputError(
            f"all_to_all takes an output of the buffer's dtype and device, {buffer.dtype} on "
            f"{buffer.device}, got {output.dtype} on {output.device}."
        )
    given = AllToAllOperands(out, flat, takes, gives, received is None and sent is None)
    if given.is_in_place and len({*takes, *gives}) > 1:
        raise InputError(
            f"all_to_all in place takes equal parts, got {gives} and {takes} bytes; give a "
            "separate output."
        )
    return given


def _parts(what: str, buffer: torch.Tensor, counts: Parts, size: int) -> list[int]:
    """Return the bytes of each part."""
    if buffer.dim() != 1:
        raise InputError(
            f"{what} takes a 1-D tensor, got shape {tuple(buffer.shape)}; view(-1) first."
        )
    numel, itemsize = buffer.numel(), buffer.element_size()
    if counts is None:
        if numel % size:
            raise InputError(
                f"{what} without counts takes a multiple of {size} elements, one equal part per "
                f"rank, got {numel}; pad the buffer or give counts."
            )
        return [numel // size * itemsize] * size
    try:
        counts = [operator.index(count) for count in counts]
    except TypeError as error:
        raise InputError(
            f"{what} takes a list of ints or None as counts, got {counts!r}."
        ) from error
    if len(counts) != size or sum(counts) != numel or min(counts) < 0:
        raise InputError(
            f"{what} takes one count, 0 or more, for each of the {size} ranks, {numel} in all "
            f"as the buffer holds, got {len(counts)} counts with sum {sum(counts)} and least "
            f"{min(counts, default=0)}."
        )
    return [count * itemsize for count in counts]


def scatter_operands(
    output: torch.Tensor, buffer: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``output`` and ``buffer`` of a reduce-scatter as 1-D tensors outside autograd.

    Raises:
        InputError: for a wrong dtype, a tensor that is not contiguous, or lengths that do not fit.
    """
    output = reduce_operand("reduce_scatter_sum", output)
    buffer = reduce_operand("reduce_scatter_sum", buffer)
    if buffer.numel() != size * output.numel():
        raise InputError(
            f"reduce_scatter_sum takes a buffer of {size * output.numel()} elements, {size} ranks "
            f"by {output.numel()} of output, got {buffer.numel()}; pad it to a multiple of {size}."
        )
    return output, buffer


def broadcast_operand(buffer: torch.Tensor, root: int, size: int) -> torch.Tensor:
    """Return ``buffer`` of a broadcast as bytes.

    Raises:
        InputError: where it is not contiguous, or ``root`` is not a rank of the group.
    """
    flat = as_bytes("broadcast_", buffer)
    check_integer("broadcast_'s root, a rank of this group,", root, 0, size - 1)
    return flat


@contextmanager
def on_device(buffer: torch.Tensor, device: torch.device | None) -> Iterator[torch.Tensor]:
    """Give the context ``buffer`` if ``device`` is None; else a copy on ``device``, copied back
    after.

    A GPU's tensor is staged in pinned host memory, to which it is copied at the bus's full speed;
    torch keeps that memory for the next time.
    """
    if device is None:
        yield buffer
        return
    pinned = buffer.is_cuda and device.type == "cpu"
    staged = torch.empty_like(buffer, device=device, pin_memory=pinned)
    staged.copy_(buffer)
    yield staged
    buffer.copy_(staged)


def pickled(obj: Any) -> bytes:
    """Return what an all-gather of objects sends of ``obj``.

    Raises:
        InputError: where it cannot be pickled.
    """
    try:
        return pickle.dumps(obj)
    except Exception as error:  # pickle calls methods of the object, which may raise anything
        raise InputError(
            f"all_gather_object takes what pickle can copy, got a {type(obj).__name__}: {error}"
        ) from error
