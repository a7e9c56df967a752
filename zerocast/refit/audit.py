"""audit: lists the format of every sent tensor, and compares it with a server's configuration."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.export import Export
from zerocast.export.entries import Entry
from zerocast.export.mixed import module_of_experts
from zerocast.tensors import QuantizedStorage

_MOST_NAMED = 8


@dataclass(frozen=True)
class Travels:
    """The format in which one parameter or buffer is sent.

    Attributes:
        name: its name in the checkpoint.
        tensors: its tensors there by name, on the meta device, with their shapes and dtypes.
        recipe: the class name of the recipe that quantizes it; None if it is not quantized.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    recipe: str | None

    def __str__(self) -> str:
        stored = ", ".join(
            f"{name} {str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
            for name, each in self.tensors.items()
        )
        return f"{self.name}: {self.recipe or 'not quantized'} ({stored})"


def travels(export: Export) -> list[Travels]:
    """Return the format of each parameter and buffer of an export, in its order."""
    return [_travels(entry) for entry in export.entries]


def _travels(entry: Entry) -> Travels:
    shape, recipe, meta = entry.shape, entry.recipe, torch.device("meta")
    if recipe is None:
        stored = torch.empty(shape, dtype=entry.dtype, device=meta)
        return Travels(entry.stored, entry.named(stored), None)
    weight = QuantizedStorage.empty(shape, entry.dtype, recipe, meta, columnwise=False)
    parts = entry.dialect.encode(weight)
    tensors = {entry.stored_name(part): tensor for part, tensor in parts.items()}
    return Travels(entry.stored, tensors, type(recipe).__name__)


def check_config(export: Export, config: Mapping[str, Any]) -> None:
    """Compare an export with the ``quantization_config`` of a server's ``config.json``.

    Raises:
        InputError: if the formats differ, or a module is quantized on one side only; it names the
            modules. Also for an optimizer or a plan whose ``modules`` are not known.
    """
    dialect = export.dialect
    unquantized, section = export.config.unquantized, export.config.section()
    wrong = [
        f"{key} is {config.get(key)!r} at the server and {value!r} here"
        for key, value in section.items()
        if key not in ("quantization_status", "producer", dialect.unquantized_key)
        if not _includes(config.get(key), value)
    ]
    ignored = config.get(dialect.unquantized_key) or ()
    plain = []
    for entry in export.entries:
        module = entry.module
        # The name of a module of experts matches each expert, unless layers are matched.
        experts = None if dialect.matches_layers else module_of_experts(entry.stored)
        names = [module] if experts is None else [module, experts]
        if entry.recipe is not None and any(is_named(name, ignored) for name in names):
            plain.append(module)
    listed = unquantized if dialect.unquantized_key else ()
    missing = [module for module in listed if not is_named(module, ignored)]
    if plain:
        wrong.append(f"the server takes as not quantized {_listed(plain)}, which is here")
    if missing:
        wrong.append(
            f"the server expects quantized {_listed(missing)}, which travels in high precision; "
            f"name it under {dialect.unquantized_key}, or convert or include it"
        )
    if wrong:
        raise InputError(
            f"the weights are sent as {dialect.name}, which must be what the server's "
            f"quantization_config says: {'; '.join(wrong)}."
        )


def _includes(given: Any, required: Any) -> bool:
    """Return whether a part of a configuration has at least the required items.

    Lists must be equal, except ``targets``, which must have at least the required ones.
    """
    if isinstance(required, Mapping):
        return isinstance(given, Mapping) and all(
            set(given.get(key) or ()) >= set(value)
            if key == "targets"
            else _includes(given.get(key), value)
            for key, value in required.items()
        )
    return bool(given == required)


def is_named(module: str, patterns: Sequence[str]) -> bool:
    """Return whether one of ``patterns`` matches the name of a module.

    A pattern is the exact name, has ``*``, or is ``re:`` and a regular expression, which must match
    at the start. A pattern without ``re:`` must match the whole name.
    """
    return any(
        re.match(pattern[3:], module) is not None
        if pattern.startswith("re:")
        else fnmatch.fnmatchcase(module, pattern)
        for pattern in patterns
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
