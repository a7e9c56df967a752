"""What scripts/gpu_rows.py trains: a decoder in the shapes of Llama, on bytes of this repository.

Plain torch, so that a GPU needs no other package than zerocast does; positions are learned, as in
the examples' GPT. The text is the repository's own, which is there wherever the script is; its
digest says of two losses whether they are of the same text.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from examples.gpt.data import HELD_OUT, Corpus
from examples.gpt.model import GPT

ROOT = Path(__file__).parents[1]
PARTS = ("cuda_src", "docs", "examples", "tests", "zerocast")  # scripts/results grows meanwhile
SUFFIXES = (".cpp", ".cu", ".h", ".md", ".py")


class ByteLlama(GPT):
    """Predicts the next byte: FP32 logits [batch, time, 256] of int64 inputs [batch, time]."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        self.context = context
        super().__init__(layers, width, heads, LlamaBlock)
        self.norm = nn.RMSNorm(width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()


class LlamaBlock(nn.Module):
    """Attention of half as many keys as queries, and a gated perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width, hidden = width // heads, -(-8 * width // 96) * 32
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.attention_out = (
            nn.Linear(width, out, bias=False) for out in (width, width // 2, width // 2, width)
        )
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.mlp_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] -> the same shape."""
        y = self.norm_1(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        y = self.norm_2(x)
        return x + self.mlp_out(F.silu(self.gate(y)) * self.up(y))


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
