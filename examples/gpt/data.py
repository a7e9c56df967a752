"""Text that every machine has: the source of Python's own standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

HELD_OUT = 16
"""Every 16th file or so is held out, chosen by its name alone."""

# Tests are half of the library and unlike the rest; installed packages differ between machines.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Corpus:
    """uint8 [bytes] each; no file has a part in both."""

    training: torch.Tensor
    validation: torch.Tensor

    def __str__(self) -> str:
        return (
            f"{self.training.numel() / 1e6:.1f} MB of the standard library to train on, "
            f"{self.validation.numel() / 1e6:.1f} MB held out"
        )


def load_corpus() -> Corpus:
    """All source files of the standard library, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    parts = {False: bytearray(), True: bytearray()}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not LEFT_OUT.intersection(name.parts):
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            parts[digest[0] % HELD_OUT == 0] += path.read_bytes()
    return Corpus(*(torch.frombuffer(parts[held], dtype=torch.uint8) for held in (False, True)))


def sample(
    data: torch.Tensor, sequences: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 [sequences, context], from random places in ``data``."""
    starts = torch.randint(data.numel() - context, (sequences,), generator=generator)
    windows = data[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
