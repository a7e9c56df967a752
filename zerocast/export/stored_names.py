"""The names of tensors in a checkpoint, and their order there."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from zerocast.errors import InputError
from zerocast.export.dialects import Dialect, stored_name
from zerocast.export.entries import Entry, Names
from zerocast.export.mixed import MixedDialect


def stored_order(entry: Entry) -> list[tuple[str, int]]:
    """Return a key that sorts entries by their names in the checkpoint, 9 before 10: so the order
    of modules in a model does not change which tensors are in one file.
    """
    return [(text, int(number or -1)) for text, number in _TEXT_AND_NUMBER.findall(entry.stored)]


_TEXT_AND_NUMBER = re.compile(r"(\D*)(\d*)")


def renamed(entries: Sequence[Entry], names: Names, dialect: Dialect) -> list[Entry]:
    """Return ``entries`` under their names in a checkpoint of ``dialect``.

    Raises:
        InputError: if two entries or stored tensors get the same name, a name is not a string, or
            a quantized weight gets a name that ``dialect`` stores in another format.
    """
    if not (names is None or callable(names) or isinstance(names, Mapping)):
        raise InputError(
            f"names must be a mapping from names of parameters to those of the checkpoint, a "
            f"function of a name, or None, got {type(names).__name__}."
        )
    found: list[Entry] = []
    taken: dict[str, str] = {}
    for entry in entries:
        name = checkpoint_name(names, entry.name)
        stays_fused = isinstance(names, Mapping) and entry.name in names
        own = () if stays_fused else entry.parts
        parts = tuple(checkpoint_name(names, part) for part in own)
        its_own = [*parts] or [name]
        if isinstance(name, str) and entry.recipe is not None:
            named = dialect.of(name)
            if named != entry.dialect and not isinstance(named, MixedDialect):
                raise InputError(
                    f"{entry.name} is stored as {entry.dialect.name}, and names gives it that of a "
                    f"weight of {named.name}: {name}."
                )
            its_own = [stored_name(name, part) for part in entry.dialect.names]
        for each in its_own:
            if not isinstance(each, str) or each in taken:
                which = f"both {taken[each]} and {entry.name}" if each in taken else entry.name
                raise InputError(
                    f"names must give each tensor a unique name, got {each!r} for {which}."
                )
            taken[each] = entry.name
        found.append(dataclasses.replace(entry, exported_as=name, parts=parts))
    return found


def checkpoint_name(names: Names, name: str) -> str:
    """Return the name in the checkpoint of the parameter ``name``."""
    if names is None:
        return name
    return names(name) if callable(names) else names.get(name, name)
