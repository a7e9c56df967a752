"""Gives the fields of a recipe, which ranks compare, as texts that are equal in all processes.

A function is compared by its module and name, byte code, constants, names, defaults, and the values
that it closes over, as far as their texts differ. What it reads from elsewhere (globals, files) is
not compared. A function that ranks import from one file is the same one.
"""

import hashlib
import re
from dataclasses import fields
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from zerocast.recipes.recipe import Recipe

_DEPTH = 8
"""The depth of the comparison, because functions may close over themselves."""


def recipe_fields(recipe: Recipe) -> dict[str, str]:
    """Return every field of ``recipe``, defaults too; a function as its name and a digest."""
    return {field.name: _text(getattr(recipe, field.name)) for field in fields(recipe)}


def describe_recipe(recipe: Recipe) -> str:
    """Return the recipe as a short text that is the same on every rank: without addresses of
    functions, which differ between processes.
    """
    return _without_addresses(repr(recipe))


def _text(value: Any) -> str:
    if not callable(value) or isinstance(value, type):
        return _without_addresses(repr(value))
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"
    return f"{name}#{hashlib.sha256(_parts(value, _DEPTH).encode()).hexdigest()[:8]}"


def _parts(value: Any, depth: int) -> str:
    """Return the parts of ``value`` that can be compared, as a text."""
    if not depth:
        return ""
    parts: list[Any]
    if isinstance(value, CodeType):
        parts = [value.co_code, value.co_names, *value.co_consts]
    elif isinstance(value, FunctionType):
        closed_over = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, *closed_over]
    elif isinstance(value, MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *sorted(value.keywords.items())]
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif isinstance(value, set | frozenset):
        parts = sorted(value, key=repr)
    elif isinstance(value, dict):
        parts = [*value.items()]
    elif " at 0x" in repr(value):  # an object whose repr is the default one
        call = type(value).__dict__.get("__call__", "")
        parts = [type(value).__qualname__, call, getattr(value, "__dict__", "")]
    else:
        return _without_addresses(repr(value))
    return f"{type(value).__name__}[{', '.join(_parts(part, depth - 1) for part in parts)}]"


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)
