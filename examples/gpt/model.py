"""A byte-level GPT, in plain torch: nothing here knows how weights are stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256


class GPT(nn.Module):
    """Predicts the next byte from at most ``context`` bytes; 3.3 million parameters."""

    context = 128

    def __init__(
        self,
        layers: int = 4,
        width: int = 256,
        heads: int = 4,
        block: Callable[[int, int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        block = Block if block is None else block
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(self.context, width)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each block adds to the stream twice; that keeps the stream's variance at 1.
                shrink = (2 * layers) ** -0.5 if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * shrink)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss in nats a byte; ``inputs`` and ``targets`` are int64 [batch, time]."""
        x = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on the normalized stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] -> the same shape."""
        x = x + self.attention_out(self.attend(self.attention_in(self.attention_norm(x))))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """[batch, time, 3 * width] -> [batch, time, width]."""
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(-2)


class HeadByHead(Block):
    """A block whose ``attention_in`` gives query, key and value of one head after the other, so
    that ranks can have some of the heads each.
    """

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """[batch, time, 3 * width of the heads here] -> [batch, time, width of the heads here]."""
        head_width = self.attention_in.in_features // self.heads
        q, k, v = qkv.unflatten(-1, (-1, 3, head_width)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(-2)
