"""StoredWeights: the weights of a directory of safetensors files, read one at a time.

The dialect of each weight is found by the names, dtypes and shapes of its tensors, because the
sections that other programs write to ``config.json`` differ in details. Dialects that store a
weight in the same way are all of them; they differ in the formula by which it was cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from zerocast.errors import InputError
from zerocast.export import DIALECTS, Dialect
from zerocast.export.dialects import stored_name
from zerocast.export.pretrained_loading import read_configuration
from zerocast.export.stored_files import StoredFiles


@dataclass(frozen=True)
class StoredWeight:
    """How a checkpoint stores a parameter or buffer.

    Attributes:
        dialects: the dialects that store a weight in this way; empty if it is not quantized.
        names: the names of its tensors in the checkpoint, in the order of :attr:`Dialect.names`.
    """

    dialects: tuple[Dialect, ...]
    names: tuple[str, ...]


class StoredWeights:
    """The weights of a checkpoint, of which only the headers are read in advance.

    Attributes:
        folder: the directory.
        by_name: every parameter and buffer by its name.
    """

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises:
            InputError: if a file is missing, damaged or not in the directory, or two files have a
                tensor of one name.
        """
        self.folder, self._files = folder, StoredFiles(folder)
        like = self._files.likes
        named = read_configuration(folder) if (folder / "config.json").is_file() else {}
        section = named.get("quantization_config")
        known = sorted(  # first those that the checkpoint names
            DIALECTS.values(),
            key=lambda each: not isinstance(section, dict) or not each.has_section(section),
        )
        self.by_name: dict[str, StoredWeight] = {}
        parts = set[str]()
        for name in like:
            found: dict[tuple[str, tuple[str, ...]], list[Dialect]] = {}
            for dialect in known:
                parameter, part = dialect.parameter_of(name) or ("", "")
                names = {own: stored_name(parameter, own) for own in dialect.names if part}
                held = {own: like[each] for own, each in names.items() if each in like}
                if part == dialect.codes and dialect.fits(held):
                    found.setdefault((parameter, tuple(names.values())), []).append(dialect)
            if found:
                (parameter, stored), dialects = next(iter(found.items()))
                self.by_name[parameter] = StoredWeight(tuple(dialects), stored)
                parts.update(stored)
        others = [name for name in like if name not in parts]
        if twice := self.by_name.keys() & others:
            raise InputError(f"{folder} has {min(twice)} twice, once in codes.")
        self.by_name |= {name: StoredWeight((), (name,)) for name in others}

    def tensors(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return the stored tensors of the parameter or buffer ``name``, on the CPU."""
        return tuple(self._files.tensors[each].whole() for each in self.by_name[name].names)

    def describe(self, name: str) -> str:
        """Return how the parameter ``name`` is stored: its dialect, or its dtype."""
        weight = self.by_name.get(name)
        if weight is None:
            return ""
        dtype = str(self._files.tensors[name].like.dtype) if not weight.dialects else ""
        return weight.dialects[0].name if weight.dialects else dtype.removeprefix("torch.")
