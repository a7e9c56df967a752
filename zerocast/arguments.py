"""Checks the arguments of public calls, and which tensors may be read and written by address.

Each check returns the value in the form that the package uses, or raises
:class:`zerocast.InputError` with the argument's name, the requirement and the given value.
``zerocast.recipes.as_recipe`` checks recipes, ``zerocast.comm.as_communicator`` checks groups.
"""

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar

import torch

from zerocast.errors import InputError

Device: TypeAlias = torch.device | str | None
"""A device, its name, or None for the default device, as :func:`check_device` accepts them."""

Value = TypeVar("Value")

_HOLDS_MEMORY = torch.Tensor.__torch_dispatch__
_TRANSFORMED = "a tensor of a torch.func transform; call this outside of the transform"


def shown_bytes(count: float) -> str:
    """Return a number of bytes in B, kB, MB or GB (powers of 1000), with two decimals or none."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:.0f} B"


def counted(count: int, noun: str) -> str:
    """Return "1 tensor" or "3 tensors"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shown(value: object) -> str:
    """Return a short ASCII description of ``value`` for a message."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return " Did you mean 'nvfp4'?", with the names that are near ``given``, or of which a part
    between dots is near a part of it; an empty string if none is.
    """
    if not isinstance(given, str):
        return ""
    by_part: dict[str, list[str]] = {}
    for name in known:
        for part in dict.fromkeys((name, *name.split("."))):
            by_part.setdefault(part.lower(), []).append(name)
    pieces = [each for each in re.split(r"[.*?]+", given.lower()) if each and each not in by_part]
    found = (difflib.get_close_matches(each, by_part, 3) for each in (given.lower(), *pieces))
    near = dict.fromkeys(repr(n) for parts in found for part in parts for n in by_part[part])
    return f" Did you mean {' or '.join(list(near)[:3])}?" if near else ""


def present(value: Value | None) -> Value:
    """Return ``value``, which the caller knows is not None."""
    assert value is not None
    return value


def check_flag(name: str, value: object) -> bool:
    """Check that the value is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {shown(value)}.")
    return value


def check_integer(name: str, value: object, least: int, most: int) -> int:
    """Check that the value is an integer from ``least`` to ``most``, inclusive."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InputError(f"{name} must be an integer from {least} to {most}, got {shown(value)}.")
    return value


def check_number(name: str, value: object) -> float:
    """Check that the value is a Python int or float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{name} must be a number, got {shown(value)}.")
    return value


def check_text(name: str, value: object) -> str:
    """Check that the value is a string that UTF-8 can encode."""
    if not isinstance(value, str):
        raise InputError(f"{name} must be a string, got {shown(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} must be a string that UTF-8 can encode, got {shown(value)}; remove lone "
            "surrogates."
        ) from error
    return value


def check_names(name: str, values: Sequence[str]) -> None:
    """Check that the names under which weights are saved and sent are unique."""
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        remedy = "add a prefix, such as the name of its model"
        raise InputError(
            f"{name} must give each weight a unique name, got {twice} more than once; {remedy}."
        )


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Check that the value is one of two or more strings."""
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        raise InputError(f"{name} must be {', '.join(others)} or {last}, got {shown(value)}.")
    return value


def check_shape(name: str, value: Any) -> torch.Size:
    """Check that the value is a shape of fewer than 2**63 elements. Symbolic dimensions pass."""
    is_shape = isinstance(value, Sequence) and all(
        isinstance(n, int | torch.SymInt) and not isinstance(n, bool) and n >= 0 for n in value
    )
    if not is_shape or math.prod(value) >= 2**63:
        raise InputError(
            f"{name} must be a sequence of integers, the dimensions of fewer than 2**63 elements, "
            f"got {shown(value)}."
        )
    return torch.Size(value)


def check_device(name: str, value: Any) -> torch.device:
    """Return the value as a torch.device; None gives torch's default device."""
    if value is None:
        return torch.get_default_device()
    try:
        return torch.device(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{name} must be a torch.device, its name such as 'cuda:0', or None for the default "
            f"one, got {shown(value)}."
        ) from error


def check_tensor(name: str, value: object) -> torch.Tensor:
    """Check that the value is a dense (strided, not nested) tensor."""
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{name} must be a torch.Tensor, got {type(value).__name__}.")
    if (problem := _why_not_dense(value)) is not None:
        raise InputError(f"{name} must be a dense tensor, got {problem}.")
    return value


def check_memory(name: str, value: torch.Tensor) -> None:
    """Check that the tensor's memory holds all its elements, with any strides. Wrapper subclasses
    and tensors that torch.compile traces have no memory and pass.
    """
    if torch.compiler.is_compiling() or type(value).__torch_dispatch__ is not _HOLDS_MEMORY:
        return
    problem = _TRANSFORMED if torch._is_functional_tensor(value) else _why_cut(value)
    if problem is not None:
        raise InputError(f"{name} must hold its values, got {problem}.")


def check_dtype(name: str, value: object) -> torch.dtype:
    """Check that the value is a floating-point dtype; None gives torch's default dtype."""
    if value is None:
        return torch.get_default_dtype()
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise InputError(
            f"{name} must be a floating-point torch.dtype, or None for the default one, got "
            f"{shown(value)}."
        )
    return value


def check_module(name: str, value: object) -> torch.nn.Module:
    """Check that the value is a module instance."""
    if not isinstance(value, torch.nn.Module):
        raise InputError(f"{name} must be a torch.nn.Module, got {shown(value)}.")
    return value


def check_fields(owner: Any) -> None:
    """Check each dataclass field whose default is a bool, float or str against that type. If the
    default is a str, the field may also be a callable.
    """
    checks = {bool: check_flag, float: check_number, str: check_text}
    for field in fields(owner):
        given, kind = getattr(owner, field.name), type(field.default)
        if kind in checks and not (kind is str and callable(given)):
            checks[kind](field.name, given)


def why_no_memory(tensor: torch.Tensor) -> str | None:
    """Return why ``tensor`` has no memory that holds its elements in its dtype, and what to do;
    None if it has. Strides are not checked.
    """
    kind = type(tensor)
    if kind.__torch_dispatch__ is not _HOLDS_MEMORY:
        return (
            f"a {kind.__name__}, which wraps other tensors; give a plain tensor: .to_local() of a "
            "DTensor, an FP32 master in place of a quantized weight"
        )
    if (problem := _why_not_dense(tensor)) is not None:
        return problem
    if torch._is_functional_tensor(tensor):
        return _TRANSFORMED
    if tensor.is_meta:
        return "a tensor on the meta device, which holds no values; call to_empty and fill it"
    if tensor.is_neg() or tensor.is_conj():
        return "a view with the negative or conjugate bit set; call .resolve_neg().resolve_conj()"
    return _why_cut(tensor)


def _why_cut(tensor: torch.Tensor) -> str | None:
    """Return why the memory of ``tensor`` does not hold all its elements; None if it does."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() and held < needed:
        return (
            f"a tensor of {tensor.numel()} elements whose storage was freed or resized, {held} of "
            f"{needed} bytes; give one that holds its values"
        )
    return None


def why_unusable(tensor: object, dtypes: Sequence[torch.dtype], device: torch.device) -> str | None:
    """Return why ``tensor`` is not a contiguous tensor of one of ``dtypes`` on ``device``.

    The text also says what to do. Return None if the tensor is usable by its address.
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


def _why_not_dense(tensor: torch.Tensor) -> str | None:
    """Return why ``tensor`` is not dense; None if it is."""
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        return f"a {layout} tensor; give a dense one, such as .to_dense()"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return _TRANSFORMED
    return None
