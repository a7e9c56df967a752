"""What scripts/gpu_rows.py trains: a decoder in the shape of Llama, on bytes of this repository.

Plain torch, so that a GPU needs no other package than zerocast does. The text is the repository's
own, which is there wherever the script is; its digest says of two losses whether they are of the
same text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from examples.gpt.data import HELD_OUT, Corpus
from examples.gpt.model import VOCABULARY

ROOT = Path(__file__).parents[1]
PARTS = ("cuda_src", "docs", "examples", "scripts", "tests", "zerocast")
SUFFIXES = (".cpp", ".cu", ".h", ".md", ".py")


@dataclass(frozen=True)
class Decoder:
    """The sizes of a model: ``heads`` of queries, a fourth of them of keys and values."""

    layers: int
    width: int
    hidden: int
    heads: int
    context: int


class ByteLlama(nn.Module):
    """Predicts the next byte: FP32 logits [batch, time, 256] of int64 inputs [batch, time]."""

    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, sizes.width)
        self.layers = nn.ModuleList(LlamaLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each layer adds to the stream twice; that keeps the stream's variance at 1.
                shrink = (
                    (2 * sizes.layers) ** -0.5 if name.endswith(("o.weight", "down.weight")) else 1
                )
                nn.init.normal_(parameter, std=0.02 * shrink)
        half = sizes.width // sizes.heads // 2
        rates = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(sizes.context).float(), rates)
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x, turns = self.embed(inputs), self.turns[:, : inputs.shape[1]]
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(self.norm(x)).float()


class LlamaLayer(nn.Module):
    """Grouped attention with rotated positions, and a gated perceptron."""

    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        width, narrow = sizes.width, sizes.width // 4
        self.head_width = width // sizes.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, out, bias=False) for out in (width, narrow, narrow, width)
        )
        self.gate, self.up = (nn.Linear(width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] and the cosines and sines [2, time, head width / 2]."""
        y = self.norm_1(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            rotated(q, turns), rotated(k, turns), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """``x``, [batch, heads, time, head width], whose pairs are turned by their positions."""
    (a, b), (cos, sin) = x.chunk(2, -1), turns.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@cache
def load_text() -> tuple[Corpus, str]:
    """The text of the repository, in the order of its paths, and its digest."""
    parts = {False: bytearray(), True: bytearray()}
    for path in sorted(path for part in PARTS for path in (ROOT / part).rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            digest = hashlib.sha256(path.relative_to(ROOT).as_posix().encode()).digest()
            parts[digest[0] % HELD_OUT == 0] += path.read_bytes()
    digest = hashlib.sha256(parts[False]).hexdigest()[:12]
    return Corpus(*(torch.frombuffer(parts[held], dtype=torch.uint8) for held in parts)), digest
