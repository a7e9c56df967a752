"""Random changes of values, tensors and bytes: what :mod:`fuzz_targets` feeds to readers."""

import copy
import dataclasses
import math
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import zerocast

ODD = (
    None, True, False, 0, 1, -1, 2, 3, 16, 31, 128, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, 2**64,
    -(2**63), 10**40, 0.5, -0.0, math.nan, math.inf, -math.inf, 1e300, "", "x", "\0", "\ud800",
    "../x", "a" * 300, "rowwise_data", "amax", "float32", "__class__", b"x", (), (1,), [], [[]],
    {}, {"$tensor": "x"}, {"$tuple": [1]}, {"$dict": [[[], 1]]}, object, torch.float32,
    torch.bfloat16, torch.uint8,
)  # fmt: skip
"""What stands where something else should."""

JSON = tuple(value for value in ODD if isinstance(value, None | bool | int | float | str | list))
JSON += ({}, {"$tensor": "x"}, {"$tuple": [1]}, {"$dict": [[[], 1]]})
"""Those that JSON can say."""

ODD_NAMES = (
    "weight", "a..weight", "a.weight.weight", "forward.weight", "files.weight", "a.forward",
    "training.weight", "coded.weight", "lm_head.weight", "x" * 300, "../x.weight", "\n",
)  # fmt: skip
"""Names of tensors that a module has, too, or that are no names of parameters."""

_DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def changed(value: Any, draw: random.Random, odd: tuple[Any, ...] = ODD) -> Any:
    """Return ``value`` with one change somewhere inside of it; ``value`` itself stays."""
    if isinstance(value, dict) and value and draw.random() < 0.95:
        made, key, action = dict(value), draw.choice(list(value)), draw.random()
        if action < 0.8:
            made[key] = changed(value[key], draw, odd)
        elif action < 0.87:
            del made[key]
        elif action < 0.95:
            made[key] = value[draw.choice(list(value))]
        else:
            made[draw.choice([each for each in odd if isinstance(each, str)])] = made.pop(key)
        return made
    if isinstance(value, list | tuple) and value and draw.random() < 0.9:
        items, at, action = list(value), draw.randrange(len(value)), draw.random()
        if action < 0.8:
            items[at] = changed(items[at], draw, odd)
        elif action < 0.87:
            del items[at]
        elif action < 0.94:
            items.append(items[at])
        else:
            items[at] = draw.choice(items)
        return items if type(value) is list else tuple(items)
    if isinstance(value, torch.Tensor) and draw.random() < 0.9:
        return odd_tensor(value, draw)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and draw.random() < 0.9:
        made = copy.copy(value)
        field = draw.choice(dataclasses.fields(value)).name
        object.__setattr__(made, field, changed(getattr(made, field), draw, odd))
        return made
    if type(value) is int and draw.random() < 0.5:
        return value + draw.choice((-1, 1, 16, -16, value, -2 * value))
    if type(value) is str and value and draw.random() < 0.5:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice(("", "0", "-", "\0", "_", value)) + value[at + 1 :]
    return draw.choice(odd)


def odd_tensor(tensor: torch.Tensor, draw: random.Random) -> Any:
    """Return something like ``tensor``: of other values, shape, strides, dtype, kind or memory."""
    if not has_memory(tensor):  # of an earlier change: torch itself would read it
        return tensor
    try:
        return draw.choice(_WAYS)(tensor, draw)
    except (RuntimeError, TypeError, IndexError):  # torch has it not of such a tensor
        return tensor


def has_memory(tensor: object) -> bool:
    """Whether ``tensor`` is one that torch can read."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    needed = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    return tensor.untyped_storage().nbytes() >= needed


def _other_bytes(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    made = tensor.detach().clone().contiguous()
    if made.numel() and made.device.type == "cpu":
        flat = made.view(-1).view(torch.uint8)
        for _ in range(draw.choice((1, 1, 3, len(flat)))):
            flat[draw.randrange(len(flat))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
    return made


def _without_memory(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    made = tensor.detach().clone()
    made.untyped_storage().resize_(draw.choice((0, 1, made.nbytes // 2)))
    return made


def _shared(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Of the same memory, from another element on."""
    at = min(draw.choice((0, 1, 3)), tensor.numel())
    return tensor.detach().as_strided((tensor.numel() - at,), (1,), tensor.storage_offset() + at)


def _reshaped(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    rows = draw.choice((1, 2, 3, 16, 64, max(tensor.numel(), 1)))
    flat = tensor.detach().contiguous().view(-1)
    return flat[: flat.numel() // rows * rows].view(rows, -1)


def _in_a_larger(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Contiguous, at an odd address."""
    at = draw.choice((1, 2, 3, 5, 7))
    whole = torch.zeros(at + tensor.numel() + 2, dtype=tensor.dtype)
    made = whole[at : at + tensor.numel()].view(tensor.shape)
    return made.copy_(tensor.detach()) if tensor.device.type == "cpu" else made


_WAYS: tuple[Callable[[torch.Tensor, random.Random], Any], ...] = (
    _other_bytes,
    _other_bytes,
    _without_memory,
    _shared,
    _reshaped,
    _in_a_larger,
    lambda tensor, draw: tensor.detach().to(draw.choice(_DTYPES)),
    lambda tensor, draw: tensor.detach().contiguous().view(-1).view(draw.choice(_DTYPES[-5:])),
    lambda tensor, draw: tensor[: draw.choice((0, 1, -1))] if tensor.dim() else tensor[None],
    lambda tensor, draw: torch.cat([tensor, tensor]) if tensor.dim() else tensor.reshape(1, 1),
    lambda tensor, draw: tensor.detach().t().contiguous().t() if tensor.dim() == 2 else tensor,
    lambda tensor, draw: torch.stack([tensor, tensor], -1)[..., 0],
    lambda tensor, draw: tensor[..., :1].expand(tensor.shape) if tensor.dim() else tensor,
    lambda tensor, draw: torch._neg_view(tensor.detach().to_dense()),
    lambda tensor, draw: tensor.detach().to("meta"),
    lambda tensor, draw: tensor.detach().to_sparse(),
    lambda tensor, draw: torch.zeros(tensor.shape).requires_grad_(),
    lambda tensor, draw: torch.nn.Parameter(tensor, requires_grad=False),
    lambda tensor, draw: zerocast.quantize(torch.ones(32, 32), "nvfp4"),
    lambda tensor, draw: tensor.tolist(),
    lambda tensor, draw: torch.ones(tensor.shape).numpy(),
    lambda tensor, draw: torch.zeros(()),
    lambda tensor, draw: torch.zeros(0),
)


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return ``data`` with some bytes changed, cut off, repeated or inserted."""
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(made) + 1)
        match draw.randrange(6):
            case 0 | 1 if at < len(made):
                made[at] ^= 1 << draw.randrange(8)
            case 2 if at < len(made):
                made[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x7B, 0x5B, 0x2D, 0x39))
            case 3:
                odd = draw.choice([each for each in ODD if type(each) is int])
                made[at : at + 8] = (odd % 2**64).to_bytes(8, "little")
            case 4:
                del made[at : at + draw.choice((1, 8, 100, len(made)))]
            case 5:
                end = at + draw.choice((1, 8, 40))
                made[at:at] = made[at:end] * draw.choice((1, 1, 300))
    return bytes(made)


def odd_file(file: Path, others: Sequence[Path], draw: random.Random) -> None:
    """Put in the place of a file another one, a link, a pipe, a directory or nothing."""
    size = file.stat().st_size
    file.unlink()
    match draw.randrange(9):
        case 0:
            file.symlink_to(draw.choice(("/dev/zero", file, file.parent, "/proc/self/mem")))
        case 1:
            file.symlink_to(draw.choice(others))
        case 2:
            os.mkfifo(file)
        case 3:
            file.mkdir()
        case 4 | 5:
            shutil.copyfile(draw.choice([each for each in others if each != file]), file)
        case 6:
            file.write_bytes(b"")
        case 7:
            file.touch()  # of zeros, which take no memory until they are read whole
            largest = 2**40 if file.suffix == ".safetensors" else 2**20
            os.truncate(file, draw.choice((size, largest)))


def times(draw: random.Random) -> range:
    """Return how many changes an input has: mostly one."""
    return range(draw.choice((1, 1, 1, 1, 2, 2, 3, 8)))
