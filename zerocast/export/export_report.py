"""The report of :func:`zerocast.export.save_pretrained`."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from zerocast.arguments import counted, shown_bytes


@dataclass(frozen=True)
class ExportReport:
    """A report of what :func:`save_pretrained` wrote; ``str`` returns it as a few lines.

    Attributes:
        directory: the directory of the files.
        files: the bytes of each file, by name.
        formats: by the name in the checkpoint of each parameter and buffer, the name of its
            dialect, or its dtype if it is not quantized.
    """

    directory: Path
    files: dict[str, int]
    formats: dict[str, str]

    def __str__(self) -> str:
        lines = [
            f"{self.directory}: {counted(len(self.files), 'file')}, "
            f"{shown_bytes(sum(self.files.values()))}"
        ]
        for form, count in Counter(self.formats.values()).items():
            names = (name for name, its in self.formats.items() if its == form)
            layers = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
            named = (f"{name} ({n})" if n > 1 else name for name, n in layers.items())
            lines.append(f"  {form}, {counted(count, 'tensor')}: {', '.join(named)}")
        return "\n".join(lines)
