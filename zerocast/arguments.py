"""Checks of the arguments of public calls: one for each kind, made before the argument is used.

Each check returns the value in the form that the package works with, or raises
:class:`zerocast.InputError` with the argument's name, what it must be and what was given. Recipes
are checked by ``zerocast.recipes.as_recipe``, groups by ``zerocast.comm.as_communicator``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from zerocast.errors import InputError


def shown(value: object) -> str:
    """Return ``value`` for a message: short, and printable everywhere."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_flag(name: str, value: object) -> bool:
    """Check that it is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {shown(value)}.")
    return value


def check_integer(name: str, value: object, least: int, most: int) -> int:
    """Check that it is an integer from ``least`` to ``most``, both included."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InputError(f"{name} must be an integer from {least} to {most}, got {shown(value)}.")
    return value


def check_number(name: str, value: object) -> float:
    """Check that it is an int or a float of Python's."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{name} must be a number, got {shown(value)}.")
    return value


def check_text(name: str, value: object) -> str:
    """Check that it is a text that UTF-8 can write."""
    if not isinstance(value, str):
        raise InputError(f"{name} must be a text, got {shown(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} must be a text that UTF-8 can write, got {shown(value)}; a lone surrogate is "
            f"no character."
        ) from error
    return value


def check_shape(name: str, value: Any) -> torch.Size:
    """Check that it is the shape of fewer than 2**63 elements; torch's symbolic ones pass."""
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
    """Check that torch can make a device of it; None is torch's default device."""
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
    """Check that it is a tensor whose elements lie in memory by strides."""
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{name} must be a torch.Tensor, got {type(value).__name__}.")
    if value.layout != torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else value.layout
        raise InputError(
            f"{name} must be a dense tensor, of layout torch.strided, got {shown(value)} of layout "
            f"{layout}; use .to_dense()."
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise InputError(
            f"{name} must be a tensor with memory of its own, got {shown(value)} of a torch.func "
            f"transform; call this outside of the transform."
        )
    return value


def check_dtype(name: str, value: object) -> torch.dtype:
    """Check that it is a floating-point dtype; None is torch's default dtype."""
    if value is None:
        return torch.get_default_dtype()
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise InputError(
            f"{name} must be a floating-point torch.dtype, or None for the default one, got "
            f"{shown(value)}."
        )
    return value


def check_module(name: str, value: object) -> torch.nn.Module:
    """Check that it is a module, and not its class."""
    if not isinstance(value, torch.nn.Module):
        raise InputError(f"{name} must be a torch.nn.Module, got {shown(value)}.")
    return value


def check_fields(owner: Any) -> None:
    """Check that the fields of a dataclass whose defaults are flags, numbers or texts are of the
    same kind. Where the default is a text, the field may be a function.
    """
    checks = {bool: check_flag, float: check_number, str: check_text}
    for field in fields(owner):
        given, kind = getattr(owner, field.name), type(field.default)
        if kind in checks and not (kind is str and callable(given)):
            checks[kind](field.name, given)
