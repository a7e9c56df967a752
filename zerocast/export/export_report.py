"""What :func:`zerocast.export.save_pretrained` has written, in numbers and as text."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ExportReport:
    """What :func:`save_pretrained` has written; printed, it is a few lines.

    Attributes:
        directory: where.
        files: the bytes of each file, by name.
        formats: of each parameter and buffer, by its name in the checkpoint: the name of the
            dialect whose codes it has, or the dtype of what stays in high precision.
    """

    directory: Path
    files: dict[str, int]
    formats: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.directory}: {len(self.files)} files, {sum(self.files.values()):,} bytes"]
        for form, count in Counter(self.formats.values()).items():
            names = (name for name, its in self.formats.items() if its == form)
            layers = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
            named = (f"{name} ({n})" if n > 1 else name for name, n in layers.items())
            lines.append(f"  {form}, {count} tensors: {', '.join(named)}")
        return "\n".join(lines)
